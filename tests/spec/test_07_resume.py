"""A resumed run is the run that was never interrupted: bit for bit on as many ranks, within rounding on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spec.running import FACTORY, fit, logged


def test_bit_for_bit(reference: Path, stopped: Path) -> None:
    said = fit(stopped, "--ckpt_path", "last")
    assert "resumed from step 2" in said
    assert "learning rate goes on" not in said
    assert logged(stopped) == logged(reference)
    assert logged(stopped, "val_loss") == logged(reference, "val_loss")


def test_on_four_processes_by_the_other_engine(reference: Path, stopped: Path, tmp_path: Path) -> None:
    """From there on in a run folder of its own."""
    fork, words = tmp_path / "fork", ("--trainer.devices", "4", f"{FACTORY}.engine", "fsdp1")
    said = fit(fork, "--ckpt_path", str(stopped / "checkpoints" / "step-00000002"), *words, ranks=4)
    assert f"resumed from step 2: {stopped}/checkpoints/step-00000002; this run writes to {fork}" in said
    ours, wanted = ({step: float(loss) for step, loss in logged(run).items()} for run in (fork, reference))
    assert ours == pytest.approx({step: wanted[step] for step in wanted if int(step) > 2}, rel=1e-5)


def test_a_used_run_folder_is_not_overwritten(stopped: Path) -> None:
    before = logged(stopped)
    assert "has 1 checkpoint(s)" in fit(stopped, code=2)
    assert logged(stopped) == before
