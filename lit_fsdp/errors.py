"""Errors with the given value, the allowed values and a fix.

All errors that a user can cause are of these types; the command line prints them without a traceback.
"""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """An invalid recipe, flag or argument, with a fix.

    Args:
        field: Full path of the setting, as in the recipe (``trainer.strategy.init_args.sharding``).
        given: The given value.
        allowed: The accepted values, with live numbers if there are any.
        fix: What to write instead, unless ``allowed`` is enough.
    """

    def __init__(self, field: str, given: Any, allowed: str, fix: str = "") -> None:
        self.field, self.given, self.allowed, self.fix = field, given, allowed, fix
        super().__init__(field, given, allowed, fix)

    def __str__(self) -> str:
        fix = f"\n  fix:     {self.fix}" if self.fix else ""
        return f"{self.field}: got {self.given}\n  allowed: {self.allowed}{fix}"


class RefusedByLightning(ConfigError):
    """An error of Lightning during setup, with its own message."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("trainer", " ".join(str(error).split()), "what Lightning's Trainer accepts")

    def __str__(self) -> str:
        return f"trainer: {self.given}"


def require(ok: Any, field: str, given: Any, allowed: str, fix: str = "") -> None:
    """Raise :class:`ConfigError` unless ``ok``."""
    if not ok:
        raise ConfigError(field, given, allowed, fix)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or verified; names the path and the file."""


class DataError(ValueError):
    """Rows that cannot be used; names the file and, if available, the line."""


class ContractError(RuntimeError):
    """The live run differs from the recipe: a tensor has another dtype, or a unit is not sharded."""


class NonFiniteGradientError(RuntimeError):
    """Gradients contain inf or nan, under a policy that ends the run; raised on all ranks."""
