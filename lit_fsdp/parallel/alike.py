"""What must be the same on every rank: parameters, optimizers and schedules, and where loaders without a length end."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.units import clean_name

_log = logging.getLogger(__name__)
_END = object()
_FIX = "make what depends on chance or on the rank on rank 0, and broadcast it (self.trainer.strategy.broadcast)"


def check_alike(what: str, found: Mapping[str, Any]) -> None:
    """Refuse values, by name, that are not the same on all ranks; collective.

    Raises:
        ConfigError: On every rank; it names the first value that differs, and the ranks.
    """
    ranks, values = Ranks(), {name: str(value) for name, value in found.items()}
    if len(set(ranks.run(what, lambda: _digest(values)))) == 1:
        return
    everyone = ranks.run(what, lambda: values)
    names = list(dict.fromkeys(name for one in everyone for name in one))
    different = [name for name in names if len({one.get(name) for one in everyone}) > 1]
    if not different:  # the same in another order, as out of a set of words
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
    """Dtype and ``requires_grad`` of parameters; while they are whole, shapes too, and the same of buffers."""
    named = [*module.named_parameters(), *(module.named_buffers() if is_whole else ())]
    found = {}
    for name, tensor in named:
        shape = f"{tuple(tensor.shape)}{' on meta' * tensor.is_meta}, " if is_whole else ""
        kind = "trained" if tensor.requires_grad else "not trained"
        found[f"{type(module).__name__}.{clean_name(name)}"] = f"{shape}{tensor.dtype}, {kind}"
    return found


def kinds_of(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> dict[str, Any]:
    """Classes of optimizers and schedulers, the number of groups, and when a schedule moves."""
    named = [f"{type(optimizer).__name__} of {len(optimizer.param_groups)} groups" for optimizer in optimizers]
    moved = [f"{type(one.scheduler).__name__} every {one.frequency} {one.interval}" for one in schedulers]
    return {"configure_optimizers (optimizers)": named, "configure_optimizers (schedulers)": moved}


def options_of(optimizers: Sequence[Any], schedulers: Sequence[Any] = ()) -> dict[str, Any]:
    """Options of all groups, which may hold other parameters, as ranks may leave out empty shards; and of schedules."""
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
    """Numbers and words; of anything else its class, as its text may hold an address."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, torch.Tensor):  # one on an accelerator would be waited for in every step
        return value.tolist() if value.device.type == "cpu" else "a tensor"
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def marks(optimizer: Any) -> torch.Tensor:
    """A short hash of the options of an optimizer and its square: their sums over ranks tell whether all are equal."""
    mark = int(_digest(options_of([optimizer]))[:4], 16)
    return torch.tensor([mark, mark**2], dtype=torch.float64)


def are_alike(mark: float, square: float, ranks: int) -> bool:
    """Whether the marks that these are the sums of are equal, by their variance; exact for up to 2**10 ranks."""
    return ranks * square == mark**2


def ending_together(loader: Any, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """The same loader, of no length, but for the loops, where it ends on all ranks once it has ended on one.

    ``group``, of tensors on ``device``, is one of the hosts if they have one: then no device is waited for. Attributes
    and state stay those of ``loader`` itself.
    """
    said = False

    def batches() -> Iterator[Any]:
        nonlocal said
        rows, number, ranks = iter(loader), 0, dist.get_world_size()
        while True:
            batch = next(rows, _END)
            ended = torch.tensor(int(batch is _END), device=device)
            dist.all_reduce(ended, group=group)
            if num_ended := int(ended):
                if num_ended < ranks and not said and dist.get_rank() == 0:
                    text = "a loader (%s) has ended after %d batches on %d of %d ranks, and so on all of them"
                    _log.warning(text, type(loader).__name__, number, num_ended, ranks)
                    said = True
                return
            yield batch
            number += 1

    kind = type(loader) if hasattr(loader, "__dict__") else object  # a generator has none
    view: Any = object.__new__(type(type(loader).__name__, (kind,), {"__iter__": lambda _: batches()}))
    if kind is not object:
        object.__setattr__(view, "__dict__", loader.__dict__)
    return view
