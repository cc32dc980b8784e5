"""fp8 matrix products in linear layers, by torchao; storage, reduction and all else stay as in ``mixed``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lit_fsdp.errors import ConfigError

DEFAULT_SKIP = ("lm_head", "embed_out")
_MULTIPLE = 16  # fp8 kernels take dimensions that are multiples of this


def float8_layers(model: nn.Module, skip: Sequence[str] | None) -> list[str]:
    """Paths of the linear layers that will multiply in fp8: those not skipped whose sizes the kernels take."""
    words = DEFAULT_SKIP if skip is None else tuple(skip)
    return [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and not any(word in name for word in words)
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    ]


def apply_float8(model: nn.Module, skip: Sequence[str] | None, path: str, emulate: bool = False) -> list[str]:
    """Replace the model's linear layers by torchao's float8 ones in place, before it is sharded.

    Args:
        model: On meta or not; parameters are kept as they are.
        skip: Parts of paths of layers to leave alone; default: the output head.
        path: Of ``precision`` in the recipe.
        emulate: Compute with casts instead of fp8 kernels, on any device, for tests.

    Returns:
        Paths of the layers replaced.

    Raises:
        ConfigError: Nothing is left to replace.
    """
    names = set(float8_layers(model, skip))
    if not names:
        raise ConfigError(
            f"{path}.fp8_skip",
            "nothing left to compute in fp8",
            f"linear layers whose sizes are multiples of {_MULTIPLE} and that fp8_skip leaves",
            "set precision: mixed, or shorten fp8_skip",
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _module, name: name in names)
    return sorted(names)
