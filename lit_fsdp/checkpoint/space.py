"""How many bytes checkpoints need, and whether there is room for them before it is too late.

A checkpoint's size follows from shapes and dtypes, so it is known before the first step; the space is compared then
for all checkpoints that the run will keep at the same time, and again before each save for the next one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.checkpoint.disk import naming
from lit_fsdp.checkpoint.find import FOLDER, Found
from lit_fsdp.checkpoint.manifest import Layout, TensorSpec
from lit_fsdp.checkpoint.safetensors_file import num_bytes, spec_of
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError, ConfigError

GIB = 2**30
# Measured with torch 2.13: what is written per shard, per tensor and per rank beside the data.
_SHARD_BYTES, _SHARD_INDEX_BYTES, _TENSOR_INDEX_BYTES, _DIM_INDEX_BYTES = 1577, 150, 90, 10
_MANIFEST_TENSOR_BYTES, _MANIFEST_DIM_BYTES, _HEADER_TENSOR_BYTES = 53, 10, 64
_FILE_BYTES, _RANK_STATE_BYTES, _STATE_BYTES = 140, 25700, 8000
_SCALAR = TensorSpec("float32", ())


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What the checkpoints of a run consist of."""

    tensors: Mapping[str, TensorSpec]
    """Every tensor under the name it is saved by."""
    layout: Layout
    """One file per rank (sharded) or one in all (full)."""
    world_size: int
    """Ranks of the run."""
    shards: int
    """Pieces a tensor of enough rows is split into."""
    file_bytes: Sequence[int] = ()
    """Sizes of the small extra files."""
    assumed: tuple[str, ...] = ()
    """What could not be known, one sentence each."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one checkpoint, with everything beside the data estimated to a few hundred bytes per tensor."""
        tensors = self.tensors
        names = sum(len(name) for name in tensors)
        dims = sum(len(spec.shape) for spec in tensors.values())
        total = sum(map(num_bytes, tensors.values())) + sum(self.file_bytes)
        total += 2 * names + len(tensors) * _MANIFEST_TENSOR_BYTES + dims * _MANIFEST_DIM_BYTES  # manifest, state
        total += (len(self.file_bytes) + 3 * self.world_size) * _FILE_BYTES
        total += _STATE_BYTES + self.world_size * _RANK_STATE_BYTES
        if self.layout == "full":
            return total + names + len(tensors) * _HEADER_TENSOR_BYTES
        pieces = sum(_pieces(spec, self.shards) for spec in tensors.values())
        total += names + len(tensors) * _TENSOR_INDEX_BYTES + dims * _DIM_INDEX_BYTES
        return total + pieces * (_SHARD_BYTES + _SHARD_INDEX_BYTES)


def _pieces(spec: TensorSpec, shards: int) -> int:
    return max(1, min(shards, spec.shape[0])) if spec.shape else 1


def optimizer_tensors(
    optimizers: Iterable[torch.optim.Optimizer], params: Mapping[int, tuple[str, TensorSpec]]
) -> tuple[dict[str, TensorSpec], tuple[str, ...]]:
    """The tensors that optimizers keep from their first step on, by the names they are saved under.

    Args:
        optimizers: Of the run; nothing needs to be there yet.
        params: Name and whole shape of every parameter by the ``id`` of the live tensor.

    Returns:
        The tensors, and one sentence for each optimizer class whose state had to be guessed.
    """
    found: dict[str, TensorSpec] = {}
    assumed = []
    for index, optimizer in enumerate(optimizers):
        prefix = "optim" if index == 0 else f"optim{index}"
        for group in optimizer.param_groups:
            state = _state_names(optimizer, group)
            if state is None:
                kind = type(optimizer).__name__
                assumed.append(f"{kind} is taken to keep two tensors per parameter, as AdamW does")
            like_param, numbers = state or (("exp_avg", "exp_avg_sq"), ("step",))
            for param in group["params"]:
                if param.requires_grad and id(param) in params:
                    name, spec = params[id(param)]
                    found.update({f"{prefix}/{name}/{key}": spec for key in like_param})
                    found.update({f"{prefix}/{name}/{key}": _SCALAR for key in numbers})
    return found, tuple(dict.fromkeys(assumed))


def _state_names(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[Sequence[str], ...] | None:
    """State tensors of a parameter's shape, and single numbers, of torch's own optimizers; None for others."""
    momentum = ("momentum_buffer",) if group.get("momentum") else ()
    maximum = ("max_exp_avg_sq",) if group.get("amsgrad") else ()
    centered = ("grad_avg",) if group.get("centered") else ()
    step = ("step",)
    known: dict[type, tuple[Sequence[str], ...]] = {
        torch.optim.AdamW: (("exp_avg", "exp_avg_sq", *maximum), step),
        torch.optim.Adam: (("exp_avg", "exp_avg_sq", *maximum), step),
        torch.optim.NAdam: (("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
        torch.optim.RAdam: (("exp_avg", "exp_avg_sq"), step),
        torch.optim.Adamax: (("exp_avg", "exp_inf"), step),
        torch.optim.Adadelta: (("square_avg", "acc_delta"), step),
        torch.optim.Adagrad: (("sum",), step),
        torch.optim.RMSprop: (("square_avg", *momentum, *centered), step),
        torch.optim.SGD: (momentum, ()),
    }
    return known.get(type(optimizer))


def saved_tensors(
    model: Mapping[str, torch.Tensor], params: Iterable[tuple[str, torch.Tensor]], optimizers: Iterable[Any]
) -> tuple[dict[str, TensorSpec], tuple[str, ...]]:
    """Every tensor of a checkpoint, the optimizer's too although it may not exist yet.

    Args:
        model: What is saved of the model, by name; DTensors count as a whole.
        params: Names (as in ``model``) and live parameters, of which a rank may hold a part only.
        optimizers: Of the run.

    Returns:
        Tensors, and what had to be assumed.
    """
    specs = {name: spec_of(tensor) for name, tensor in model.items()}
    by_id = {id(param): (name, specs[name]) for name, param in params if name in specs}
    state, assumed = optimizer_tensors(optimizers, by_id)
    return {**{f"model/{name}": spec for name, spec in specs.items()}, **state}, assumed


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write on the file system that holds ``folder``, which may not exist yet.

    Raises:
        CheckpointError: The file system does not answer.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    with naming(place):
        system = os.statvfs(place)
    return system.f_bavail * system.f_frsize


@dataclass(frozen=True)
class Plan:
    """How far a run goes, as far as that is known when it starts."""

    total_steps: int | None
    """Optimizer steps at its end; None if nobody knows."""
    validates: bool
    """Whether validations may add checkpoints at other steps than ``every_steps``."""
    validation_steps: Collection[int] = ()
    """After which they come, as far as that is known."""


def peak_count(config: CheckpointConfig, plan: Plan) -> int | None:
    """How many checkpoints there are at most at the same time, the one being written included; None: not known.

    With ``keep_last: -1`` any validation may be the best so far and add one that stays.
    """
    steps, every = plan.total_steps, config.every_steps
    adds = plan.validates and config.keep_best > 0
    if steps is None:
        grows = config.keep_last == -1 or config.keep_every
        return None if grows else config.keep_last + config.keep_best * adds + 1
    saves = math.ceil(steps / every) if every else 1
    if config.keep_last == -1:
        return saves + sum(step < steps and not (every and step % every == 0) for step in plan.validation_steps) * adds
    for_ever = steps // config.keep_every if config.keep_every else 0
    return min(config.keep_last + config.keep_best * adds + for_ever + 1, max(steps, 1) if adds else saves)


class Budget:
    """Compares what checkpoints need with what is there; only rank 0 needs to ask.

    Args:
        config: The ``checkpoint`` section.
        run_folder: Decides which file system.
        contents: What one checkpoint consists of.
        free: How many bytes are free where a folder lies.
    """

    def __init__(
        self, config: CheckpointConfig, run_folder: Path, contents: Contents, free: Callable[[Path], int] = free_bytes
    ) -> None:
        self.config, self.run_folder, self.contents, self._free = config, run_folder, contents, free
        self.checkpoint_bytes = contents.num_bytes

    def check_run(self, there: Sequence[Found], plan: Plan) -> str:
        """Compare for the whole run, before its first step.

        Args:
            there: The run's complete checkpoints: they take no more space, and the oldest will go.
            plan: How far the run goes.

        Returns:
            One line about size and number for the log.

        Raises:
            CheckpointError: The file system has not enough room.
            ConfigError: ``max_total_gib`` is too small.
        """
        count, size = peak_count(self.config, plan), self.checkpoint_bytes
        present = sum(entry.num_bytes for entry in there)
        peak = max(size * (count or 1), present + size)
        free = self._free(self.run_folder)
        what = f"{size_text(peak - present)} more, {size_text(size)} for each checkpoint: {self._kept(count)}"
        self._compare(peak - present, free, what)
        self._compare_total(peak + self._set_aside(), self._kept(count))
        number = "their number is not known beforehand" if count is None else f"at most {count} at a time"
        line = f"checkpoints: {size_text(size)} each, {number}; {size_text(free)} free"
        return "; ".join([line, *self.contents.assumed])

    def check_save(self, there: Sequence[Found], written: Sequence[int] = ()) -> None:
        """Compare for the next checkpoint; old ones go only after it stands.

        Args:
            there: The run's complete checkpoints.
            written: Bytes of those that this run has written itself, if any: better than an estimate.

        Raises:
            CheckpointError: The file system has not enough room.
            ConfigError: ``max_total_gib`` is too small.
        """
        size = max(written) if written else self.checkpoint_bytes
        self._compare(size, self._free(self.run_folder), f"{size_text(size)} for the next checkpoint")
        total = size + sum(entry.num_bytes for entry in there) + self._set_aside()
        self._compare_total(total, f"{len(there)} that are there, and the next one")

    def _set_aside(self) -> int:
        """Bytes of checkpoints that were renamed and wait for a person to remove them."""
        folders = [p for kind in ("damaged", "superseded") for p in (self.run_folder / FOLDER).glob(f"{kind}-step-*")]
        return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())

    def _compare(self, needed: int, free: int, what: str) -> None:
        if needed > free:
            raise CheckpointError(
                f"{self.run_folder}: not enough disk space for checkpoints\n"
                f"  needed:  {what}\n"
                f"  free:    {size_text(free)} on its file system\n"
                f"  missing: {size_text(needed - free)}\n"
                f"  fix:     {self._ways_out('free that much', 'name another trainer.default_root_dir')}"
            )

    def _compare_total(self, total: int, what: str) -> None:
        limit = self.config.max_total_gib
        if limit is not None and total > limit * GIB:
            missing, each = size_text(total - limit * GIB), size_text(self.checkpoint_bytes)
            raise ConfigError(
                "checkpoint.max_total_gib",
                f"{limit:g} ({size_text(limit * GIB)}), {missing} too little for checkpoints of {each}",
                f"{total / GIB:.3g} or more, for {what}; or null",
                self._ways_out(f"set max_total_gib: {math.ceil(total / GIB * 100) / 100:g}"),
            )

    def _kept(self, count: int | None) -> str:
        """``4 at a time (keep_last 2, keep_best 1, and the one being written)``."""
        parts = [f"keep_last {self.config.keep_last}", f"keep_best {self.config.keep_best}"]
        parts += [f"keep_every {self.config.keep_every}"] if self.config.keep_every else []
        number = "one or more" if count is None else f"{count}"
        return f"{number} at a time ({', '.join(parts)}, and the one being written)"

    def _ways_out(self, first: str, last: str = "") -> str:
        ways = [first]
        if self.config.keep_last != 1:
            ways.append("lower checkpoint.keep_last")
        if self.config.keep_every:
            ways.append(f"set checkpoint.keep_every above {self.config.keep_every} or to null")
        if self.config.keep_best > (self.config.keep_last != -1):  # all of them stay, too
            ways.append("lower checkpoint.keep_best")
        ways += [last] if last else []
        return ways[0] if len(ways) == 1 else f"{', '.join(ways[:-1])}, or {ways[-1]}"


def size_text(num: float) -> str:
    """Bytes for people: GiB, or MiB below a tenth of one."""
    return f"{num / GIB:.2f} GiB" if num >= GIB / 10 else f"{num / 2**20:.2f} MiB"
