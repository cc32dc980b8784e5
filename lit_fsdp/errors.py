"""Errors with the given value, the allowed values and a fix.

All errors that a user can cause are of these types; the command line prints them without a traceback.
"""

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
        self.others: list[ConfigError] = []  # about further keys that do not exist
        super().__init__(field, given, allowed, fix)

    def __str__(self) -> str:
        fix = f"\n  fix:     {self.fix}" if self.fix else ""
        others = "".join(f"\n  also:    {one.field}: {one.fix}" for one in self.others)
        return f"{self.field}: got {self.given}\n  allowed: {self.allowed}{fix}{others}"


_FIXES = {
    "than or equal to the number of the training batches": "set trainer.check_val_every_n_epoch: null, which counts "
    "batches over epochs, or trainer.val_check_interval: 1.0",
    "when `check_val_every_n_epoch=None`": "set trainer.check_val_every_n_epoch: 1 for a share of an epoch",
    "Early stopping conditioned on metric": "set its monitor to a metric that validation logs, such as val_loss",
    "requires a GPU accelerator": "leave trainer.strategy out: lit_fsdp's own strategy also trains on CPUs, and checks "
    "dtypes and units, which Lightning's strategies do not",
}
"""Fixes for messages of Lightning by a part of their text."""


class RefusedByLightning(ConfigError):
    """An error of Lightning during setup, with its own message, and a fix for some."""

    def __init__(self, error: BaseException) -> None:
        text = " ".join(str(error).split())
        fix = next((fix for part, fix in _FIXES.items() if part in text), "")
        super().__init__("trainer", text, "what Lightning's Trainer accepts", fix)

    def __str__(self) -> str:
        return f"trainer: {self.given}" + (f"\n  fix:     {self.fix}" if self.fix else "")


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
