"""The strategy factory: one vocabulary for four engines."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.core import saving
from lightning.pytorch.strategies import Strategy

from lit_fsdp.checkpoint import store
from lit_fsdp.config.parser import build
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.parallel.ddp import ReplicatedStrategy
from lit_fsdp.parallel.fsdp1 import FSDP1Strategy
from lit_fsdp.parallel.fsdp2 import FSDP2Strategy

_ENGINES: dict[str, Callable[[StrategyConfig], Strategy]] = {
    "fsdp2": FSDP2Strategy,
    "fsdp1": FSDP1Strategy,
    "ddp": ReplicatedStrategy,
    "single": ReplicatedStrategy,
}


def fsdp_strategy(*args: Any, **kwargs: Any) -> Strategy:
    """A strategy for Lightning's Trainer that shards any LightningModule, on CPU (gloo) or CUDA (NCCL).

    The strategy wraps by itself, before the optimizers are configured; weights that are there already are broadcast
    from rank 0, weights on meta are filled shard by shard. It scales no gradients: the engines average them over
    ranks, and Lightning's own settings (accumulation, clipping) hold.

    Args:
        *args: The fields of :class:`lit_fsdp.config.strategy.StrategyConfig`, in their order; each is described there.
        **kwargs: The same by name: ``engine="fsdp1", sharding="hybrid_shard"``.

    Returns:
        A subclass of Lightning's ``ModelParallelStrategy`` (fsdp2), ``FSDPStrategy`` (fsdp1) or ``DDPStrategy``.

    Raises:
        ConfigError: A value that does not exist, or values that do not go together.
    """
    config = build(StrategyConfig, _SIGNATURE.bind(*args, **kwargs).arguments, "fsdp_strategy")
    return _ENGINES[config.engine](config)


_TYPES, _EITHER = typing.get_type_hints(StrategyConfig), inspect.Parameter.POSITIONAL_OR_KEYWORD
_FIELDS = inspect.signature(StrategyConfig).parameters.values()
# That of the dataclass, by position too: what ``help()`` and a recipe's parser are told.
_SIGNATURE = inspect.Signature(
    [field.replace(kind=_EITHER, annotation=_TYPES[field.name]) for field in _FIELDS], return_annotation=Strategy
)
fsdp_strategy.__signature__ = _SIGNATURE  # type: ignore[attr-defined]


def _read_folders_too(read: Callable[..., Any]) -> Callable[..., Any]:
    """Lightning's reader behind ``MyModule.load_from_checkpoint``, which knows files alone, for checkpoints of ours."""

    @functools.wraps(read)
    def read_either(path: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(path, (str, Path)) or not Path(path).is_dir():
            return read(path, *args, **options)
        return {**store.load_state(Path(path)), "state_dict": store.whole_model(path)}

    return read_either


saving.pl_load = _read_folders_too(saving.pl_load)
