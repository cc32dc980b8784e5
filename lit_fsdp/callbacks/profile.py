"""A window of :mod:`torch.profiler` over a few optimizer steps, with marks for their phases."""

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import profile, record_function, schedule

from lit_fsdp.callbacks.records import gathered
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.metrics.trace import PREFIX, WARMUP_STEPS, trace_record

_TOP = 8


class ProfileWindow(Callback):
    """Traces ``steps`` optimizer steps on every rank, after the first ``WARMUP_STEPS``, and ends training.

    The phases follow one another without gaps: the wait for data, from the end of a batch to the start of the next;
    forward; backward; the optimizer, including the rest of the batch. Each rank writes its Chrome trace to
    ``rank-N.json`` in ``folder``; older traces there are removed.
    """

    def __init__(self, steps: int, folder: Path) -> None:
        self.steps, self.folder = steps, folder
        self.records: list[dict[str, Any]] = []
        """The result of :func:`lit_fsdp.metrics.trace.trace_record` for each rank after the window, and
        ``operators``: name, ms and calls per step of the operators with the longest self time."""
        self._mark = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start with the warm-up steps."""
        for path in self.folder.glob("rank-*.json") if trainer.is_global_zero else ():
            path.unlink()
        self._done, self._seen_step = 0, trainer.global_step
        self._profile = profile(schedule=schedule(wait=WARMUP_STEPS - 1, warmup=1, active=self.steps, repeat=1))
        self._profile.start()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the forward phase."""
        self._begin("forward")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Start the backward phase."""
        self._begin("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the optimizer phase."""
        self._begin("optimizer")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an optimizer step; after the last one read the traces and end training."""
        self._begin(None)
        if trainer.global_step != self._seen_step:
            self._seen_step, self._done = trainer.global_step, self._done + 1
            device = trainer.strategy.root_device
            if is_accelerator(device) and self._done in (WARMUP_STEPS, WARMUP_STEPS + self.steps):
                torch.get_device_module(device).synchronize()  # the window starts and ends with an idle device
            self._profile.step()
            if self._done == WARMUP_STEPS + self.steps:
                self.records = gathered(self._record(self.folder / f"rank-{trainer.global_rank}.json"))
                trainer.should_stop = True
        self._begin("data wait")

    def _begin(self, phase: str | None) -> None:
        self._mark.close()
        if phase:
            self._mark.enter_context(record_function(f"{PREFIX}{phase}"))

    def _record(self, path: Path) -> dict[str, Any]:
        self._profile.export_chrome_trace(str(path))
        record = trace_record(json.loads(path.read_text(encoding="utf-8")))
        kind = f"self_{'device' if record['on'] == 'device' else 'cpu'}_time_total"
        every = (one for one in self._profile.key_averages() if not one.key.startswith((PREFIX, "ProfilerStep")))
        longest = sorted(every, key=lambda one: -getattr(one, kind))[:_TOP]
        operators = [(one.key, getattr(one, kind) / 1000 / self.steps, one.count / self.steps) for one in longest]
        return {**record, "operators": operators}
