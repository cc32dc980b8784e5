"""Where the files that ship with the project lie."""

from __future__ import annotations

from pathlib import Path

import lit_fsdp
from lit_fsdp.errors import ConfigError


def shipped(folder: str) -> Path:
    """The folder ``configs/<folder>`` that ships beside the package.

    Raises:
        ConfigError: There is no such folder; ``fix`` lists those that exist.
    """
    configs = Path(lit_fsdp.__file__).parents[1] / "configs"
    place = configs / folder
    if not place.is_dir():
        found = sorted(entry.name for entry in configs.iterdir() if entry.is_dir()) if configs.is_dir() else []
        there = ", ".join(found) or "no configs folder beside the package: use a checkout of the project"
        raise ConfigError("configs", folder, "a folder under configs/", f"one of: {there}")
    return place
