"""How the promises are tried: the command itself, on the quickstart's recipe with a miniature of its model."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FACTORY = "--trainer.strategy.init_args"
RECIPE = (
    "--config", f"{ROOT}/recipes/quickstart.yaml",
    "--config", f"{ROOT}/configs/debug/smoke.yaml",
    f"{FACTORY}.precision", "fp32",
    "--model.optim.schedule", "constant", "--model.optim.warmup_steps", "0", "--model.optim.lr", "1e-2",
    "--trainer.max_steps", "6", "--checkpoint.every_steps", "2", "--checkpoint.keep_last", "-1",
)  # fmt: skip
"""Two processes, fp32, six steps of four generated conversations, a checkpoint and a validation after every second."""


def start(*words: str | Path, script: Path | None = None) -> subprocess.Popen[str]:
    """``lit-fsdp WORDS`` in the current folder, or a script, as a process group of its own."""
    program = [str(script)] if script else ["-m", "lit_fsdp"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *program, *map(str, words)]
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]


def run(*words: str | Path, code: int = 0, script: Path | None = None) -> tuple[str, str]:
    """Standard output and standard error of a command that ends with ``code``."""
    process = start(*words, script=script)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, f"ended with {process.returncode}:\n{err[-4000:]}"
    return out, err


def fit(run_folder: Path, *flags: str | Path, code: int = 0) -> str:
    """Standard error of a training of :data:`RECIPE` into this run folder."""
    return run("fit", *RECIPE, "--trainer.default_root_dir", run_folder, *flags, code=code)[1]


def logged(run_folder: Path, name: str = "train_loss") -> dict[int, str]:
    """A column of ``metrics.csv`` by step, as it is written there: equal text is an equal number, bit for bit."""
    with (run_folder / "metrics.csv").open() as file:
        assert name in file.readline().rstrip().split(",")
        file.seek(0)
        return {int(row["step"]): row[name] for row in csv.DictReader(file) if row.get(name)}


def checkpoint(run_folder: Path, step: int) -> Path:
    """The folder of a step."""
    return run_folder / "checkpoints" / f"step-{step:08}"
