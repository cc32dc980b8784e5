"""Whether a run saves in the background, and the memory that takes, said before the first step."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import Trainer

from lit_fsdp.checkpoint.host_buffers import planned_bytes
from lit_fsdp.checkpoint.space import Contents, size_text
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.units import clean_name

_log = logging.getLogger(__name__)


def open_background(trainer: Trainer, wanted: bool | None) -> Any:
    """The strategy's background saver, or None if training is to wait for each save; collective.

    Args:
        trainer: With its process group.
        wanted: ``checkpoint.async_save``; None is true on CUDA and false elsewhere.

    Raises:
        ConfigError: It is wanted, but the strategy is not one of ours.
    """
    strategy: Any = trainer.strategy
    if not hasattr(strategy, "open_background"):
        if wanted:
            given = f"true with {type(strategy).__name__}"
            raise ConfigError("checkpoint.async_save", given, "a strategy of fsdp_strategy()", "set it to false")
        return None
    if wanted is None:
        wanted = strategy.root_device.type == "cuda"
    return strategy.open_background() if wanted else None


def announce(trainer: Trainer, background: Any, contents: Contents | None) -> None:
    """Say once how checkpoints are written, and in how much host memory.

    Args:
        trainer: After the model is set up.
        background: From :func:`open_background`.
        contents: What one checkpoint consists of; None where the strategy is not ours.
    """
    if contents is None:
        return
    if background is None:
        _log.info("checkpoints: training waits for each save (checkpoint.async_save: false)")
        return
    text = "checkpoints: written in the background (checkpoint.async_save: true)"
    size = size_text(staging_bytes(trainer, contents))
    if contents.layout == "full":
        _log.info("%s, after each tensor was gathered to a copy of %s in the host memory of rank 0", text, size)
    else:
        _log.info("%s, from a copy of at most %s in the host memory of each rank", text, size)


def staging_bytes(trainer: Trainer, contents: Contents) -> int:
    """Bytes of host memory for one copy, on the rank that needs most; known from shapes."""
    strategy: Any = trainer.strategy
    pinned, tensors = strategy.root_device.type == "cuda", contents.tensors
    if contents.layout == "full":
        return planned_bytes(tensors, (), 1, pinned)
    params = [clean_name(name) for name, _ in strategy.lightning_module.named_parameters()]
    shapes = {name: tensors[f"model/{name}"].shape for name in params if f"model/{name}" in tensors}
    sharded = {f"model/{name}" for name in shapes}
    for name, spec in tensors.items():  # optim/<parameter>/<key>
        param = name.partition("/")[2].rpartition("/")[0]
        if not name.startswith("model/") and shapes.get(param) == spec.shape:
            sharded.add(name)
    return planned_bytes(tensors, sharded, contents.shards, pinned)
