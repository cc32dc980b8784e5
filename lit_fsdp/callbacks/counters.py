"""Lightning's counters of micro-batches in a checkpoint, made right for the run that goes on from it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler


def count_in_micro_batches_of(
    trainer: Trainer, loop: dict[str, Any], saved: int | None
) -> GradientAccumulationScheduler | None:
    """Make the saved counters of a fit loop right for the run of ``trainer``, in place.

    Three things are mended. After the end of an epoch Lightning goes on counting from its last micro-batch, and would
    step too early where that accumulation was a short one. Saved at a validation inside an accumulation, the data begin
    that global batch again. And other ranks mean another accumulation for the same step (``saved``: micro-batches per
    step when it was saved, if anybody noted that).

    Returns:
        The callback that sets the accumulation of each epoch, if any: Lightning calls it when an epoch starts, so not
        for one that is resumed in the middle.
    """
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    current = batches["current"]
    if batches["is_last_batch"] and all(c["completed"] == c["ready"] for c in (current, epochs["current"])):
        current.update(dict.fromkeys(current, 0))
        batches["is_last_batch"] = False
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    schedule = next((one for one in callbacks if isinstance(one, GradientAccumulationScheduler)), None)
    now = trainer.accumulate_grad_batches
    if schedule is not None:
        now = schedule.get_accumulate_grad_batches(max(0, epochs["current"]["ready"] - 1))
    before = now if saved is None else saved
    taken = 0 if batches["is_last_batch"] else current["ready"] % before
    for counters in (batches["total"], current):
        ready = counters["ready"] - taken
        if before != now:
            ready = -(-ready // before) * now
        counters.update({name: ready - (counters["ready"] - count) for name, count in counters.items()})
    return schedule


def fill_in_loops(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Put Lightning's counters into an imported ``checkpoint`` as a run of this recipe would have saved them.

    A datamodule that can tell (``position_at``) gives the epoch; with another one the epoch begins at the import.
    """
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    checkpoint["loops"] = {name: getattr(trainer, name).state_dict() for name in loops}
    loop, step = checkpoint["loops"]["fit_loop"], int(checkpoint["global_step"])
    if not step:
        return
    optimizer = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress in (*optimizer["step"].values(), *optimizer["zero_grad"].values()):
        progress.update(dict.fromkeys(progress, step))
    loop["epoch_loop.scheduler_progress"]["total"].update(ready=step, completed=step)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    batches = loop["epoch_loop.batch_progress"]
    datamodule: Any = getattr(trainer, "datamodule", None)
    if trainer.state.fn != "fit" or not hasattr(datamodule, "position_at"):
        batches["total"].update(dict.fromkeys(batches["total"], step * trainer.accumulate_grad_batches))
        return
    epoch, done, length = datamodule.position_at(step)
    for name, before in (("total", epoch * length), ("current", 0)):
        ready = before + done
        batches[name].update(ready=ready, started=ready, processed=ready, completed=ready - 1)
    batches["is_last_batch"] = done == length
    for progress in loop["epoch_progress"].values():
        progress.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1  # Lightning adds this one when it goes on
