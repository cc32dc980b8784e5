"""When a checkpoint is written and which ones stay; how it is written is the strategy's business."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from lit_fsdp.callbacks.background import announce, open_background
from lit_fsdp.callbacks.counters import count_in_micro_batches_of, fill_in_loops, is_imported
from lit_fsdp.callbacks.disk_space import DiskSpace, raise_alike
from lit_fsdp.callbacks.resume import make_room
from lit_fsdp.checkpoint import retention
from lit_fsdp.checkpoint.find import FOLDER, best, checkpoints, resolve_ckpt_path, survey
from lit_fsdp.checkpoint.manifest import record_metrics
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.run_lock import RunLock
from lit_fsdp.config.parser import build
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError
from lit_fsdp.redaction import redact_values

_log = logging.getLogger(__name__)
_ACCUMULATION = "lit_fsdp.accumulate_grad_batches"


class Checkpoint(ModelCheckpoint):
    """Writes ``<run folder>/checkpoints/step-00000050/`` at optimizer-step boundaries and keeps some.

    Saved is every ``every_steps`` optimizer steps, at the end of training, and after a validation that was better than
    all before. Kept are the last k, the best k and every n-th, but of those saved on a signal between only the newest
    (see :func:`lit_fsdp.checkpoint.retention.to_remove`). The run folder is the Trainer's ``default_root_dir``; no
    other job can train in it meanwhile. The metrics of a validation go into the manifest of its step's checkpoint
    afterwards, so that saving never waits for a validation.

    With ``async_save`` a checkpoint is written while training goes on. That it stands, or has failed, is known on all
    ranks at the same later step; only then are its metrics recorded and old ones removed.

    Args:
        **options: The fields of :class:`lit_fsdp.config.run.CheckpointConfig`.

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
        self._schedule: GradientAccumulationScheduler | None = None
        self._background: Any = None
        self._pending: Path | None = None
        self._late_metrics: dict[str, float] = {}
        self._space = DiskSpace(self.config)
        self._lock: RunLock | None = None
        self._agreed = True

    @property
    def state_key(self) -> str:
        """One entry per run, whatever the options."""
        return "lit_fsdp.Checkpoint"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Fix the folder, keep other jobs out of it, and make what saves in the background, if anything is to."""
        self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise_alike(lambda: self._take(Path(trainer.default_root_dir)), "locking the run folder")
            self._agreed = True
            self._background = open_background(trainer, self.config.async_save)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note where this run starts; a run folder that already holds checkpoints is only resumed, never mixed."""
        if self._schedule is not None:  # Lightning tells it of no epoch that is resumed in the middle
            self._schedule.on_train_epoch_start(trainer)
        if trainer.global_step == 0:
            refuse_used_run_folder(Path(trainer.default_root_dir))
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            make_room(trainer)
        self._seen_step = self._saved_step = trainer.global_step
        top = best(checkpoints(Path(trainer.default_root_dir)), self.config.monitor, self.config.mode)
        self._best_value = top.metrics[self.config.monitor] if top else None
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._space.check_run(trainer, pl_module)
            announce(trainer, self._background, self._space.contents)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let other jobs use the run folder; after an exception they have to wait until this process ends."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after every ``every_steps`` optimizer steps and after the last one."""
        step = trainer.global_step
        if step == self._seen_step:  # in the middle of an accumulation
            return
        self._seen_step = step
        self._settle(trainer, wait=False)
        if self._is_due(trainer):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if this validation was the best, put its metrics into the checkpoint of this step, apply retention.

        The metrics are those of rank 0: a metric that is not reduced over ranks differs between them.
        """
        if trainer.sanity_checking or trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        own = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics, is_better = Ranks().first(
            "looking for the best", lambda: (own, self._is_better(own.get(self.config.monitor)))
        )
        if self.config.keep_best and is_better:
            self._best_value = metrics[self.config.monitor]
            self.save(trainer)
        folder = self._folder(trainer.global_step)
        if self._saved_step != trainer.global_step or self.config.monitor not in metrics:
            return
        if self._pending is not None:
            self._late_metrics.update(metrics)
            self._settle(trainer, wait=False)
            return
        self._tidy(trainer, folder, metrics)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: checkpoints exist at optimizer steps only."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a run that something else ended, unless its last step is saved already; wait for the last save."""
        if trainer.global_step > max(self._saved_step, 0):
            self.save(trainer)
        self.finish(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the save that is being written end, no more: after an exception the ranks may not agree on a step."""
        self._agreed = False
        try:
            self.finish(trainer)
        except CheckpointError as error:
            _log.error("the checkpoint that was being written is not complete: %s", error)

    def save(self, trainer: Trainer, on_signal: bool = False) -> Path:
        """Save the current step on all ranks, once; returns its folder, which may be written for a while yet.

        Args:
            trainer: Whose step it is.
            on_signal: Whether only a signal is the reason, so that the next of these replaces it.

        Raises:
            CheckpointError: On every rank: this save could not begin, or the one before it has failed.
        """
        folder = self._folder(trainer.global_step)
        if trainer.fast_dev_run or self._saved_step == trainer.global_step:  # type: ignore[attr-defined]
            return folder
        self.finish(trainer)
        self._space.check_save(trainer.global_step)
        trainer.strategy.saves_on_signal = on_signal and not self._is_due(trainer)  # type: ignore[attr-defined]
        if self._background is None:
            trainer.save_checkpoint(folder, weights_only=False)
            self._saved_step = trainer.global_step
            self._complete(trainer, folder)
        else:
            strategy: Any = trainer.strategy
            with strategy.saving_in_background():
                trainer.save_checkpoint(folder, weights_only=False)
            self._saved_step, self._pending = trainer.global_step, folder
        return folder

    def finish(self, trainer: Trainer) -> None:
        """Wait until the last save stands, then record its metrics and apply retention.

        Raises:
            CheckpointError: It has failed, on whichever rank.
        """
        self._settle(trainer, wait=True)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note what Lightning's counters of micro-batches count in; secrets among hyper-parameters become ``***``."""
        checkpoint[_ACCUMULATION] = trainer.accumulate_grad_batches
        for key in ("hyper_parameters", "datamodule_hyper_parameters"):
            if key in checkpoint:
                checkpoint[key] = redact_values(checkpoint[key])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let the counters count in this run's micro-batches: other ranks, another accumulation, the same step."""
        if is_imported(checkpoint):
            fill_in_loops(trainer, checkpoint)
        saved = checkpoint.get(_ACCUMULATION)
        self._schedule = count_in_micro_batches_of(trainer, checkpoint["loops"]["fit_loop"], saved)

    def state_dict(self) -> dict[str, Any]:
        """Nothing needs to travel: what exists is read from the run folder."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :meth:`state_dict`."""

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether this step is saved in any case."""
        every = self.config.every_steps
        return bool(every and trainer.global_step % every == 0) or _is_last_step(trainer)

    def _is_better(self, value: float | None) -> bool:
        """Whether a monitored value beats all before."""
        if value is None or value != value:
            return False
        before = self._best_value
        return before is None or (value < before if self.config.mode == "min" else value > before)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """For Lightning's own ``ckpt_path="last"``."""
        run_folder = Path(trainer.default_root_dir)
        if not survey(run_folder / FOLDER):
            return set()
        return {str(resolve_ckpt_path("last", run_folder, self.config.monitor, self.config.mode))}

    def _folder(self, step: int) -> Path:
        assert self.dirpath is not None
        return Path(self.dirpath) / f"step-{step:08d}"

    def _settle(self, trainer: Trainer, wait: bool) -> None:
        """Do what waited for the last save, if it has ended; without ``wait`` all ranks have to be at the same step."""
        if self._pending is None:
            return
        try:
            ended = self._background.wait() if wait else self._background.poll()
        except CheckpointError:
            self._pending = None
            raise
        if ended:
            folder, self._pending = self._pending, None
            self._complete(trainer, folder)

    def _complete(self, trainer: Trainer, folder: Path) -> None:
        """What waits until a checkpoint stands."""
        self.last_model_path = str(folder)
        metrics, self._late_metrics = self._late_metrics, {}
        self._tidy(trainer, folder, metrics)

    def _tidy(self, trainer: Trainer, folder: Path, metrics: dict[str, float]) -> None:
        """Put metrics into the manifest and remove old checkpoints, on rank 0; all ranks learn if that fails.

        That is collective; after an exception only the metrics are recorded.
        """

        def tidy() -> Path | None:
            if metrics and folder.is_dir():  # a run that resumed here may have lost it since
                record_metrics(folder, metrics)
            return retention.retain(Path(trainer.default_root_dir), self.config, self._saved_step) if agreed else None

        agreed = self._agreed
        if agreed:
            self.best_model_path = str(Ranks().first(f"recording and removing in {self.dirpath}", tidy) or "")
        elif trainer.is_global_zero:
            tidy()

    def _take(self, run_folder: Path) -> None:
        """Lock the run folder and clear away what killed jobs have left there; on rank 0."""
        if self._lock is None:
            self._lock = RunLock(run_folder)
        retention.sweep(run_folder / FOLDER)


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
