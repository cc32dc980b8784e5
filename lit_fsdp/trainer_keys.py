"""Keys and values that only Lightning's Trainer knows."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_fsdp.config.recipe import OWN_SECTIONS
from lit_fsdp.config.typed import unknown_key
from lit_fsdp.errors import ConfigError

_SECTIONS = ("trainer", *OWN_SECTIONS, "config", "print_config")
# What a Trainer would find out about this machine, set for the whole process, or build.
_LEFT_OUT = ("strategy", "devices", "num_nodes", "callbacks", "plugins", "deterministic", "benchmark")
TRAINER_ERRORS = (MisconfigurationException, ModuleNotFoundError, ValueError, TypeError)
"""What a Trainer raises for a value that it does not take."""


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


def check_trainer_values(trainer: Mapping[str, Any]) -> None:
    """Let a Trainer of one CPU process judge the values of another machine's; its devices are not looked for here.

    Args:
        trainer: The section as Lightning's parser has read it.

    Raises:
        ConfigError: A value that the Trainer does not take.
    """
    values = {key: value for key, value in trainer.items() if key not in _LEFT_OUT}
    known = (None, "auto", "gpu", *AcceleratorRegistry.available_accelerators())
    if not isinstance(values.get("accelerator"), str) or values["accelerator"] in known:
        values["accelerator"] = "cpu"
    values["logger"] = False if values.get("logger") is False else DummyLogger()
    if not isinstance(values.get("profiler"), str):
        values["profiler"] = None
    talk = logging.getLogger("lightning.pytorch")
    level = talk.level
    talk.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Trainer(**values, devices=1, plugins=[LightningEnvironment()])
    except TRAINER_ERRORS as error:
        raise refused_by_trainer(error) from error
    finally:
        talk.setLevel(level)


def refused_by_trainer(error: Exception) -> ConfigError:
    """What Lightning's Trainer says of a value, in the house form."""
    text = " ".join(str(error).split())
    return ConfigError("trainer", text, "what Lightning's Trainer accepts", "see lit-fsdp fit --help")
