"""Which parameters are trained, by patterns of their names."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from torch import nn

from lit_fsdp.errors import ConfigError
from lit_fsdp.models.names import tied_groups


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
