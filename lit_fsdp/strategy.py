"""The strategy factory: one vocabulary for four engines."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.core import saving
from lightning.pytorch.strategies import Strategy

from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.safetensors_file import read_tensor
from lit_fsdp.checkpoint.state import with_sharded
from lit_fsdp.config.sections import build, refuse_positional, takes_fields
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.parallel.ddp import ReplicatedStrategy
from lit_fsdp.parallel.fsdp1 import FSDP1Strategy
from lit_fsdp.parallel.fsdp2 import FSDP2Strategy

_ENGINES: dict[str, Callable[[StrategyConfig], Strategy]] = {"fsdp2": FSDP2Strategy, "fsdp1": FSDP1Strategy}


@takes_fields(StrategyConfig, Strategy)
def fsdp_strategy(*names: Any, **kwargs: Any) -> Strategy:  # noqa: D417 (names are refused)
    """A strategy for Lightning's Trainer that shards any LightningModule, on CPU (gloo) or CUDA (NCCL).

    It wraps modules automatically, before the optimizers are configured. Existing weights are broadcast from rank 0;
    weights on meta are loaded shard by shard. Gradients are averaged over ranks, and Lightning's settings apply.

    Args:
        **kwargs: The fields of :class:`lit_fsdp.config.strategy.StrategyConfig`, each described there.

    Raises:
        ConfigError: An invalid value, or conflicting values.
    """
    refuse_positional("fsdp_strategy", StrategyConfig, names)
    if "wrap" in kwargs:
        kwargs["wrap"] = _named(kwargs["wrap"])
    config = build(StrategyConfig, kwargs, "fsdp_strategy")
    return _ENGINES.get(config.engine, ReplicatedStrategy)(config)


def _named(wrap: Any) -> Any:
    """Names in place of classes, which Lightning's ``auto_wrap_policy`` takes as a set."""
    if isinstance(wrap, type):
        return [wrap.__name__]
    if isinstance(wrap, dict):
        return {name: _named(value) for name, value in wrap.items()}
    is_list = isinstance(wrap, (set, frozenset, list, tuple))
    return [one.__name__ if isinstance(one, type) else one for one in wrap] if is_list else wrap


def _read_folders_too(read: Callable[..., Any]) -> Callable[..., Any]:
    """Extend Lightning's reader behind ``MyModule.load_from_checkpoint`` from files to our checkpoint folders."""

    @functools.wraps(read)
    def read_either(path: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(path, (str, Path)) or not Path(path).is_dir():
            return read(path, *args, **options)
        manifest, state = read_manifest(path), store.load_state(Path(path))
        state = with_sharded(state, lambda sharded: read_tensor(manifest, sharded.name))
        return {**state, "state_dict": store.whole_model(path)}

    return read_either


saving.pl_load = _read_folders_too(saving.pl_load)
