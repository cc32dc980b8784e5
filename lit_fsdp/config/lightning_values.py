"""Values of keys that are Lightning's own, where it would answer with a traceback, or only in the job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lit_fsdp.errors import ConfigError

LARGEST_SEED = 2**32 - 1
"""That numpy takes."""


def check_seed(seed: Any) -> None:
    """Raise ConfigError unless ``seed_everything`` is a number that Lightning takes, a switch or null."""
    number = int(seed) if isinstance(seed, str) and seed.isdecimal() else seed
    if seed is None or isinstance(seed, bool) or (isinstance(number, int) and 0 <= number <= LARGEST_SEED):
        return
    allowed = f"a whole number from 0 to {LARGEST_SEED}, true, false or null"
    raise ConfigError("seed_everything", repr(seed), allowed, "write seed_everything: 1234")


def check_counts(trainer: Mapping[str, Any]) -> None:
    """Raise ConfigError unless nodes and gradient clipping of the Trainer are numbers that mean something."""
    nodes, clip = trainer.get("num_nodes"), trainer.get("gradient_clip_val")
    if nodes is not None and (not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1):
        raise ConfigError("trainer.num_nodes", repr(nodes), "a whole number >= 1", "write num_nodes: 1")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip >= 0):
        raise ConfigError(
            "trainer.gradient_clip_val",
            repr(clip),
            "a number above 0; 0 or null: no clipping",
            "write gradient_clip_val: 1.0",
        )
    algorithm = trainer.get("gradient_clip_algorithm")
    if algorithm not in (None, "norm", "value"):
        raise ConfigError(
            "trainer.gradient_clip_algorithm", repr(algorithm), "norm | value", "write gradient_clip_algorithm: norm"
        )


def check_run_folder(trainer: Mapping[str, Any]) -> None:
    """Raise ConfigError unless ``default_root_dir`` is the path of a folder, or null."""
    folder = trainer.get("default_root_dir")
    if folder is not None and (not isinstance(folder, str) or not folder.strip() or "\0" in folder):
        raise ConfigError(
            "trainer.default_root_dir", repr(folder), "the path of a folder, or null", "write default_root_dir: runs/x"
        )


def validation_steps(
    steps: int, interval: int, accumulate: int, per_epoch: int | None = None, every_n_epoch: int | None = None
) -> set[int]:
    """The optimizer steps of a run after which Lightning validates.

    Args:
        steps: Of the run.
        interval: Micro-batches between validations.
        accumulate: Micro-batches of an optimizer step.
        per_epoch: Micro-batches of an epoch; None: they do not end, or are not known.
        every_n_epoch: Epochs with validations, in each of which micro-batches are counted anew; None: over all epochs.
    """
    per_epoch = per_epoch or steps * accumulate
    steps_per_epoch = math.ceil(per_epoch / accumulate)
    epochs, n = math.ceil(steps / steps_per_epoch), every_n_epoch
    batches = set(range(interval, epochs * per_epoch + 1, interval))
    if n is not None:
        in_epoch = range(interval, per_epoch + 1, interval)
        batches = {epoch * per_epoch + batch for epoch in range(n - 1, epochs, n) for batch in in_epoch}
    found = {batch // per_epoch * steps_per_epoch + batch % per_epoch // accumulate for batch in batches}
    return {step for step in found if 0 < step <= steps}
