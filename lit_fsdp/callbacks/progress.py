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
        self._enabled = True
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._seen_step = 0
        self._started = self._said = self._stepped = 0.0
        self._first_step = 0
        self._total: int | None = None
        self._ended = threading.Event()

    def disable(self) -> None:
        """Lightning calls this on every rank but 0."""
        self._enabled = False

    def enable(self) -> None:
        """Undo :meth:`disable`."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar."""
        self._seen_step = self._first_step = trainer.global_step
        self._started = self._said = self._stepped = time.perf_counter()
        if not self._enabled:
            return
        self._total = _total_steps(trainer)
        if not sys.stderr.isatty():
            self._ended = threading.Event()
            arguments = (trainer, self._ended)
            threading.Thread(target=self._keep_talking, args=arguments, name="progress", daemon=True).start()
            return
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=Console(stderr=True))
        self._progress.start()
        self._task = self._progress.add_task("", total=self._total, completed=trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Advance after an optimizer step; the numbers are those last logged."""
        if not self._enabled or trainer.global_step == self._seen_step:
            return
        self._seen_step, self._stepped = trainer.global_step, time.perf_counter()
        is_first = trainer.global_step == self._first_step + 1
        is_shown = is_first or trainer.global_step % _log_every(trainer) == 0
        if self._progress is not None and self._task is not None:
            text = self._text(trainer) if is_shown else None
            self._progress.update(self._task, completed=trainer.global_step, description=text)
        elif is_shown or self._stepped - self._said >= _NEXT_LINE_SECONDS:
            self._say(self._text(trainer))

    def break_silence(self, trainer: Trainer) -> None:
        """A line if the last one is long ago, for what is going on has no hook until it is over."""
        now = time.perf_counter()
        if now - self._said >= _SILENCE_SECONDS:
            what = "validation" if trainer.validating else "next step"
            self._say(f"{what}: {now - self._stepped:.0f} s so far")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the message stands alone."""
        self._stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One line per validation during training."""
        if self._enabled and trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val_")}
            text = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            console = self._progress.console if self._progress else Console(stderr=True)
            console.print(f"step {trainer.global_step}: {text}", highlight=False)
            self._said = time.perf_counter()

    def _keep_talking(self, trainer: Trainer, ended: threading.Event) -> None:
        while not ended.wait(1.0):
            self.break_silence(trainer)

    def _say(self, text: str) -> None:
        self._said = time.perf_counter()
        print(f"step {self._seen_step}/{self._total}  {text}  {self._time_left()}".rstrip(), file=sys.stderr)

    def _stop(self) -> None:
        self._ended.set()
        if self._progress is not None:
            self._progress.stop()
            self._progress = self._task = None

    def _text(self, trainer: Trainer) -> str:
        metrics = trainer.callback_metrics
        return "  ".join(form.format(float(metrics[name])) for name, form in _SHOWN.items() if name in metrics)

    def _time_left(self) -> str:
        done = self._seen_step - self._first_step
        if self._total is None or not done:
            return ""
        seconds = (self._stepped - self._started) / done * (self._total - self._seen_step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


def _total_steps(trainer: Trainer) -> int | None:
    steps = trainer.estimated_stepping_batches
    return int(steps) if steps not in (-1, float("inf")) else None


def _log_every(trainer: Trainer) -> int:
    return max(1, int(trainer.log_every_n_steps))  # type: ignore[attr-defined]  # set by a connector
