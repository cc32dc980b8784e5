"""When checkpoints are written and which are kept; the strategy writes them."""

import contextlib
import logging
import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from lit_fsdp.checkpoint import disk_space, run_folder
from lit_fsdp.checkpoint.importing import IMPORTED
from lit_fsdp.checkpoint.manifest import record_metrics
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.run_folder import FOLDER, Found
from lit_fsdp.checkpoint.run_lock import RunLock
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.config.sections import build
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.metrics.step_metrics import end_of
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.mesh import data_ranks
from lit_fsdp.parallel.units import clean_name
from lit_fsdp.redaction import redact_values

_log = logging.getLogger(__name__)
_ACCUMULATION, _DATA_RANKS = "lit_fsdp.accumulate_grad_batches", "lit_fsdp.data_ranks"


class Checkpoint(ModelCheckpoint):
    """Writes ``<run folder>/checkpoints/step-00000050/`` at optimizer-step boundaries and keeps some.

    It saves every ``every_steps`` optimizer steps, at the end of training, and after each validation that is the best
    so far; :func:`lit_fsdp.checkpoint.run_folder.to_remove` selects what to remove. The run folder is the Trainer's
    ``default_root_dir`` and is locked for other jobs. With ``async_save``, training continues while a checkpoint is
    written; a failed save raises an error on every rank at the next save or at the end.

    Args:
        **options: The fields of :class:`lit_fsdp.config.run.CheckpointConfig`.

    Raises:
        ConfigError: An unknown option, an invalid value, or in ``fit`` a strategy that is not from ``fsdp_strategy``.
    """

    FILE_EXTENSION = ""

    def __init__(self, **options: Any) -> None:
        self.config = build(CheckpointConfig, options, "checkpoint")
        super().__init__(save_top_k=-1, save_on_train_epoch_end=False, enable_version_counter=False)
        self._saved_step = -1
        self._schedule: GradientAccumulationScheduler | None = None
        self._background: Any = None
        self._begun = ""
        self._has_warned = False
        self._checkpoint_bytes = 0
        self._locks = contextlib.ExitStack()
        self.exported: Path | None = None
        """The folder exported at the end of training, if ``export`` is set."""
        self.resumes: bool | None = None
        """Whether this rank has found a checkpoint to resume from, if the last one was requested."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set and lock the folder, and start the background saver if needed."""
        strategy: Any = trainer.strategy
        root = Path(trainer.default_root_dir)
        self.dirpath = str(root / FOLDER)
        given, allowed = f"{type(strategy).__name__} with lit_fsdp.Checkpoint", "a strategy of lit_fsdp.fsdp_strategy()"
        fix = "give the Trainer strategy=lit_fsdp.fsdp_strategy(engine=...), or Lightning's ModelCheckpoint"
        require(isinstance(strategy, EngineStrategy) or stage != "fit", "trainer.strategy", given, allowed, fix)
        if stage == "fit" and self.config.export is not None:
            word, is_ours = self.config.export, hasattr(pl_module, "read_tensor")
            given, allowed = f"{word} with {type(pl_module).__name__}", "null, or a model of lit_fsdp.CausalLMModule"
            require(is_ours, "checkpoint.export", given, allowed)
            can_rank = word == "last" or trainer.enable_validation
            require(can_rank, "checkpoint.export", "best without validation", "last", "name data.val or data.val_split")
        if stage == "fit" and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            Ranks().first("locking the run folder", lambda: self._take(root))
            if len(set(Ranks().run("looking for the last checkpoint", lambda: self.resumes))) > 1:
                raise CheckpointError(f"{root}: only some ranks see a checkpoint there; start the run again")
            is_wanted = self.config.in_background(is_accelerator(strategy.root_device), strategy.config.offloads)
            self._background = strategy.open_background() if is_wanted else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the first step; a run folder that already contains checkpoints can only be resumed."""
        if self._schedule is not None:  # Lightning does not call it for an epoch that is resumed in the middle
            self._schedule.on_train_epoch_start(trainer)
        loop: Any = trainer.fit_loop
        if loop.restarted_mid_epoch and loop.epoch_progress.total.processed == loop.epoch_progress.total.ready:
            # Lightning (2.6) ends that epoch, but then does not begin and count the next one, so that a second resume
            # would train one epoch too many: delete when findings/second-resume-trains-one-epoch-more.sh changes
            loop.reset_restart_stage()
        found = Ranks().first(f"looking at {trainer.default_root_dir}", lambda: self._begin(trainer))
        self._saved_step = trainer.global_step
        top = run_folder.ranked(found, self.config.monitor, self.config.mode)
        self.best_model_score = torch.tensor(top[0].metrics[self.config.monitor], dtype=torch.float64) if top else None
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            model = trainer.strategy.lightning_module_state_dict()  # collective under FSDP1
            params = [(clean_name(name), param) for name, param in pl_module.named_parameters()]
            self._checkpoint_bytes = disk_space.checkpoint_bytes(model, params, trainer.optimizers)
            estimate = end_of(trainer)
            steps = int(estimate) if 0 < estimate < math.inf else None
            if steps is None or trainer.global_step < steps:
                count = disk_space.peak_count(self.config, steps, trainer.enable_validation)
                line, how = self._check_room(trainer, count), "background" if self._background else "foreground"
                _log.info("%s; written in the %s (checkpoint.async_save)", line, how)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Unlock the run folder; after an exception the lock lasts until this process ends."""
        self._locks.close()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Save after every ``every_steps`` optimizer steps and after the last one."""
        if self._is_due(trainer):  # during accumulation the step is already saved or not due
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save if this validation was the best, and add its metrics (rank 0's) to the checkpoint of this step."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        own, monitor = {name: float(value) for name, value in trainer.callback_metrics.items()}, self.config.monitor
        metrics, is_better = Ranks().first("looking for the best", lambda: (own, self._is_better(own.get(monitor))))
        if self.config.keep_best and monitor not in metrics:
            self._say_missing(trainer, metrics)
        if self.config.keep_best and is_better:
            self.best_model_score = torch.tensor(metrics[monitor], dtype=torch.float64)
            self.save(trainer)
        if self._saved_step == trainer.global_step and monitor in metrics:
            self._tidy(trainer, metrics)

    def _say_missing(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Warn once that the monitored metric is not logged; some modules log it later."""
        if trainer.is_global_zero and not self._has_warned:
            text = "checkpoint.monitor: %s is not logged (logged: %s): until it is, no best checkpoint is kept"
            _log.warning(text, self.config.monitor, ", ".join(metrics) or "no metric")
        self._has_warned = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step unless it is saved already, and wait for the last save."""
        if trainer.global_step > max(self._saved_step, 0):
            self.save(trainer)
        self.finish()
        found = Ranks().first("looking for the best", lambda: run_folder.checkpoints(trainer.default_root_dir))
        top = run_folder.ranked(found, self.config.monitor, self.config.mode)
        self.best_model_path = str(top[0].path) if top else ""
        if self.config.export is not None:
            Ranks().first("exporting", lambda: self._export(Path(trainer.default_root_dir)))

    def _export(self, root: Path) -> None:
        """Export the checkpoint named by ``export`` as a Hugging Face folder, unless it exists; on rank 0."""
        from lit_fsdp.checkpoint.export import export

        (ckpt, *_) = run_folder.choose(self.config.export or "", root, self.config.monitor, self.config.mode)
        self.exported = root / "export" / ckpt.name
        if not self.exported.exists():
            export(ckpt, self.exported)

    def save(self, trainer: Trainer, on_signal: bool = False) -> None:
        """Save the current step once, on all ranks; a background save may still be writing on return.

        With ``on_signal`` the next save on a signal replaces this one. A CheckpointError is raised on every rank if
        this save could not start or the previous one failed.
        """
        folder = run_folder.step_folder(trainer.default_root_dir, trainer.global_step)
        if trainer.fast_dev_run or self._saved_step == trainer.global_step:  # type: ignore[attr-defined]
            return
        self.finish()
        self._check_room(trainer)
        strategy: Any = trainer.strategy
        strategy.saves_on_signal = on_signal and not self._is_due(trainer)
        with contextlib.nullcontext() if self._background is None else strategy.saving_in_background():
            trainer.save_checkpoint(folder, weights_only=False)
        self._saved_step, self._begun = trainer.global_step, str(folder)
        if self._background is None:
            self.finish()
        self._tidy(trainer, {})

    def finish(self) -> None:
        """Wait until the last save is complete; raise CheckpointError on every rank if it failed on any."""
        begun, self._begun = self._begun, ""
        if self._background is not None:
            self._background.wait()
        self.last_model_path = begun or self.last_model_path

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the accumulation for Lightning's micro-batch counters; secrets in hyper-parameters become ``***``."""
        checkpoint[_ACCUMULATION], checkpoint[_DATA_RANKS] = trainer.accumulate_grad_batches, data_ranks(trainer)[0]
        for key in ("hyper_parameters", "datamodule_hyper_parameters"):
            if key in checkpoint:
                checkpoint[key] = redact_values(checkpoint[key])

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Convert the counters to this run's micro-batches: the same step with other ranks or accumulation."""
        if checkpoint.get(IMPORTED):
            _fill_in_loops(trainer, checkpoint)
        saved = checkpoint.get(_ACCUMULATION), checkpoint.get(_DATA_RANKS)
        self._schedule = _count_in_micro_batches_of(trainer, checkpoint, *saved)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state is read from the run folder."""
        return {}

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether this step is saved regardless of validation."""
        every, step, loop = self.config.every_steps, trainer.global_step, trainer.fit_loop
        is_end = loop.epoch_loop.batch_progress.is_last_batch and trainer.current_epoch + 1 == loop.max_epochs
        return is_end or bool(every and step % every == 0) or 0 < trainer.max_steps <= step

    def _is_better(self, value: float | None) -> bool:
        """Whether a monitored value is the best so far."""
        if value is None or value != value:
            return False
        before = self.best_model_score
        return before is None or bool(value < before if self.config.mode == "min" else value > before)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """For Lightning's own ``ckpt_path="last"``; all ranks load the checkpoint that rank 0 has found."""
        root = Path(trainer.default_root_dir)
        self.resumes = bool(run_folder.survey(root / FOLDER))
        if not self.resumes:
            return set()
        return {str(run_folder.choose("last", root, self.config.monitor, self.config.mode)[0])}

    def _tidy(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """After the last save is complete, add metrics to its manifest and remove old checkpoints; on rank 0."""
        root, step = Path(trainer.default_root_dir), self._saved_step
        folder = run_folder.step_folder(root, step)

        def tidy() -> None:
            if metrics and folder.is_dir():  # a run that resumed here may have removed it
                record_metrics(folder, metrics)
            run_folder.retain(root, self.config, step)

        if self._background is None:
            Ranks().first(f"recording and removing in {self.dirpath}", tidy)
        elif trainer.is_global_zero:
            self._background.then(tidy)

    def _take(self, root: Path) -> None:
        """Lock the run folder and remove leftovers of killed jobs; on rank 0."""
        self._locks.callback(RunLock(root).release)
        run_folder.sweep(root)

    def _begin(self, trainer: Trainer) -> list[Found]:
        """Move checkpoints of later steps aside and return the others; on rank 0."""
        strategy: Any = trainer.strategy
        root, step = Path(trainer.default_root_dir), trainer.global_step
        found = run_folder.checkpoints(root)
        if step == 0:
            run_folder.refuse_used(root, found)
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            moved = run_folder.move_newer_aside(root, step, strategy.damaged_checkpoints)
            for old, new in moved.items():
                _log.warning("moved aside: %s is now %s, because this run resumes from step %d", old, new.name, step)
        return [entry for entry in found if entry.step <= step]

    def _check_room(self, trainer: Trainer, count: int | None = 1) -> str:
        """Compare the space for ``count`` simultaneous checkpoints with the free space; collective."""
        root = Path(trainer.default_root_dir)

        def check() -> str:
            run_folder.sweep(root)
            return disk_space.check_room(self.config, root, run_folder.checkpoints(root), self._checkpoint_bytes, count)

        return Ranks().first("looking for disk space", check)


def _count_in_micro_batches_of(
    trainer: Trainer, checkpoint: dict[str, Any], saved: int | None, saved_ranks: int | None
) -> GradientAccumulationScheduler | None:
    """Adapt the counters of the fit loop in a checkpoint to the run of ``trainer``, in place.

    The argument ``saved`` has the micro-batches per step, ``saved_ranks`` the ranks with rows of their own, both when
    the checkpoint was saved, if known. Five things are fixed. After the end of an epoch Lightning continues counting
    from its last micro-batch and would step too early if the last accumulation was short. After a save during a
    validation inside an accumulation, the data repeat that global batch. Another number of ranks changes the
    accumulation of our data module and, with Lightning's sampler, the number of batches in an epoch. With other global
    batches, our data module continues after the same rows. Returns the callback that sets the accumulation of each
    epoch.
    """
    loop = checkpoint["loops"]["fit_loop"]
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
    every = trainer.val_check_interval
    if before != now and isinstance(every, int) and trainer.is_global_zero and trainer.state.fn == "fit":
        text = "micro-batches per step: %d instead of %d, so trainer.val_check_interval: %d validates every %.3g steps"
        _log.info(f"{text}, not every %.3g", now, before, every, every / now, every / before)
    taken = 0 if batches["is_last_batch"] else current["ready"] % before
    ranks, is_ours = data_ranks(trainer)[0], hasattr(getattr(trainer, "datamodule", None), "position_at")
    is_divided = not is_ours and saved_ranks not in (None, ranks)
    if is_divided and not trainer._accelerator_connector.use_distributed_sampler:
        text = "resumed on %d data ranks instead of %d: the position of a custom sampler in the epoch may differ"
        _log.warning(text, ranks, saved_ranks)
        is_divided = False
    resumed = trainer.datamodule.resume_at(checkpoint["global_step"]) if is_ours else None  # type: ignore[attr-defined]
    for counters in (batches["total"], current):
        ready = counters["ready"] - taken
        if is_divided:
            ready *= saved_ranks or 1
            ready = -(-ready // ranks) if batches["is_last_batch"] else ready // ranks
        elif resumed is not None and counters is current:
            batches["is_last_batch"] |= resumed[0] == resumed[1]  # none of fewer rows remain
            ready = resumed[batches["is_last_batch"]]
        elif before != now:
            ready = -(-ready // before) * now
        counters.update({name: ready - (counters["ready"] - count) for name, count in counters.items()})
    return schedule


def _fill_in_loops(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Add Lightning's counters to an imported ``checkpoint`` as if a run of this recipe had saved them.

    A datamodule with ``position_at`` provides the epoch; otherwise the epoch starts at the import.
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
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1  # Lightning adds this step when it resumes
