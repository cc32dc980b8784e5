"""Errors that say what was given, what is allowed and how to fix it.

Everything a user can cause is one of these; the command line prints them without a traceback.
"""

from __future__ import annotations

from typing import Any


class ConfigError(ValueError):
    """A recipe, flag or argument that cannot work, with the way out.

    Args:
        field: Full path of the setting, as in the recipe (``trainer.strategy.init_args.sharding``).
        given: The value found there.
        allowed: What would be accepted, with live numbers where there are any.
        fix: What to write instead, where ``allowed`` does not say it.
    """

    def __init__(self, field: str, given: Any, allowed: str, fix: str = "") -> None:
        self.field, self.given, self.allowed, self.fix = field, given, allowed, fix
        super().__init__(field, given, allowed, fix)

    def __str__(self) -> str:
        fix = f"\n  fix:     {self.fix}" if self.fix else ""
        return f"{self.field}: got {self.given}\n  allowed: {self.allowed}{fix}"


class RefusedByLightning(ConfigError):
    """What Lightning refuses while it sets up, in its own sentence."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("trainer", " ".join(str(error).split()), "what Lightning's Trainer accepts")

    def __str__(self) -> str:
        return f"trainer: {self.given}"


def require(ok: Any, field: str, given: Any, allowed: str, fix: str = "") -> None:
    """Raise :class:`ConfigError` unless ``ok``."""
    if not ok:
        raise ConfigError(field, given, allowed, fix)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or trusted; names the path and the file."""


class DataError(ValueError):
    """Rows that cannot be used; names the file and, where there is one, the line."""


class ContractError(RuntimeError):
    """The live run differs from what the recipe declares: a tensor has another dtype, a unit is not sharded."""


class NonFiniteGradientError(RuntimeError):
    """Gradients with inf or nan, under a policy that ends the run; the same on all ranks."""
