"""Signals in a Trainer: all ranks vote at the step boundary, save one checkpoint and stop.

:mod:`lit_fsdp.signals` documents the effect of each signal. Lightning's own handlers (SIGTERM, and SIGUSR1 under
SLURM) are not installed: they save or communicate inside a handler. A user's own Trainer keeps them unless it gets
``flags = SignalFlags()``, ``flags.install()`` and ``callbacks=[StopOnSignal(flags), Checkpoint(...)]``.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.signals import EXIT_INTERRUPTED, EXIT_STOPPED, SignalFlags


class StopRequested(Exception):
    """Training ended at a step boundary because of a signal; the ``exit_code`` is 130 after Ctrl-C, else 75."""

    def __init__(self, exit_code: int, where: str) -> None:
        super().__init__(f"stopped by a signal {where}")
        self.exit_code = exit_code


class StopOnSignal(Callback):
    """Lets all ranks agree on a signal that any of them received (``flags``), save once and stop.

    Raises:
        StopRequested: On every rank, out of ``Trainer.fit``, when any rank got a signal.
    """

    def __init__(self, flags: SignalFlags) -> None:
        self.flags = flags
        self._pending: tuple[torch.Tensor, torch.Event] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Disable Lightning's handlers, its broadcast of a flag before every batch, and its requeue."""
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let Ctrl-C wait for the step boundary from now on, and handle signals received during setup."""
        step = self._seen_step = trainer.global_step
        self._pending, self.flags.training = None, True
        if code := _exit_code(self._vote_now(trainer)):
            where = f"before step {step + 1}, with nothing new to save; start it again with the same command"
            raise StopRequested(code, where)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set this rank's votes; our module sends them with its token counts."""
        pl_module.stop_votes = self._votes()  # type: ignore[assignment]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """After an optimizer step: if any rank voted, save on all and raise StopRequested on all."""
        if trainer.global_step == self._seen_step:
            return
        self._seen_step = trainer.global_step
        totals = getattr(pl_module, "step_totals", None)
        votes = self._vote_now(trainer) if totals is None else totals[-2:]
        if is_accelerator(votes.device):  # votes of the previous step, so that the host never waits for the device
            before, event = self._pending, torch.get_device_module(votes.device).Event()
            self._pending = votes.to("cpu", non_blocking=True), event
            event.record()
            if before is None:
                return
            votes = before[0]
            before[1].synchronize()
        if code := _exit_code(votes):
            is_last = trainer.global_step == trainer.max_steps
            rest = "this was the last step" if is_last else "resume with --ckpt_path last"
            saved = f"; the checkpoint is complete; {rest}"
            unsaved = " without saving: the Trainer has no checkpoint callback"
            where = f"after step {trainer.global_step}{saved if _save(trainer) else unsaved}"
            # Lightning does this after the callbacks of a batch: the completed step must be logged
            trainer._logger_connector.on_batch_end()
            trainer._logger_connector.update_train_step_metrics()
            raise StopRequested(code, where)

    def _vote_now(self, trainer: Trainer) -> torch.Tensor:
        votes = torch.tensor(self._votes(), device=trainer.strategy.root_device)
        return trainer.strategy.reduce(votes, reduce_op="sum")

    def _votes(self) -> list[float]:
        return [float(self.flags.interrupted), float(self.flags.terminated)]


def _exit_code(votes: torch.Tensor) -> int:
    interrupted, terminated = votes.tolist()
    return EXIT_INTERRUPTED if interrupted else EXIT_STOPPED if terminated else 0


def _save(trainer: Trainer) -> bool:
    """Save with our callback, else with Lightning's as its last checkpoint; return whether there is any callback."""
    callbacks: list[Any] = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    ours = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    for callback in ours:
        callback.save(trainer, on_signal=True)
        callback.finish()
    if callbacks and not ours:
        trainer.save_checkpoint(Path(callbacks[0].dirpath, f"{callbacks[0].CHECKPOINT_NAME_LAST}.ckpt"))
    return bool(callbacks)
