"""Check that parameters, optimizers and schedules agree on all ranks, and end loaders without a length together."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.errors import ConfigError
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.parallel.units import clean_name

_log = logging.getLogger(__name__)
_END = object()
_FIX = "create random or rank-dependent values on rank 0, and broadcast them (self.trainer.strategy.broadcast)"


def check_alike(what: str, found: Mapping[str, Any]) -> None:
    """Refuse named values that differ between ranks; collective.

    Raises:
        ConfigError: On every rank; it names the first value that differs, and the ranks.
    """
    ranks, values = Ranks(), {name: str(value) for name, value in found.items()}
    if len(set(ranks.run(what, lambda: _digest(values)))) == 1:
        return
    everyone = ranks.run(what, lambda: values)
    names = list(dict.fromkeys(name for one in everyone for name in one))
    different = [name for name in names if len({one.get(name) for one in everyone}) > 1]
    if not different:  # same values in another order, such as from iterating over a set
        place = next(i for i, at in enumerate(zip(*everyone, strict=True)) if len({*at}) > 1)
        different, everyone = [f"{what}, name {place}"], [{f"{what}, name {place}": [*one][place]} for one in everyone]
    held: dict[str, list[str]] = {}
    for rank, one in enumerate(everyone):
        held.setdefault(one.get(different[0], "nothing"), []).append(str(rank))
    given = [f"{value} on rank {', '.join(of[:8])}{' ...' * (len(of) > 8)}" for value, of in held.items()]
    more = f"; {len(different) - 1} more differ" if len(different) > 1 else ""
    raise ConfigError(different[0], " and ".join(given) + more, "the same on all ranks", _FIX)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def tensors_of(module: nn.Module, is_whole: bool) -> dict[str, Any]:
    """Dtype and ``requires_grad`` of parameters; before sharding (``is_whole``) also shapes, and buffers."""
    named = [*module.named_parameters(), *(module.named_buffers() if is_whole else ())]
    found = {}
    for name, tensor in named:
        shape = f"{tuple(tensor.shape)}{' on meta' * tensor.is_meta}, " if is_whole else ""
        kind = "trained" if tensor.requires_grad else "not trained"
        found[f"{type(module).__name__}.{clean_name(name)}"] = f"{shape}{tensor.dtype}, {kind}"
    return found


def kinds_of(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> dict[str, Any]:
    """Classes of optimizers and schedulers, the number of groups, and when a schedule steps."""
    named = [f"{type(optimizer).__name__} of {len(optimizer.param_groups)} groups" for optimizer in optimizers]
    moved = [f"{type(one.scheduler).__name__} every {one.frequency} {one.interval}" for one in schedulers]
    return {"configure_optimizers (optimizers)": named, "configure_optimizers (schedulers)": moved}


def options_of(optimizers: Sequence[Any], schedulers: Sequence[Any] = ()) -> dict[str, Any]:
    """Options of schedules and of all groups, without parameters, because ranks may leave out empty shards."""
    found: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            name = f"optimizers[{index}].param_groups[{number}]"
            found |= {f"{name}.{key}": _plain(group[key]) for key in group if key not in ("params", "param_names")}
    for index, one in enumerate(schedulers):
        name = f"schedulers[{index}] ({type(one.scheduler).__name__})"
        found |= {f"{name}.{key}": _plain(value) for key, value in one.scheduler.state_dict().items()}
    return found


def _plain(value: Any) -> Any:
    """Numbers and strings; for other objects the class, because their text may contain an address."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.Tensor):  # reading it from an accelerator would synchronize in every step
        return "a tensor" if is_accelerator(value.device) else value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def marks(optimizer: Any) -> list[int]:
    """A short hash of an optimizer's options and its square: their sums over ranks show whether all are equal."""
    mark = int(_digest(options_of([optimizer]))[:4], 16)
    return [mark, mark**2]


def are_alike(mark: float, square: float, ranks: int) -> bool:
    """Whether all marks are equal, from the variance of their sums; exact for up to 2**10 ranks."""
    return ranks * square == mark**2


def ending_together(loader: Any, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """Wrap a loader without a length so that it ends on all ranks as soon as it ends on one rank.

    The ``group`` communicates tensors on ``device``; a group of the hosts avoids synchronizing with the device.
    Attributes and state remain those of ``loader``.
    """
    warned = False

    def batches() -> Iterator[Any]:
        nonlocal warned
        rows, number, ranks = iter(loader), 0, dist.get_world_size()
        while True:
            batch = next(rows, _END)
            ended = torch.tensor(int(batch is _END), device=device)
            dist.all_reduce(ended, group=group)
            if num_ended := int(ended):
                if num_ended < ranks and not warned and dist.get_rank() == 0:
                    text = "a loader (%s) ended after %d batches on %d of %d ranks, so it ends on all ranks"
                    _log.warning(text, type(loader).__name__, number, num_ended, ranks)
                    warned = True
                return
            yield batch
            number += 1

    kind = type(loader) if hasattr(loader, "__dict__") else object  # a generator has no __dict__
    view: Any = object.__new__(type(type(loader).__name__, (kind,), {"__iter__": lambda _: batches()}))
    if kind is not object:
        object.__setattr__(view, "__dict__", loader.__dict__)
    return view
