"""A recipe of two nodes with eight GPUs each, and a cluster whose commands only write down how they were called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.config.run import RunConfig
from lit_fsdp.launch.slurm_job import Job, plan_job, render
from tests.runs import check_recipe

_CALLED = 'printf "%s\\0" "$@" >"$FAKE/$(basename "$0").called"\n'
_PROGRAMS = {
    "sbatch": 'cat "$FAKE/sbatch.err" >&2 2>/dev/null\ncat "$FAKE/sbatch.out" 2>/dev/null',
    "scontrol": '[ "$1" != show ] || printf "127.0.0.1\\nn2\\n"\n[ "$1" != requeue ]',  # a requeue is refused
    "srun": 'eval "$STEP"\nexit "$CODE"',
}


def recipe(slurm: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Sections as told beside those of the recipe."""
    gpus = {"accelerator": "gpu", "devices": 8, "num_nodes": 2, "max_steps": 9, "default_root_dir": "/shared/run"}
    slurm = {"command": ["python3", "-m", "lit_fsdp"], **(slurm or {})}
    data = {"train": "generated:640", "global_batch_size": 64}
    model = {"name": {"model_type": "llama"}}
    return {"trainer": {**gpus, **(trainer or {})}, "model": model, "data": data, "slurm": slurm, **more}


def planned(slurm: dict[str, Any] | None = None, ckpt_path: str | None = None, **more: Any) -> tuple[Job, RunConfig]:
    """The job of :func:`recipe`, and its checked recipe."""
    run = check_recipe(recipe(slurm, **more), "fit")
    return plan_job(run, ckpt_path), run


class FakeSlurm:
    """Stand-ins for SLURM's commands."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name, body in _PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/bash\n{_CALLED}{body}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("FAKE", str(folder))
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        (folder / "sbatch.out").write_text("4711\n")

    def words(self, name: str) -> list[str] | None:
        """How a command was called the last time."""
        path = self.folder / f"{name}.called"
        return path.read_text().split("\0")[:-1] if path.exists() else None

    def run(self, job: Job, code: int = 0, step: str = "", start: int = 0) -> subprocess.CompletedProcess[str]:
        """The script of a job, whose step runs a line of shell and ends with a code."""
        fixed = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]"}
        env = {**os.environ, **fixed, "SLURM_RESTART_COUNT": str(start), "CODE": str(code), "STEP": step}
        for path in self.folder.glob("*.called"):
            path.unlink()
        return subprocess.run(["bash"], input=render(job), text=True, capture_output=True, env=env, cwd=self.folder)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A folder with a recipe, and a cluster that takes everything."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_fsdp.commands.slurm.checkpoint_bytes", lambda run: 2**20)
    Path("r.yaml").write_text(yaml.safe_dump(recipe(trainer={"default_root_dir": "run"})))
    return FakeSlurm(tmp_path / "fake", monkeypatch)
