"""What cannot do what it says with a sharded model, refused with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lit_fsdp.errors import ConfigError

_KEEPS_WHOLE = "it keeps a second whole model on every rank and swaps tensors with it, but a rank has only shards"
_REASONS = {
    "StochasticWeightAveraging": "it copies the whole model before it is sharded, then averages a rank's shards into "
    "the whole tensors of that copy",
    "WeightAveraging": _KEEPS_WHOLE,
    "EMAWeightAveraging": _KEEPS_WHOLE,
}


def refuse_callbacks(callbacks: Iterable[Any], engine: str) -> None:
    """Refuse what would average shards as if they were models; a subclass is refused like its parent.

    Args:
        callbacks: The Trainer's.
        engine: ``fsdp1`` or ``fsdp2``, for the message.

    Raises:
        ConfigError: One of the callbacks is among them; the message says why.
    """
    for callback in callbacks:
        for parent in type(callback).__mro__:
            if parent.__name__ in _REASONS and parent.__module__.startswith(("lightning", "pytorch_lightning")):
                raise ConfigError(
                    "trainer.callbacks",
                    f"{parent.__name__} with engine {engine}: {_REASONS[parent.__name__]}",
                    "callbacks that do not copy the model; weight averages with engine ddp or single",
                    f"drop {parent.__name__}, or average exported checkpoints afterwards",
                )


def refuse_manual_optimization(module: Any, engine: str, path: str) -> None:
    """Refuse fsdp1 under a module that optimizes manually: its root counts on one backward pass, after the step.

    Raises:
        ConfigError: ``automatic_optimization`` is false; with more passes torch would train wrong weights.
    """
    if engine == "fsdp1" and not module.automatic_optimization and module.trainer.state.fn == "fit":
        raise ConfigError(
            f"{path}.engine",
            f"fsdp1 with manual optimization ({type(module).__name__}.automatic_optimization is False)",
            "fsdp2 | ddp | single",
            "set engine: fsdp2",
        )
