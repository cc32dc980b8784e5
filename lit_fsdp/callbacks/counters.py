"""Lightning's counters of micro-batches in a checkpoint, made right for the run that goes on from it."""

from __future__ import annotations

from typing import Any


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
