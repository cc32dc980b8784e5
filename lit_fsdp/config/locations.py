"""Paths as a recipe or flag writes them, and where the files that ship with the project lie."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import lit_fsdp
from lit_fsdp.errors import ConfigError

_VARIABLE = re.compile(r"\$(\{)?([A-Za-z_]\w*)(?(1)\})")


def expanded(text: str, field: str) -> str:
    """Expand ``$VAR``, ``${VAR}`` and ``~`` of a path, where a shell has not done so.

    Raises:
        ConfigError: A variable is not set; names it and ``field``.
    """
    for _, name in _VARIABLE.findall(text):
        if name not in os.environ:
            raise ConfigError(field, text, f"variables that are set, and {name} is not", f"export {name}=...")
    return os.path.expanduser(_VARIABLE.sub(lambda match: os.environ[match[2]], text))


def shipped(folder: str) -> Path:
    """The folder ``configs/<folder>`` that ships with the package."""
    return shipped_root("configs") / folder


def shipped_root(kind: Literal["configs", "recipes"]) -> Path:
    """The folder of all configs or recipes; it need not exist.

    Beside an installed package lie other packages' folders, and one of them may be called ``configs``: only a checkout
    has its ``pyproject.toml`` there.
    """
    package = Path(lit_fsdp.__file__).parent
    return (package.parent if (package.parent / "pyproject.toml").is_file() else package) / kind


def shipped_name(path: Path) -> str | None:
    """The name under which ``lit-fsdp recipes`` knows a file called like ``path``, or None.

    ``configs/debug/smoke.yaml`` and ``my/configs/debug/smoke.yaml`` are ``debug/smoke``.
    """
    for kind in ("recipes", "configs"):
        if kind in path.parts:
            rest = Path(*path.parts[len(path.parts) - path.parts[::-1].index(kind) :])
            if (shipped_root(kind) / rest).is_file():
                return str(rest.with_suffix("") if rest.suffix == ".yaml" else rest)
    return None
