"""Errors for somebody who calls the factory in Python: arguments instead of paths of a recipe, from one rank."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError

_FIELDS = [field.name for field in dataclasses.fields(StrategyConfig)]
_TRAINER = ("accelerator", "callbacks", "devices", "gradient_clip_val", "num_nodes")
_VALUE = r"(\{[^}]*\}|\[[^\]]*\]|[\w.+-]+)"


def in_python(error: ConfigError) -> ConfigError:
    """``trainer.strategy.init_args.wrap`` and ``set wrap: auto`` as ``fsdp_strategy(wrap=...)`` and ``wrap='auto'``."""
    field = error.field.removeprefix("trainer.").removeprefix("strategy.init_args.")
    name, _, inner = field.partition(".")
    owner = "fsdp_strategy" if name in _FIELDS else "Trainer"
    if owner == "Trainer" and not error.field.startswith("trainer."):
        return error
    value = f"{{{inner!r}: ...}}" if inner else "..."
    names = "|".join((*_FIELDS, *_TRAINER))

    def argument(found: re.Match[str]) -> str:
        return f"{found[1]}={yaml.safe_load(found[2])!r}"

    fix = re.sub(rf"(?:trainer\.)?(?:strategy\.init_args\.)?\b({names}): {_VALUE}", argument, error.fix)
    fix, allowed = (text.replace("trainer.strategy.init_args.", "") for text in (fix, error.allowed))
    return ConfigError(f"{owner}({name}={value})", error.given, allowed, fix)


@contextmanager
def spoken_to(in_recipe: bool) -> Iterator[None]:
    """Raise a ConfigError as its reader knows things."""
    try:
        yield
    except ConfigError as error:
        raise (error if in_recipe else in_python(error)) from None


def mute(error: BaseException) -> None:
    """Do not print an exception that nobody catches; another rank prints its own."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: Any) -> None:
        if raised is not error:
            shown(kind, raised, trace)

    sys.excepthook = hook
