"""Checkpoints of somebody else's module, with our callback and with Lightning's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.workers import Workers

ENGINES = ("fsdp2", "fsdp1")


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_rank_0_decides_what_is_best(workers: Workers, tmp_path: Path, engine: str) -> None:
    """A metric without ``sync_dist``: it improves here and worsens there, or one rank alone has it."""
    better, worse, none = [3.0, 2.0, 1.0, 4.0], [1.0, 2.0, 3.0, 0.0], [None] * 4
    cases = [(better, worse, "step-00000003"), (better, none, "step-00000003"), (none, better, "")]
    for index, (first, second, best) in enumerate(cases):
        job = {"strategy": {"engine": engine}, "run": str(tmp_path / str(index)), "told": [first, second]}
        found = workers.run("train_with_own_metrics", 2, **job)
        assert found[0] == found[1]
        assert found[0] == {"there": [name for name in (best, "step-00000004") if name], "best": best}
    job = {"strategy": {"engine": engine}, "run": str(tmp_path / "lightning"), "told": [better, worse]}
    saving = {"filename": "{step}-{val_loss:.0f}", "save_on_train_epoch_end": False}
    found = workers.run("train_with_own_metrics", 2, lightnings=saving, **job)
    assert [one["there"] for one in found] == [["step=1-val_loss=3.ckpt"]] * 2  # what is better on every rank
    assert found[0]["best"] == "step=1-val_loss=3.ckpt"
