"""A run that goes on from an imported checkpoint: the counters that only the run knows."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lit_fsdp.checkpoint.importing.convert import IMPORTED


def is_imported(checkpoint: dict[str, Any]) -> bool:
    """Whether ``lit-fsdp ckpt import`` wrote the checkpoint."""
    return bool(checkpoint.get(IMPORTED))


def fill_in_loops(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Put Lightning's counters into ``checkpoint`` as a run of this recipe would have saved them at its step.

    A datamodule that can tell (``position_at``) gives the epoch; with another one the epoch begins at the import.
    """
    loops = {
        "fit_loop": trainer.fit_loop.state_dict(),
        "validate_loop": trainer.validate_loop.state_dict(),
        "test_loop": trainer.test_loop.state_dict(),
        "predict_loop": trainer.predict_loop.state_dict(),
    }
    step = int(checkpoint["global_step"])
    datamodule: Any = getattr(trainer, "datamodule", None)
    is_fit = trainer.state.fn == "fit"
    position = datamodule.position_at(step) if is_fit and hasattr(datamodule, "position_at") else None
    if step:
        _count(loops["fit_loop"], step, trainer.accumulate_grad_batches, position)
    checkpoint["loops"] = loops


def _count(loop: dict[str, Any], step: int, accumulate: int, position: tuple[int, int, int] | None) -> None:
    """Set the counters of a fit loop, as at the end of the last micro-batch of ``step``."""
    optimizer = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for progress in (*optimizer["step"].values(), *optimizer["zero_grad"].values()):
        progress.update(dict.fromkeys(progress, step))
    loop["epoch_loop.scheduler_progress"]["total"].update(ready=step, completed=step)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step
    if position is None:
        loop["epoch_loop.batch_progress"]["total"].update(
            dict.fromkeys(("ready", "started", "processed", "completed"), step * accumulate)
        )
        return
    epoch, done, length = position
    batches = loop["epoch_loop.batch_progress"]
    for name, before in (("total", epoch * length), ("current", 0)):
        ready = before + done
        batches[name].update(ready=ready, started=ready, processed=ready, completed=ready - 1)
    batches["is_last_batch"] = done == length
    for progress in loop["epoch_progress"].values():
        progress.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1  # Lightning adds this one when it goes on
