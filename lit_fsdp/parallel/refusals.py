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

    Args:
        module: The LightningModule, about to be fitted.
        engine: ``fsdp1`` or ``fsdp2``.
        path: Where the strategy's arguments stand in the recipe.

    Raises:
        ConfigError: ``automatic_optimization`` is false; with more passes torch would train wrong weights.
    """
    if engine == "fsdp1" and not module.automatic_optimization:
        raise ConfigError(
            f"{path}.engine",
            f"fsdp1 with manual optimization ({type(module).__name__}.automatic_optimization is False)",
            "fsdp2 | ddp | single",
            "set engine: fsdp2",
        )


def refuse_root_parameters(owners: Iterable[tuple[str, Any]], name: str) -> None:
    """Refuse weights in fsdp2's root under manual optimization: it is gathered once per step, not once per pass.

    Args:
        owners: The modules, by name, whose own parameters the root gathers.
        name: Of the LightningModule's class.

    Raises:
        ConfigError: One of them is trained and has dimensions; after the first pass it would be missing.
    """
    for owner, module in owners:
        for attribute, param in module._parameters.items():
            if param is not None and param.requires_grad and param.dim():
                raise ConfigError(
                    f"{name}.automatic_optimization",
                    f"False with the parameter {owner and owner + '.'}{attribute}, which is in no child module that is "
                    "called",
                    "parameters in child modules, each with a forward of its own",
                    f"put {attribute} into a child module, or use engine ddp or single",
                )
