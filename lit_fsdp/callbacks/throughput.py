"""Rates, waiting, FLOP/s and peak memory, from the counts that travel with each step's all-reduce anyway."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.callbacks.flop_meter import FlopMeter
from lit_fsdp.metrics.counts import step_counts
from lit_fsdp.metrics.memory import GIB, peak_device_bytes, peak_reserved_bytes


class Throughput(Callback):
    """Logs rates over all ranks between two logged steps; validation, saving and the first step are not counted.

    The clock runs from the end of one step to the end of the next, so that waiting for data counts. The device is
    waited for at logged steps only, and nothing is sent between ranks.

    ``tokens_per_second`` counts all tokens without padding, ``supervised_tokens_per_second`` those that are learnt.
    ``padding_share`` is the share of places that hold no token. ``data_wait_share`` is this rank's own: the time
    between two forward passes, in which the next batch is waited for and moved to the device. ``mfu`` and ``hfu`` are
    those of :class:`~lit_fsdp.callbacks.flop_meter.FlopMeter`; where one cannot be known, a line says why, once, and
    it is not logged.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._seconds = self._waited = 0.0
        self._steps = 0
        self._step_started = self._step_ended = self._batch_ended = 0.0
        self._paused = False
        self._seen_step = 0
        self._warm = False
        self._flops = FlopMeter()
        self.total_tokens = self.total_seconds = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the shapes of the model before they are sharded."""
        if stage == "fit":
            self._flops.read_shapes(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._seen_step = trainer.global_step
        missing = self._flops.read_device(trainer, pl_module)
        if missing and trainer.is_global_zero:
            print("\n".join(missing), file=sys.stderr)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock where the step before ended, or here after a pause."""
        now = time.perf_counter()
        if self._warm and not self._paused:
            self._waited += now - self._batch_ended
        if not self._step_started:
            self._step_started = now if self._paused or not self._warm else self._step_ended
        elif self._paused:  # between two micro-batches of a step, as validation may come
            self._step_started += now - self._batch_ended
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
        if trainer.global_step != self._seen_step:
            self._seen_step = trainer.global_step
            self._end_step(trainer, pl_module)
        self._batch_ended = time.perf_counter()

    def _end_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
            self._log(trainer, pl_module, step_counts(counts))

    def _log(self, trainer: Trainer, pl_module: LightningModule, counts: dict[str, float]) -> None:
        seconds = max(self._seconds, 1e-9)
        self.total_tokens += counts["tokens"]
        self.total_seconds += seconds
        device = trainer.strategy.root_device
        found = {
            "tokens_per_second": counts["tokens"] / seconds,
            "supervised_tokens_per_second": counts["supervised_tokens"] / seconds,
            "samples_per_second": counts["samples"] / seconds,
            "step_seconds": seconds / self._steps,
            "padding_share": 1 - counts["tokens"] / max(1.0, counts["slots"]),
            "data_wait_share": self._waited / seconds,
            **self._flops.rates(counts, seconds),
            "peak_memory_gib": peak_device_bytes(device) / GIB,
        }
        reserved = peak_reserved_bytes(device)
        if reserved is not None:
            found["peak_reserved_gib"] = reserved / GIB
        for name, value in found.items():
            pl_module.log(name, value, prog_bar=name in ("tokens_per_second", "mfu", "peak_memory_gib"))
        self._sum, self._seconds, self._waited, self._steps = None, 0.0, 0.0, 0


def _log_every(trainer: Trainer) -> int:
    return max(1, int(trainer.log_every_n_steps))  # type: ignore[attr-defined]  # set by a connector
