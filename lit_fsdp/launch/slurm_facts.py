"""What is known beside the recipe when a job is checked: of its run folder, this shell and the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lit_fsdp.errors import ConfigError

GIB = 2**30
Found = Iterator[ConfigError | str]
"""Errors, and notes on what could not be checked."""


@dataclass(frozen=True)
class Partition:
    """Nodes of one partition that are alike."""

    name: str
    is_default: bool
    time_limit: int | None
    """Seconds; ``None``: no limit."""
    max_nodes: int | None
    """Of one job; ``None``: no limit."""
    nodes: int
    cpus: int
    """Per node."""
    gpus: int
    """Per node, of all types together."""


@dataclass(frozen=True)
class Facts:
    """What lint knows beside the recipe."""

    checkpoint_bytes: int | None
    """Of one checkpoint, from shapes; ``None`` where the model's config is not at hand."""
    save_seconds: float | None
    """Measured in this run folder; ``None``: estimated from the bytes."""
    environment: Mapping[str, str]
    """Of the shell that submits."""
    num_checkpoints: int | None = None
    """That lie on the disk at the same time; ``None``: not known, as the length of the run is not."""
    num_kept: int = 0
    """Checkpoints that lie in the run folder already."""
    kept_bytes: int = 0
    """Of these."""
    empty_seeds: tuple[int, ...] = ()
    """Of ``slurm.seeds``, those whose folders hold no checkpoint."""
    partitions: tuple[Partition, ...] | None = None
    """Of the cluster; ``None``: not known."""
    no_partitions: str = "no sinfo on this machine"
    """Why they are not known."""
