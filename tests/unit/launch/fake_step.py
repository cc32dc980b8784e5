"""A shell for sbatch files, whose srun and scontrol only write down how they were called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from lit_fsdp.launch.slurm_script import render
from tests.unit.launch.jobs import planned

SLURM = {"command": ["/shared/env/bin/python", "-m", "lit_fsdp"]}


class Cluster:
    """Runs scripts in a shell whose srun and scontrol only write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        record = 'printf "%s\\0" "$@" > "$CALLS/$(basename "$0")-$1"\n'
        (programs / "srun").write_text(f'#!/bin/bash\nset -- srun "$@"\n{record}exit "$STEP_CODE"\n')
        (programs / "scontrol").write_text(
            f'#!/bin/bash\n{record}[ "$1" = show ] && echo 127.0.0.1\n[ "$1" != requeue ]\n'
        )
        for program in programs.iterdir():
            program.chmod(0o755)

    def run(self, text: str, step_code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """The script's result."""
        fixed = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "STEP_CODE": str(step_code)}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": "/nowhere", "CALLS": str(self.folder), **fixed, **environment}
        return subprocess.run(["bash"], input=text, text=True, capture_output=True, env=env, cwd=self.folder)

    def words(self, call: str) -> list[str] | None:
        """How it was called, or ``None``."""
        path = self.folder / call
        return path.read_text().split("\0")[1:-1] if path.exists() else None


def text_of(run_folder: Path, slurm: dict[str, Any] | None = None, **more: Any) -> str:
    job, _ = planned({**SLURM, **(slurm or {})}, trainer={"default_root_dir": str(run_folder)}, **more)
    return render(job)
