"""Paths in recipes and flags, and the location of the files that ship with the project."""

import difflib
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import lit_fsdp
from lit_fsdp.errors import ConfigError

PATHS = {
    "model": ("name", "tokenizer"),
    "data": ("train", "val", "test", "predict", "chat_template", "cache_dir"),
    "samples": ("prompts",),
    "slurm": ("container", "container_mounts", "env_file"),
}
"""By section, the keys whose values are paths; under ``trainer``, any value may be a path."""
_VARIABLE = re.compile(r"\$(\{)?([A-Za-z_]\w*)(?(1)\})")


def expanded(text: str, field: str) -> str:
    """Expand ``$VAR``, ``${VAR}`` and ``~`` of a path, where a shell has not done so.

    Raises:
        ConfigError: A variable is not set; names it and ``field``.
    """
    for _, name in _VARIABLE.findall(text):
        if name not in os.environ:
            raise ConfigError(field, text, f"only variables that are set; {name} is not", f"export {name}=...")
    return os.path.expanduser(_VARIABLE.sub(lambda match: os.environ[match[2]], text))


def expand_paths(parsed: Namespace, sections: Mapping[str, Namespace | None]) -> None:
    """Expand all paths of a parsed recipe in place; the ``sections`` are those of our own classes."""
    for name, section in sections.items():
        for key in PATHS[name] if section is not None else ():
            setattr(section, key, _expanded_within(getattr(section, key), f"{name}.{key}"))
    for key, value in vars(parsed.trainer).items():
        setattr(parsed.trainer, key, _expanded_within(value, f"trainer.{key}"))
    parsed.ckpt_path = _expanded_within(parsed.ckpt_path, "ckpt_path")


def _expanded_within(value: Any, field: str) -> Any:
    """``value`` with every text in it expanded; a namespace is changed in place."""
    if isinstance(value, Namespace):
        for name, item in vars(value).items():
            setattr(value, name, _expanded_within(item, field))
        return value
    if isinstance(value, dict):
        return {name: _expanded_within(item, field) for name, item in value.items()}
    if isinstance(value, list):
        return [_expanded_within(item, field) for item in value]
    return expanded(value, field) if isinstance(value, str) else value


def shipped(folder: str) -> Path:
    """The folder ``configs/<folder>`` that ships with the package."""
    return shipped_root("configs") / folder


def shipped_root(kind: Literal["configs", "recipes"]) -> Path:
    """The folder of all configs or recipes; it need not exist.

    Only a checkout has a ``pyproject.toml`` next to the package. In an installation, a ``configs`` folder there may
    belong to another package.
    """
    package = Path(lit_fsdp.__file__).parent
    return (package.parent if (package.parent / "pyproject.toml").is_file() else package) / kind


def shipped_files(kind: Literal["configs", "recipes"], *suffixes: str) -> dict[str, Path]:
    """All recipes or configs by their names in ``lit-fsdp recipes``."""
    root = shipped_root(kind)
    files = sorted(file for file in root.rglob("*") if file.suffix in (suffixes or (".yaml", ".json")))
    return {str(file.relative_to(root).with_suffix("")): file for file in files}


def shipped_file(name: str, *suffixes: str) -> tuple[Path | None, list[str]]:
    """The recipe or config with this name, and similar names: those with this prefix, recipes first, or close matches.

    The extension ``.yaml`` and everything up to ``recipes/`` or ``configs/`` are optional; similar names may differ in
    case.
    """
    recipes, configs = shipped_files("recipes", ".yaml"), shipped_files("configs", *suffixes)
    known, plain = {**configs, **recipes}, re.sub(r"^(.*/)?(recipes|configs)/|\.(yaml|json)$", "", name)
    every = (*recipes, *configs) if plain else ()
    near = [one for one in every if one.startswith(plain)] or difflib.get_close_matches(plain, known, n=3)
    return known.get(plain), near or [one for one in every if one.lower().startswith(plain.lower())]
