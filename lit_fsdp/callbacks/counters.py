"""Lightning's counters of micro-batches in a checkpoint, made right for the run that goes on from it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler


def count_in_micro_batches_of(
    trainer: Trainer, loop: dict[str, Any], saved: int | None
) -> GradientAccumulationScheduler | None:
    """The counters of a fit loop, made right for the run of ``trainer``, in place.

    Args:
        trainer: About to go on.
        loop: The saved state of its fit loop.
        saved: Micro-batches per optimizer step when it was saved, if anybody noted that.

    Returns:
        What sets the accumulation of each epoch, if there is such a callback. Lightning calls it when an epoch
        starts, so not for one that is resumed in the middle.
    """
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    close_epoch(epochs, batches)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    schedule = next((one for one in callbacks if isinstance(one, GradientAccumulationScheduler)), None)
    now = trainer.accumulate_grad_batches
    if schedule is not None:
        now = schedule.get_accumulate_grad_batches(max(0, epochs["current"]["ready"] - 1))
    before = now if saved is None else saved
    begin_window_again(batches, before)
    if before != now:
        rescale_progress(batches, before, now)
    return schedule


def close_epoch(epochs: dict[str, Any], batches: dict[str, Any]) -> None:
    """Counters saved after the end of an epoch, so that the next one starts at its first micro-batch, in place.

    Lightning goes on counting from the last one, and would step too early where that accumulation was a short one.
    """
    ended = batches["is_last_batch"] and batches["current"]["completed"] == batches["current"]["ready"]
    if ended and epochs["current"]["completed"] == epochs["current"]["ready"]:
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


def begin_window_again(batches: dict[str, Any], accumulate: int) -> None:
    """Counters saved at a validation inside an accumulation, set back to the optimizer step before, in place.

    The data begin that global batch again; without this, later steps would end in the middle of global batches.

    Args:
        batches: ``total`` and ``current`` counters of micro-batches.
        accumulate: Micro-batches per optimizer step when they were saved.
    """
    taken = 0 if batches["is_last_batch"] else batches["current"]["ready"] % accumulate
    for counters in (batches["total"], batches["current"]):
        for name in counters:
            counters[name] -= taken


def rescale_progress(progress: dict[str, Any], before: int, now: int) -> None:
    """Lightning's micro-batch counters, saved at an optimizer step, for another accumulation, in place.

    Args:
        progress: ``total`` and ``current`` counters.
        before: Micro-batches per optimizer step when they were saved.
        now: Micro-batches per optimizer step from here on.
    """
    for counters in (progress["total"], progress["current"]):
        ready = -(-counters["ready"] // before) * now
        for name in ("completed", "started", "processed"):
            counters[name] = ready - (counters["ready"] - counters[name])
        counters["ready"] = ready
