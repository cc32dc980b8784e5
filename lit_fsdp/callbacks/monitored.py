"""Metrics that callbacks monitor, compared before the first step with what our modules log."""

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.errors import require

_OF_EVALUATION = ("val", "eval", "test")
_OF_SAMPLES = ("val_exact_match", "val_answer_token_accuracy")


def check_monitors(trainer: Trainer, module: Any, validates: bool) -> None:
    """Refuse a monitored metric that validation does not log, such as Transformers' ``eval_loss``.

    Without validation rows (``validates``), EarlyStopping on a validation metric would never stop, and is refused.

    Only for our own modules, and if no callback of the user's can log further metrics; for others,
    :class:`~lit_fsdp.Checkpoint` warns after the first validation.

    Raises:
        ConfigError: A callback monitors such a metric.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    kinds = [type(one).__module__.partition(".")[0] for one in (module, *callbacks)]
    if not set(kinds) <= {"lit_fsdp", "lightning", "pytorch_lightning"}:
        return
    known = [*(f"val_{name}" for name in module.eval_metric_names), *_OF_SAMPLES]
    for callback in callbacks:
        monitor: Any
        if isinstance(callback, Checkpoint):
            field, monitor = "checkpoint.monitor", callback.config.monitor
            is_used = callback.config.keep_best > 0
        else:
            field = f"monitor of {type(callback).__name__} in trainer.callbacks"
            monitor = getattr(callback, "monitor", None)
            is_used = getattr(callback, "strict", True)  # EarlyStopping with strict=False allows a missing metric
        if not is_used:
            continue
        never = isinstance(callback, EarlyStopping) and not validates and str(monitor).startswith(_OF_EVALUATION)
        fix = "set data.val or data.val_split, or drop the callback"
        require(not never, field, f"{monitor} without validation rows", "a recipe that validates", fix)
        name = str(monitor or "").partition("/")[0]  # a named set follows
        is_logged = monitor in known or name in known or not name.startswith(_OF_EVALUATION)
        is_max = isinstance(callback, Checkpoint) and callback.config.mode == "max"
        fix = f"write val_loss{', and mode: min' if is_max else ''}"
        require(is_logged, field, f"{monitor}, which is not logged", ", ".join(known), fix)
