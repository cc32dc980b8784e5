"""Signals: a flag in the handler, a vote of all ranks at the step boundary, one checkpoint, then the end.

Nothing is saved inside a handler: ranks would be interrupted at different places and wait for each other for good
(https://github.com/Lightning-AI/pytorch-lightning/issues/21406). Lightning's own handlers are not installed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.host import is_first_process

EXIT_STOPPED, EXIT_INTERRUPTED = 75, 130


class StopRequested(Exception):
    """Training ended at a step boundary because of a signal; the checkpoint of that step is complete.

    Args:
        exit_code: 130 after Ctrl-C, 75 after SIGTERM or SIGUSR1.
        step: The step that was saved.
    """

    def __init__(self, exit_code: int, step: int) -> None:
        super().__init__(f"stopped by a signal after step {step}; the checkpoint is complete")
        self.exit_code, self.step = exit_code, step


class SignalFlags:
    """Remembers signals from :meth:`install` until the process ends.

    Until training begins Ctrl-C ends the process at once; while it runs, the first one waits for the step boundary and
    a second one ends the process. A thread listens, because Python's handlers wait for a call into C++ to return, and
    a rank may be waiting for its peers there.
    """

    def __init__(self) -> None:
        self.interrupted = self.terminated = self.training = False
        self.before_exit: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGUSR1 from now on (main thread only)."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: None)

    def _listen(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 16):
                self.receive(signal.Signals(number))

    def receive(self, number: signal.Signals) -> None:
        """Take note of a signal, or end the process on the Ctrl-C that asks for it."""
        if number in (signal.SIGTERM, signal.SIGUSR1):
            self.terminated = True
        elif number == signal.SIGINT and self.training and not self.interrupted:
            self.interrupted = True
        elif number == signal.SIGINT:
            if is_first_process():
                sys.stderr.write("interrupted\n")
                sys.stderr.flush()
            self.before_exit()
            os._exit(EXIT_INTERRUPTED)


class StopOnSignal(Callback):
    """Lets all ranks agree on a signal that any of them received, save once and stop.

    Args:
        flags: Set by the handlers of this process.
    """

    def __init__(self, flags: SignalFlags) -> None:
        self.flags = flags
        self._seen_step = 0
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep Lightning's handlers out, and with them its broadcast of a SIGTERM flag before every batch."""
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on Ctrl-C waits for the step boundary."""
        self._seen_step = trainer.global_step
        self.flags.training = True

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
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoint):
                callback.save(trainer)
        raise StopRequested(EXIT_INTERRUPTED if interrupted else EXIT_STOPPED, trainer.global_step)

    def _votes(self) -> list[float]:
        return [float(self.flags.interrupted), float(self.flags.terminated)]

    def _agreed(self, trainer: Trainer, pl_module: LightningModule) -> tuple[bool, bool]:
        totals = getattr(pl_module, "step_totals", None)
        if totals is None:  # somebody else's module: one small all-reduce of our own
            votes = torch.tensor(self._votes(), device=trainer.strategy.root_device)
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(votes)
        else:
            votes = totals[-2:]
        if votes.is_cuda:
            return self._lagged(votes)
        interrupted, terminated = votes.tolist()
        return interrupted > 0, terminated > 0

    def _lagged(self, votes: torch.Tensor) -> tuple[bool, bool]:
        """The votes of the step before, so that the host never waits for the device; the same on every rank."""
        before = self._pending
        copy = torch.empty(2, dtype=votes.dtype, pin_memory=True)
        copy.copy_(votes, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending = (copy, event)
        if before is None:
            return False, False
        before[1].synchronize()
        interrupted, terminated = before[0].tolist()
        return interrupted > 0, terminated > 0
