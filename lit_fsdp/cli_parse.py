"""Lightning's parser alone, for verbs that look at a recipe and run nothing."""

from __future__ import annotations

import argparse
from typing import Any

import jsonargparse
import yaml

from lit_fsdp.cli import TRUSTED, RecipeCLI, unreadable
from lit_fsdp.signals import SignalFlags
from lit_fsdp.trainer_keys import check_trainer_keys


def check_parses(values: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """Let Lightning's parser read a checked recipe without building anything.

    Returns:
        The ``trainer`` section as it has read it.

    Raises:
        ConfigError: A key or value that only Lightning knows to be wrong.
    """
    check_trainer_keys(values, flags)
    jsonargparse.set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=TRUSTED)
    try:
        words = ["fit", "--config", yaml.safe_dump(values, sort_keys=False), *flags]
        return dict(vars(_ParsedOnly("fit", words, SignalFlags()).config["fit"]["trainer"]))
    except argparse.ArgumentError as error:
        raise unreadable(error) from None


class _ParsedOnly(RecipeCLI):
    """Reads a recipe as a run would, seeds nothing and builds nothing."""

    def _set_seed(self) -> None:
        return

    def instantiate_classes(self) -> None:
        """Nothing."""
