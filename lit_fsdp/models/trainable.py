"""The model that a recipe trains: built on meta, with adapters where it asks for them, and frozen as it says."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.added_tokens import (
    train_beside_adapters,
    vocabulary_modules,
    vocabulary_tensors,
    warn_of_frozen_rows,
)
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.models.names import tied_groups


def build_trainable(
    hf_config: PretrainedConfig, config: ModelConfig, base: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any] | None]:
    """The causal LM of ``hf_config`` on meta with the adapters and frozen parameters of the ``model`` section.

    With ``add_tokens`` beside adapters the embedding and the head are trained whole, as the rows of new tokens must be
    learned and the others move with them (as with peft's ``modules_to_save``, but in place: no second copy in memory,
    and tied weights stay tied). ``freeze`` takes them out again.

    Args:
        hf_config: The architecture, with rows for added tokens.
        config: The ``model`` section.
        base: Name of the base model on the hub, or its folder, noted in the adapters' configuration.

    Returns:
        The model, and the content of ``adapter_config.json`` or None.

    Raises:
        ConfigError: The architecture cannot be built, or a layer or pattern named does not exist.
    """
    model = build_on_meta(hf_config, config.attn_implementation, config.trust_remote_code)
    vocabulary = vocabulary_modules(model) if config.add_tokens else {}
    adapter_config = None if config.lora is None else apply_lora(model, config.lora, base)
    if adapter_config is not None:
        train_beside_adapters(model, vocabulary)
    freeze_parameters(model, config.freeze, config.train_only)
    warn_of_frozen_rows(model, config)
    return model, adapter_config


def kept_with_adapters(model: PreTrainedModel, config: ModelConfig, has_new_rows: bool) -> list[str]:
    """Names of the parameters of the base that an exported adapter needs beside it: embedding and head.

    Those that are trained, and with new rows all of them: nobody else's copy of the base model has these rows.
    """
    if config.lora is None or not config.add_tokens:
        return []
    return [name for name in vocabulary_tensors(model) if has_new_rows or model.get_parameter(name).requires_grad]


def freeze_parameters(model: nn.Module, freeze: list[str] | None, train_only: list[str] | None = None) -> None:
    """Freeze by name, in place; a tied parameter goes by any of its names.

    Args:
        model: The transformers model; names are those of its ``named_parameters``.
        freeze: Patterns (``*`` stands for anything, dots too) of parameters that are not trained.
        train_only: Patterns of the only ones that are; all others are frozen.

    Raises:
        ConfigError: A pattern that fits no parameter, or nothing is left to train.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    groups = [[n for n in names if n in params] for names in tied_groups(model)]
    names_of = {name: group for group in groups for name in group}
    if train_only is not None:
        chosen = _matching(names_of, train_only, "model.train_only")
        for name, param in params.items():
            param.requires_grad_(name in chosen)
    if freeze is not None:
        for name in _matching(names_of, freeze, "model.freeze"):
            params[name].requires_grad_(False)
    if (freeze or train_only) and not any(param.requires_grad for param in params.values()):
        field = "model.freeze" if freeze else "model.train_only"
        raise ConfigError(
            field, freeze or train_only, "patterns that leave something to train", f"drop a pattern of {field}"
        )


def _matching(names_of: dict[str, list[str]], patterns: list[str], path: str) -> set[str]:
    """Names that fit a pattern, with the other names of the same tensor."""
    found: set[str] = set()
    for pattern in patterns:
        fitting = {other for name in names_of if fnmatchcase(name, pattern) for other in names_of[name]}
        if not fitting:
            close = difflib.get_close_matches(pattern, names_of, n=3, cutoff=0.3) or list(names_of)[:3]
            raise ConfigError(
                path,
                f"{pattern!r}, which fits no parameter",
                f"names of parameters, such as {', '.join(close)}; * stands for anything",
                f"write {close[0]}",
            )
        found |= fitting
    return found
