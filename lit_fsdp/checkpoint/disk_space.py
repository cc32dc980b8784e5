"""How many bytes checkpoints need, and whether there is room for them before it is too late.

A checkpoint's size follows from shapes and dtypes, so it is known before the first step; the space is compared then
for all checkpoints that the run will keep at the same time, and again before each save for the next one.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from lit_fsdp.checkpoint.files import naming
from lit_fsdp.checkpoint.run_folder import FOLDER, Found, moved_aside
from lit_fsdp.checkpoint.safetensors_file import num_bytes, spec_of
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.host import GIB

_BESIDE = 1.02  # manifest, states and headers, as a factor on the bytes of tensors


def checkpoint_bytes(
    model: Mapping[str, torch.Tensor],
    params: Iterable[tuple[str, torch.Tensor]],
    optimizers: Iterable[torch.optim.Optimizer],
) -> int:
    """Bytes of one checkpoint before there is one: its tensors, those that the optimizer will have too, and 2 %.

    An optimizer is taken to keep two tensors per trained parameter, as AdamW does; SGD keeps its momentum, if any.
    DTensors of ``model`` count as a whole; ``params`` are live ones by the same names, perhaps only a part of each.
    """
    specs = {name: spec_of(tensor) for name, tensor in model.items()}
    sizes = {id(param): num_bytes(specs[name]) for name, param in params if name in specs}
    total = sum(map(num_bytes, specs.values()))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            trained = sum(sizes.get(id(param), 0) for param in group["params"] if param.requires_grad)
            total += trained * _states_per_parameter(optimizer, group)
    return round(total * _BESIDE)


def _states_per_parameter(optimizer: torch.optim.Optimizer, group: Mapping[str, object]) -> int:
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group.get("momentum") else 0
    return 3 if group.get("amsgrad") else 2


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write on the file system that holds ``folder``, which may not exist yet."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    with naming(place):
        return shutil.disk_usage(place).free


def peak_count(
    config: CheckpointConfig, steps: int | None, validates: bool, validation_steps: Collection[int] = ()
) -> int | None:
    """How many checkpoints there are at most at the same time, the one being written included; None: not known.

    The run ends after so many optimizer ``steps``, if that is known. With ``keep_last: -1`` any validation may be the
    best so far and add one that stays; ``validation_steps`` are those after which one comes, as far as is known.
    """
    every = config.every_steps
    adds = validates and config.keep_best > 0
    if steps is None:
        grows = config.keep_last == -1 or config.keep_every
        return None if grows else config.keep_last + config.keep_best * adds + 1
    saves = math.ceil(steps / every) if every else 1
    if config.keep_last == -1:
        return saves + sum(step < steps and not (every and step % every == 0) for step in validation_steps) * adds
    for_ever = steps // config.keep_every if config.keep_every else 0
    return min(config.keep_last + config.keep_best * adds + for_ever + 1, max(steps, 1) if adds else saves)


def check_room(
    config: CheckpointConfig, run_folder: Path, there: Sequence[Found], checkpoint_bytes: int, count: int | None = 1
) -> str:
    """Compare what checkpoints need with what is there, and say both, for the log.

    The complete ones that are ``there`` take no more space, and go only after a new one stands; the largest of them
    counts in place of ``checkpoint_bytes``, for it is measured. ``count`` (None: not known) includes them.

    Raises:
        CheckpointError: The file system has not enough room.
        ConfigError: ``max_total_gib`` is too small.
    """
    checkpoint_bytes = max((entry.num_bytes for entry in there), default=checkpoint_bytes)
    present = sum(entry.num_bytes for entry in there)
    peak = max(checkpoint_bytes * (count or 1), present + checkpoint_bytes)
    needed, free = peak - present, free_bytes(run_folder)
    kept = f"keep_last {config.keep_last}, keep_best {config.keep_best}, keep_every {config.keep_every}"
    number = "their number is not known" if count is None else f"at most {count} at a time"
    what = f"checkpoints of {size_text(checkpoint_bytes)}, {number}"
    if needed > free:
        raise CheckpointError(
            f"{run_folder}: not enough disk space for checkpoints\n"
            f"  needed:  {size_text(needed)} more: {what}\n"
            f"  free:    {size_text(free)} on its file system\n"
            f"  missing: {size_text(needed - free)}\n"
            f"  fix:     free that much, keep fewer ({kept}), or name another trainer.default_root_dir"
        )
    aside = moved_aside(run_folder / FOLDER)  # they wait for a person to remove them
    total = peak + sum(file.stat().st_size for path in aside for file in path.rglob("*") if file.is_file())
    limit = config.max_total_gib
    if limit is not None and total > limit * GIB:
        raise ConfigError(
            "checkpoint.max_total_gib",
            f"{limit:g}, {size_text(total - limit * GIB)} too little",
            f"{total / GIB:.3g} or more, or null",
            f"set max_total_gib: {math.ceil(total / GIB * 100) / 100:g}, or keep fewer ({kept})",
        )
    return f"{what}; {size_text(free)} free"


def size_text(num: float) -> str:
    """Bytes for people: GiB, or MiB below a tenth of one."""
    return f"{num / GIB:.2f} GiB" if num >= GIB / 10 else f"{num / 2**20:.2f} MiB"
