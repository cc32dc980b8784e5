"""Estimate the size of checkpoints from tensor shapes, and check that the disk has space for them."""

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from lit_fsdp.checkpoint.run_folder import Found
from lit_fsdp.checkpoint.safetensors_file import num_bytes, spec_of
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import size_words

_BESIDE = 1.02  # manifest, states and headers, as a factor on the bytes of tensors


def checkpoint_bytes(
    model: Mapping[str, torch.Tensor],
    params: Iterable[tuple[str, torch.Tensor]],
    optimizers: Iterable[torch.optim.Optimizer],
) -> int:
    """Estimate the bytes of one checkpoint: its tensors, the future optimizer state, and 2 %.

    Optimizers are assumed to keep two tensors per trained parameter, like AdamW, or their momentum buffers, if any.
    DTensors of ``model`` count with their full shape; the tensors ``params`` are live parameters of the same names,
    maybe sharded.
    """
    specs = {name: spec_of(tensor) for name, tensor in model.items()}
    sizes = {id(param): num_bytes(specs[name]) for name, param in params if name in specs}
    total = sum(map(num_bytes, specs.values()))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            trained = sum(sizes.get(id(param), 0) for param in group["params"] if param.requires_grad)
            total += trained * (bool(group["momentum"]) + ("alpha" in group) if "momentum" in group else 2)
    return round(total * _BESIDE)


def free_bytes(folder: Path) -> int:
    """Return the free bytes for unprivileged users on the file system of ``folder``."""
    return shutil.disk_usage(folder).free


def peak_count(config: CheckpointConfig, steps: int | None, validates: bool) -> int | None:
    """Return the maximum number of checkpoints of a run at a time, including the one being written; None: unknown."""
    best = config.keep_best if validates else 0
    is_limited = config.keep_last != -1 and not config.keep_every
    kept = config.keep_last + best + 1 if is_limited else None
    if steps is None or (best and kept is None):
        return kept
    saves = steps if best else math.ceil(steps / config.every_steps) if config.every_steps else 1
    return saves if kept is None else min(kept, saves)


def check_room(
    config: CheckpointConfig, run_folder: Path, there: Sequence[Found], checkpoint_bytes: int, count: int | None
) -> str:
    """Compare the required with the free disk space, and return both for the log.

    Existing checkpoints (``there``) need no further space, but are deleted only after a new one is complete. The size
    of the largest replaces the estimate ``checkpoint_bytes``. The argument ``count`` (None: unknown) includes them.

    Raises:
        CheckpointError: The file system has too little space.
    """
    checkpoint_bytes = max((entry.num_bytes for entry in there), default=checkpoint_bytes)
    present = sum(entry.num_bytes for entry in there)
    needed = max(checkpoint_bytes * (count or 1) - present, checkpoint_bytes)
    free = free_bytes(run_folder)
    number = "their number is unknown" if count is None else f"at most {count} at a time"
    what = f"checkpoints of {size_words(checkpoint_bytes)}, {number}"
    if needed > free:
        kept = f"keep_last {config.keep_last}, keep_best {config.keep_best}, keep_every {config.keep_every}"
        raise CheckpointError(
            f"{run_folder}: not enough disk space for checkpoints\n"
            f"  needed:  {size_words(needed)} more: {what}\n"
            f"  free:    {size_words(free)} on its file system\n"
            f"  fix:     free {size_words(needed - free)}, keep fewer ({kept}), "
            "or set another trainer.default_root_dir"
        )
    return f"{what}; {size_words(free)} free"
