"""A progress bar over the whole run, in optimizer steps, on rank 0 only."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

_SHOWN = {
    "train_loss": "loss {:.4f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "supervised_tokens_per_second": "{:,.0f} supervised",
    "mfu": "MFU {:.1%}",
    "padding_share": "padding {:.0%}",
    "data_wait_share": "wait {:.0%}",
    "peak_memory_gib": "peak {:.2f} GiB",
}
_NEXT_LINE_SECONDS, _SILENCE_SECONDS = 10.0, 15.0
"""Since the last line: when a step that ends is worth one, and when it is time for one although none has ended."""


class RunProgress(ProgressBar):
    """Loss, rates, MFU where it is known, peak memory and time left; plain lines where there is no terminal.

    Without a terminal there is a line after the first step, after every ``log_every_n_steps`` and at least every 20 s,
    also while a step or a validation takes longer than that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_enabled = True
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._first_step = self._seen_step = 0
        self._total: int | None = None
        self._started = self._said = self._stepped = 0.0
        self._ended = threading.Event()

    def disable(self) -> None:
        """Say nothing; Lightning calls this on every rank but 0."""
        self._is_enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar, or begin to break silences."""
        self._seen_step = self._first_step = trainer.global_step
        self._started = self._said = self._stepped = time.perf_counter()
        if not self._is_enabled:
            return
        steps = trainer.estimated_stepping_batches
        self._total = int(steps) if steps not in (-1, float("inf")) else None
        console = Console(stderr=True)
        if sys.stderr.isatty() and console.is_interactive:  # a dumb terminal would show the last line alone
            done = (TextColumn("step {task.completed}/{task.total}"), BarColumn(10))
            # where the line is too narrow for all, the numbers at its end give way
            numbers = TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1))
            columns = (*done, TimeElapsedColumn(), TimeRemainingColumn(), numbers)
            self._bar = Progress(*columns, console=console, expand=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=trainer.global_step)
        else:
            self._ended = ended = threading.Event()

            def keep_talking() -> None:
                while not ended.wait(1.0):
                    self.break_silence(trainer)

            threading.Thread(target=keep_talking, name="progress", daemon=True).start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance after an optimizer step; the numbers are those last logged."""
        if not self._is_enabled or trainer.global_step == self._seen_step:
            return
        self._seen_step, self._stepped = trainer.global_step, time.perf_counter()
        every = max(1, int(trainer.log_every_n_steps))  # type: ignore[attr-defined]  # set by a connector
        is_shown = self._seen_step == self._first_step + 1 or self._seen_step % every == 0
        metrics = trainer.callback_metrics
        text = "  ".join(form.format(float(metrics[name])) for name, form in _SHOWN.items() if name in metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._seen_step, description=text if is_shown else None)
        elif is_shown or self._stepped - self._said >= _NEXT_LINE_SECONDS:
            self._say(text)

    def break_silence(self, trainer: Trainer) -> None:
        """Write a line if the last one is long ago, for what is going on has no hook until it is over."""
        now = time.perf_counter()
        if now - self._said >= _SILENCE_SECONDS:
            what = "validation" if trainer.validating else "next step"
            self._say(f"{what}: {now - self._stepped:.0f} s so far")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write one line per validation during training."""
        if self._is_enabled and trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val_")}
            text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            line = f"step {trainer.global_step}: {text}"
            self._bar.console.print(line, highlight=False) if self._bar else print(line, file=sys.stderr)
            self._said = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the message stands alone."""
        self.on_train_end(trainer, pl_module)

    def _say(self, text: str) -> None:
        self._said = time.perf_counter()
        done, left = self._seen_step - self._first_step, ""
        if self._total is not None and done:
            seconds = int((self._stepped - self._started) / done * (self._total - self._seen_step))
            left = f"{seconds // 60}:{seconds % 60:02d} left"
        print(f"step {self._seen_step}/{self._total}  {text}  {left}".rstrip(), file=sys.stderr)
