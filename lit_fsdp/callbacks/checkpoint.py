"""When a checkpoint is written and which ones stay; how it is written is the strategy's business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_fsdp.checkpoint import retention
from lit_fsdp.checkpoint.find import best, checkpoints
from lit_fsdp.checkpoint.manifest import record_metrics
from lit_fsdp.config.checkpoint import CheckpointConfig
from lit_fsdp.config.typed import build
from lit_fsdp.errors import CheckpointError

_ACCUMULATION = "lit_fsdp.accumulate_grad_batches"


class Checkpoint(ModelCheckpoint):
    """Writes ``<run folder>/checkpoints/step-00000050/`` at optimizer-step boundaries and keeps some.

    Saved is every ``every_steps`` optimizer steps, at the end of training, and after a validation that was better than
    all before. Kept are the last k and the best. The run folder is the Trainer's ``default_root_dir``. The metrics of a
    validation go into the manifest of its step's checkpoint afterwards, so that saving never waits for a validation.

    Args:
        **options: The fields of :class:`lit_fsdp.config.checkpoint.CheckpointConfig`.

    Raises:
        ConfigError: An unknown option or a wrong value.
    """

    FILE_EXTENSION = ""

    def __init__(self, **options: Any) -> None:
        self.config = build(CheckpointConfig, options, "checkpoint")
        super().__init__(save_top_k=-1, save_on_train_epoch_end=False, enable_version_counter=False)
        self._saved_step = -1
        self._seen_step = 0
        self._best_value: float | None = None

    @property
    def state_key(self) -> str:
        """One entry per run, whatever the options."""
        return "lit_fsdp.Checkpoint"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fix the folder."""
        self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where this run starts; a run folder that already holds checkpoints is only resumed, never mixed."""
        if trainer.global_step == 0:
            refuse_used_run_folder(Path(trainer.default_root_dir))
        self._seen_step = self._saved_step = trainer.global_step
        top = best(checkpoints(Path(trainer.default_root_dir)), self.config.monitor, self.config.mode)
        self._best_value = top.metrics[self.config.monitor] if top else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after every ``every_steps`` optimizer steps and after the last one."""
        step = trainer.global_step
        if step == self._seen_step:  # in the middle of an accumulation
            return
        self._seen_step = step
        every = self.config.every_steps
        if (every and step % every == 0) or _is_last_step(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if this validation was the best, put its metrics into the checkpoint of this step, apply retention."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self._is_better(metrics.get(self.config.monitor)):
            self._best_value = metrics[self.config.monitor]
            self.save(trainer)
        folder = self._folder(trainer.global_step)
        if self._saved_step != trainer.global_step or self.config.monitor not in metrics:
            return
        if trainer.is_global_zero and folder.is_dir():  # a run that resumed here may have lost it since
            record_metrics(folder, metrics)
        self._retain(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: checkpoints exist at optimizer steps only."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a run that something else ended, unless its last step is saved already."""
        if trainer.global_step > max(self._saved_step, 0):
            self.save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Nothing: after an exception the ranks may not agree on a step."""

    def save(self, trainer: Trainer) -> Path:
        """Write the current step's checkpoint on all ranks, once, and apply retention; returns its folder."""
        folder = self._folder(trainer.global_step)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return folder
        if self._saved_step != trainer.global_step:
            trainer.save_checkpoint(folder, weights_only=False)
            self._saved_step = trainer.global_step
            self.last_model_path = str(folder)
            self._retain(trainer)
        return folder

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note what Lightning's counters of micro-batches count in."""
        checkpoint[_ACCUMULATION] = trainer.accumulate_grad_batches

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let the counters count in this run's micro-batches: other ranks, another accumulation, the same step."""
        loop = checkpoint["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        close_epoch(loop["epoch_progress"], batches)
        now = trainer.accumulate_grad_batches
        before = checkpoint.get(_ACCUMULATION, now)
        begin_window_again(batches, before)
        if before != now:
            rescale_progress(batches, before, now)

    def state_dict(self) -> dict[str, Any]:
        """Nothing needs to travel: what exists is read from the run folder."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`state_dict`."""

    def _is_better(self, value: float | None) -> bool:
        """Whether a monitored value, the same on every rank, beats all before."""
        if value is None or value != value:
            return False
        before = self._best_value
        return before is None or (value < before if self.config.mode == "min" else value > before)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """For Lightning's own ``ckpt_path="last"``."""
        found = checkpoints(Path(trainer.default_root_dir))
        return {str(found[-1].path)} if found else set()

    def _folder(self, step: int) -> Path:
        assert self.dirpath is not None
        return Path(self.dirpath) / f"step-{step:08d}"

    def _retain(self, trainer: Trainer) -> None:
        found = checkpoints(Path(trainer.default_root_dir))
        top = best(found, self.config.monitor, self.config.mode)
        self.best_model_path = str(top.path) if top else ""
        if trainer.is_global_zero:
            for old in retention.to_remove(found, self.config.keep_last, self.config.monitor, self.config.mode):
                retention.remove(old.path)


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


def refuse_used_run_folder(run_folder: Path) -> None:
    """Refuse to start a new run where another one has left checkpoints.

    Raises:
        CheckpointError: There are checkpoints; says which and what to do.
    """
    found = checkpoints(run_folder)
    if found:
        raise CheckpointError(
            f"{run_folder} already holds {len(found)} checkpoint(s), the newest of step {found[-1].step}\n"
            "  fix:     resume it with --ckpt_path last, or name another trainer.default_root_dir"
        )


def _is_last_step(trainer: Trainer) -> bool:
    if trainer.max_steps > 0 and trainer.global_step >= trainer.max_steps:
        return True
    loop = trainer.fit_loop
    return loop.epoch_loop.batch_progress.is_last_batch and trainer.current_epoch + 1 == (loop.max_epochs or -1)
