"""One line of the doctor's table, and what a recipe asks of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GIB, MIB = 2**30, 2**20

Grade = Literal["good", "warning", "bad"]


@dataclass(frozen=True)
class Row:
    """What was looked at, what was found there, and what to do about it."""

    name: str
    found: str
    grade: Grade = "good"
    fix: str = ""
    """What to do; empty only where nothing has to be done."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the recipe, or nobody, asks of the machine."""

    run_folder: Path
    """Absolute; may not exist yet."""
    cache: Path
    """Of tokenised rows and converted models; absolute."""
    accelerator: Literal["cpu", "gpu", "auto"] = "auto"
    devices: int | None = None
    """Processes per node; ``None``: one per device that is there."""
    nodes: int = 1
    checkpoint_bytes: int | None = None
    """Of one checkpoint; ``None``: not known."""
    num_checkpoints: int = 0
    """That lie there at the same time, the one being written included."""
    copies_to_host: bool = False
    """Whether a save copies the state to the host first, to be written in the background."""
    model: str | None = None
    """Hub name, folder or file to start from; ``None``: no recipe, or random init from values."""
    needs_weights: bool = False
    """Whether the model's weights are read, and not only its config."""
    extras: tuple[str, ...] = ()
    """Optional groups of our dependencies that the recipe needs."""
    compute_dtype: str | None = None
    """``bf16``, ``fp16``, ``fp32``, ``fp8`` or ``auto``; ``None``: no recipe."""
    words: str = ""
    """How doctor was called, without ``--nodes``: what has to be said on all nodes too."""
    signal_lead_seconds: int | None = None
    """Seconds before a time limit at which a save begins; ``None``: no SLURM section."""

    def backend(self, num_gpus: int) -> Literal["gloo", "nccl"]:
        """Which library the ranks of this recipe talk by on a machine with so many GPUs."""
        on_gpus = self.accelerator != "cpu" and num_gpus > 0
        return "nccl" if on_gpus else "gloo"


def size_text(num_bytes: float) -> str:
    """Bytes for people: GiB, MiB, KiB or bytes."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes:.0f} bytes"


def shortened(text: str, limit: int = 400) -> str:
    """One line of at most so many characters, the end kept: errors say at the end what happened."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"… {line[-limit:]}"
