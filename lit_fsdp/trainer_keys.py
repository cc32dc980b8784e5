"""Keys that only Lightning's Trainer knows."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch import Trainer

from lit_fsdp.config.recipe import OWN_SECTIONS
from lit_fsdp.config.typed import unknown_key

_SECTIONS = ("trainer", *OWN_SECTIONS, "config", "print_config")


def check_trainer_keys(values: dict[str, Any], flags: list[str]) -> None:
    """Compare keys and flags with those of Lightning's Trainer and of a recipe.

    Args:
        values: The merged recipe.
        flags: Further flags for Lightning's parser.

    Raises:
        ConfigError: One that does not exist, with the nearest that does.
    """
    known = list(inspect.signature(Trainer.__init__).parameters)[1:]
    flagged = [flag.removeprefix("--trainer.").partition("=") for flag in flags if flag.startswith("--trainer.")]
    given = {**values.get("trainer", {}), **{name.split(".")[0].rstrip("+"): value for name, _, value in flagged}}
    for key, value in given.items():
        if key not in known:
            raise unknown_key(f"trainer.{key}", value, str(key), known)
    for flag in flags:
        name = flag.partition("=")[0]
        if not name.startswith("--trainer.") and name not in ("-h", "--help", "--print_config"):
            raise unknown_key(name.removeprefix("--"), flag, name.removeprefix("--"), _SECTIONS)
