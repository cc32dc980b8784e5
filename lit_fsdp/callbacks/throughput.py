"""Tokens per second, step time and peak memory, from the counts that travel with each step's all-reduce anyway."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.metrics.counts import step_counts
from lit_fsdp.metrics.memory import GIB, peak_device_bytes


class Throughput(Callback):
    """Logs rates over all ranks between two logged steps; validation, saving and the first step are not counted.

    The clock runs from the end of one step to the end of the next, so that waiting for data counts.

    ``tokens_per_second`` counts all tokens without padding, ``supervised_tokens_per_second`` those that are learnt.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._seconds = 0.0
        self._steps = 0
        self._step_started = self._step_ended = 0.0
        self._paused = False
        self._seen_step = 0
        self._warm = False
        self.total_tokens = self.total_seconds = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._seen_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock where the step before ended, or here after a pause."""
        if not self._step_started:
            self._step_started = time.perf_counter() if self._paused or not self._warm else self._step_ended
            self._paused = False

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A pause."""
        self._paused = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A pause."""
        self._paused = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop the clock after the optimizer step; log every ``log_every_n_steps``."""
        if trainer.global_step == self._seen_step:
            return
        self._seen_step = trainer.global_step
        totals = getattr(pl_module, "step_totals", None)
        if totals is None:
            return
        if self._warm:
            self._sum = totals if self._sum is None else self._sum + totals
            self._steps += 1
        is_logged = trainer.global_step % _log_every(trainer) == 0 and self._sum is not None
        counts = self._sum.tolist() if is_logged and self._sum is not None else None  # waits for the device
        self._step_ended = time.perf_counter()
        if self._warm:
            self._seconds += self._step_ended - self._step_started
        self._step_started, self._warm = 0.0, True
        if counts is not None:
            self._log(trainer, pl_module, counts)

    def _log(self, trainer: Trainer, pl_module: LightningModule, counts: list[float]) -> None:
        found = step_counts(counts)
        supervised, tokens, samples = found["supervised_tokens"], found["tokens"], found["samples"]
        seconds = max(self._seconds, 1e-9)
        self.total_tokens += tokens
        self.total_seconds += seconds
        pl_module.log("tokens_per_second", tokens / seconds, prog_bar=True)
        pl_module.log("supervised_tokens_per_second", supervised / seconds)
        pl_module.log("samples_per_second", samples / seconds)
        pl_module.log("step_seconds", seconds / self._steps)
        pl_module.log("peak_memory_gib", peak_device_bytes(trainer.strategy.root_device) / GIB, prog_bar=True)
        self._sum, self._seconds, self._steps = None, 0.0, 0


def _log_every(trainer: Trainer) -> int:
    return max(1, int(trainer.log_every_n_steps))  # type: ignore[attr-defined]  # set by a connector
