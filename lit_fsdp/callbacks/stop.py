"""Signals in a Trainer: a vote of all ranks at the step boundary, one checkpoint, then the end.

When which signal does what stands in :mod:`lit_fsdp.signals`. Lightning's own handlers (SIGTERM, and SIGUSR1 under
SLURM) are not installed: they save or communicate inside a handler. Somebody's own Trainer keeps them unless it is
given ``flags = SignalFlags()``, ``flags.install()`` and ``callbacks=[StopOnSignal(flags), Checkpoint(...)]``: Lightning
then broadcasts inside its SIGTERM handler, which can wait for good when one rank alone is told, and saves nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.signals import EXIT_INTERRUPTED, EXIT_STOPPED, SignalFlags


class StopRequested(Exception):
    """Training ended at a step boundary because of a signal; ``is_saved``: with a checkpoint of ``step``.

    ``exit_code`` is 130 after Ctrl-C, 75 after SIGTERM or SIGUSR1; ``is_new``: this run has taken a step.
    """

    def __init__(self, exit_code: int, step: int, is_saved: bool = True, is_new: bool = True) -> None:
        where = (
            f"after step {step}; the checkpoint is complete; resume with --ckpt_path last" if is_saved
            else f"after step {step}, which nothing saves: the Trainer has no checkpoint callback" if is_new
            else f"before step {step + 1}, with nothing new to save; start it again with the same words"
        )  # fmt: skip
        super().__init__(f"stopped by a signal {where}")
        self.exit_code, self.step, self.is_saved = exit_code, step, is_saved


class StopOnSignal(Callback):
    """Lets all ranks agree on a signal that any of them received (``flags``), save once and stop.

    Raises:
        StopRequested: On every rank, out of ``Trainer.fit``, when any rank got a signal.
    """

    def __init__(self, flags: SignalFlags) -> None:
        self.flags = flags
        self._seen_step = 0
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep Lightning's handlers out, its broadcast of a flag before every batch, and its requeue."""
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment):
            environment.auto_requeue = False
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on Ctrl-C waits for the step boundary; signals that came during set-up are heard now."""
        self._seen_step, self._pending = trainer.global_step, None
        self.flags.training = True
        interrupted, terminated = self._vote_now(trainer).tolist()
        if interrupted or terminated:
            code = EXIT_INTERRUPTED if interrupted else EXIT_STOPPED
            raise StopRequested(code, trainer.global_step, is_saved=False, is_new=False)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Cast this rank's votes; our module sends them along with its token counts."""
        pl_module.stop_votes = self._votes()  # type: ignore[assignment]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimizer step: if any rank voted, save on all and raise StopRequested on all."""
        if trainer.global_step == self._seen_step:
            return
        self._seen_step = trainer.global_step
        interrupted, terminated = self._agreed(trainer, pl_module)
        if not (interrupted or terminated):
            return
        is_saved = self._save(trainer)
        # what Lightning does after the callbacks of a batch: the step has been taken, so it belongs into the log
        trainer._logger_connector.on_batch_end()
        trainer._logger_connector.update_train_step_metrics()
        raise StopRequested(EXIT_INTERRUPTED if interrupted else EXIT_STOPPED, trainer.global_step, is_saved)

    def _save(self, trainer: Trainer) -> bool:
        """Save by our callback, or where there is none as Lightning's saves its last; whether either is there."""
        ours = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Checkpoint)]
        theirs = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in ours:
            callback.save(trainer, on_signal=True)
            callback.finish(trainer)
        if theirs and not ours:
            name = theirs[0].CHECKPOINT_NAME_LAST + theirs[0].FILE_EXTENSION
            trainer.save_checkpoint(Path(str(theirs[0].dirpath)) / name)
        return bool(theirs)

    def _vote_now(self, trainer: Trainer) -> torch.Tensor:
        votes = torch.tensor(self._votes(), device=trainer.strategy.root_device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(votes)
        return votes

    def _votes(self) -> list[float]:
        return [float(self.flags.interrupted), float(self.flags.terminated)]

    def _agreed(self, trainer: Trainer, pl_module: LightningModule) -> tuple[bool, bool]:
        totals = getattr(pl_module, "step_totals", None)
        # somebody else's module: one small all-reduce of our own
        votes = self._vote_now(trainer) if totals is None else totals[-2:]
        if votes.is_cuda:  # those of the step before, on every rank: the host never waits for the device
            before, event = self._pending, torch.cuda.Event()
            self._pending = votes.to("cpu", non_blocking=True), event
            event.record()
            if before is None:
                return False, False
            votes = before[0]
            before[1].synchronize()
        interrupted, terminated = votes.tolist()
        return interrupted > 0, terminated > 0
