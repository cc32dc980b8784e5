"""How the promises are tried: the command itself, on the quickstart's recipe with a miniature of its model."""

from __future__ import annotations

from pathlib import Path

from tests.dist.forks import ROOT, command
from tests.runs import records

FACTORY = "--trainer.strategy.init_args"
RECIPE = (
    "--config", f"{ROOT}/recipes/quickstart.yaml",
    "--config", f"{ROOT}/configs/debug/smoke.yaml",
    f"{FACTORY}.precision", "fp32",
    "--model.optim.schedule", "constant", "--model.optim.warmup_steps", "0", "--model.optim.lr", "1e-2",
    "--trainer.max_steps", "6", "--checkpoint.every_steps", "2", "--checkpoint.keep_last", "-1",
)  # fmt: skip
"""Two processes, fp32, six steps of four generated conversations, a checkpoint and a validation after every second."""


def run(*words: str | Path, code: int = 0, ranks: int | None = None, job: str = "program") -> tuple[str, str]:
    """Standard output and standard error of ``lit-fsdp WORDS`` in the current folder, which ends with ``code``.

    Ranks, two of a run, are started as torchrun does it, in processes that have their imports already.
    """
    outcomes = command(ranks or (2 if words[0] in ("fit", "validate") else 1), words, Path.cwd(), job, patience=1)
    assert outcomes[0].code == code, f"ended with {outcomes[0].code}:\n{outcomes[0].output[-4000:]}"
    return outcomes[0].out, outcomes[0].err


def fit(run_folder: Path, *flags: str | Path, code: int = 0, ranks: int = 2) -> str:
    """Standard error of a training of :data:`RECIPE` into this run folder."""
    return run("fit", *RECIPE, "--trainer.default_root_dir", run_folder, *flags, code=code, ranks=ranks)[1]


def logged(run_folder: Path, name: str = "train_loss", file: str = "metrics.csv") -> dict[int, str]:
    """A column of ``metrics.csv`` by step, as it is written there: equal text is an equal number, bit for bit."""
    return {int(row["step"]): row[name] for row in records(run_folder / file) if row[name]}


def validated(run_folder: Path, *flags: str | Path) -> str:
    """The loss of a validation with this recipe, as it is written down."""
    run("validate", *RECIPE, "--trainer.default_root_dir", run_folder, "--trainer.limit_val_batches", "1.0", *flags)
    (loss,) = logged(run_folder, "val_loss", "validate-metrics.csv").values()
    return loss


def checkpoint(run_folder: Path, step: int) -> Path:
    """The folder of a step."""
    return run_folder / "checkpoints" / f"step-{step:08}"
