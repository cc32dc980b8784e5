"""What an attention backend needs: a package, a GPU."""

from __future__ import annotations

import importlib.util

from transformers import PreTrainedModel

from lit_fsdp.config.model import FLASH_ATTENTION, GPU_ATTENTION, gpu_attention_on_cpu
from lit_fsdp.errors import ConfigError

_FIELD = "model.attn_implementation"
_PACKAGES = {  # name to import, what to install
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": (
        "flash_attn_interface",
        "install flash-attn-3 (folder hopper of the flash-attention repository)",
    ),
}


def check_attention(attn_implementation: str | None, device_type: str) -> None:
    """Refuse an attention backend that cannot train on this kind of device, before anything is built.

    FlexAttention runs forward on a CPU, but torch (2.13) has no backward pass of it there.

    Args:
        attn_implementation: As in the recipe; None, the model's own, runs everywhere.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: It needs a GPU, or a package that is not installed.
    """
    if device_type == "cpu" and attn_implementation in GPU_ATTENTION:
        raise gpu_attention_on_cpu(attn_implementation)
    check_package(attn_implementation)


def check_package(attn_implementation: str | None) -> None:
    """Refuse an attention backend whose package is missing; transformers would download a kernel in its place.

    Raises:
        ConfigError: It is not installed; the error says what to install.
    """
    if attn_implementation in _PACKAGES:
        module, install = _PACKAGES[attn_implementation]
        if importlib.util.find_spec(module) is None:
            given = f"{attn_implementation}, but the package {module} is not installed"
            raise ConfigError(
                _FIELD,
                given,
                "sdpa | eager | flex_attention without it",
                f"{install}, or leave attn_implementation out",
            )


def check_architecture(model: PreTrainedModel, attn_implementation: str | None) -> None:
    """Refuse FlashAttention for an architecture that has none, where its package need not be there to find out.

    Raises:
        ConfigError: transformers has no FlashAttention for this architecture.
    """
    if attn_implementation in FLASH_ATTENTION and not model._supports_flash_attn:
        given = f"{attn_implementation} for {model.config.model_type}"
        raise ConfigError(_FIELD, given, "an attention backend that the model has", "leave attn_implementation out")
