"""Jobs for a run folder that has checkpoints already."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_fsdp.checkpoint.manifest import MANIFEST, Manifest
from tests.unit.launch.fake_slurm import FakeSlurm
from tests.unit.launch.test_submit import RUN, slurm_command


def leave(step: int, seconds: float | None, run: str = RUN) -> None:
    """A checkpoint of a run, and how long it took to save."""
    folder = Path(run) / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    extra = {} if seconds is None else {"save_seconds": seconds}
    empty = Manifest(
        folder=folder, layout="sharded", global_step=step, world_size=16, created="", versions={}, tensors={},
        files={}, metrics={}, extra=extra,
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(empty.dumps())


def test_every_seed_that_goes_on_has_a_checkpoint(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    words = ("render", "--config", "r.yaml", "--ckpt_path", "last", "--slurm.seeds")
    leave(1, None, f"{RUN}/seed-1")
    assert slurm_command(*words, "[1, 2, 3]") == 2
    err = capsys.readouterr().err
    assert "no checkpoint of seed 2, 3 below" in err
    assert "set slurm.seeds: [1]" in err
    assert slurm_command(*words, "[1]") == 0


def test_a_measured_save_decides_and_the_slowest_of_them(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    """What runs leave behind in the manifests of this run folder."""
    words = ("render", "--config", "r.yaml", "--ckpt_path", "last", "--slurm.signal_lead_seconds")
    leave(1, None)  # written by a version that did not measure
    assert slurm_command(*words, "60") == 0
    leave(2, 400.2)
    leave(3, 30.0)
    assert slurm_command(*words, "429") == 2
    assert "429 with a save of about 400 s (measured in this run folder)" in capsys.readouterr().err
    assert slurm_command(*words, "430") == 0
    assert slurm_command(*words, "430", "--time", "12:09") == 2
    assert slurm_command(*words, "430", "--time", "12:10") == 0
