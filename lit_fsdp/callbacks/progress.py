"""A progress bar over the whole run, in optimizer steps, on rank 0 only."""

import math
import sys
import threading
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from lit_fsdp.config.data import DataConfig

_SHOWN = {
    "train_loss": "loss {:.4f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "peak {:.2f} GiB",
}
_SILENCE_SECONDS = 15.0


class RunProgress(ProgressBar):
    """Shows loss, rate, MFU (if known), peak memory and remaining time; plain lines without a terminal.

    Without a terminal it prints a line after the first and the last step, every ``log_every_n_steps`` and at least
    every 20 s, also during longer steps or validations.
    """

    asks = True
    """For the module, which sends metrics to other progress bars in every step."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Progress | None = None
        self._text = ""
        self.validated_step = -1
        self._ended = threading.Event()

    def disable(self) -> None:
        """Do nothing: only rank 0 prints anyway."""

    enable = disable  # around Lightning's finders

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar, and start the thread for times without a step."""
        self._seen_step = self._first_step = trainer.global_step
        self._started = self._printed = self._stepped = time.perf_counter()
        if not trainer.is_global_zero:
            return
        self._total = _last_step(trainer)
        if self._total is not None and self._total < trainer.max_steps:
            epochs = f"trainer.max_epochs {trainer.max_epochs}"
            print(f"{epochs} ends the run at step {self._total}, before trainer.max_steps", file=sys.stderr)
        first = _first_validation(trainer)
        if self._total is not None and first is not None and trainer.global_step == 0 and first > self._total:
            when = f"the first validation would follow step {first}, but training ends at step {self._total}"
            more = "no val_ metrics and no best checkpoint; lower trainer.val_check_interval (in micro-batches)"
            print(f"{when}: {more}", file=sys.stderr)
        console = Console(stderr=True)
        if sys.stderr.isatty() and console.is_interactive:  # a dumb terminal would show only the last line
            # if the line is too narrow, the numbers at its end are truncated
            numbers = TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1))
            steps_done = TextColumn("step {task.completed}" + ("" if self._total is None else "/{task.total}"))
            self._bar = Progress(
                steps_done, TimeRemainingColumn(), TextColumn("left"), numbers, console=console, expand=True
            )
            self._bar.start()
            self._bar.add_task("", total=self._total, completed=trainer.global_step)
        self._ended = ended = threading.Event()

        def keep_talking() -> None:
            while not ended.wait(1.0):
                self.break_silence(trainer)

        threading.Thread(target=keep_talking, name="progress", daemon=True).start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Advance after an optimizer step, with the last logged numbers."""
        if not trainer.is_global_zero or trainer.global_step == self._seen_step:
            return
        self._seen_step, self._stepped = trainer.global_step, time.perf_counter()
        every = max(1, int(trainer.log_every_n_steps))  # type: ignore[attr-defined]  # set by a connector
        if self._seen_step in (self._first_step + 1, self._total) or self._seen_step % every == 0:
            found = trainer.callback_metrics
            self._text = "  ".join(form.format(float(found[name])) for name, form in _SHOWN.items() if name in found)
            if self._bar is None:
                self._say(self._text)
        if self._bar is not None:
            self._bar.update(TaskID(0), completed=self._seen_step, description=self._text)

    def break_silence(self, trainer: Trainer) -> None:
        """Name a validation or save in the bar, or print a line if the last one is old: no hook runs meanwhile."""
        now, what = time.perf_counter(), "validation" if trainer.validating else "next step"
        if getattr(trainer.strategy, "is_saving", False):
            what = "saving a checkpoint"
        text = f"{what}: {now - self._stepped:.0f} s so far"
        if (bar := self._bar) is not None:
            bar.update(TaskID(0), description=self._text if what == "next step" else text)
        elif now - self._printed >= _SILENCE_SECONDS:
            self._say(text)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write one line per step with a validation; Lightning may validate twice between two optimizer steps."""
        is_new, self.validated_step = trainer.global_step != self.validated_step, trainer.global_step
        if is_new and trainer.is_global_zero and trainer.state.fn == "fit" and not trainer.sanity_checking:
            found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
            text = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
            print(f"step {trainer.global_step}: {text}", file=sys.stderr)  # rich prints it above the bar
            self._printed = time.perf_counter()

    def on_train_end(self, *hook: Any) -> None:
        """Close the bar, also after an exception, so that it does not mix with the message."""
        self._ended.set()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    on_exception = on_train_end  # type: ignore[assignment]  # arguments have its names

    def _say(self, text: str) -> None:
        self._printed = time.perf_counter()
        done, left = self._seen_step - self._first_step, ""
        if self._total is not None and done:
            seconds = int((self._stepped - self._started) / done * (self._total - self._seen_step))
            left = f"{seconds // 60}:{seconds % 60:02d} left"
        step = f"{self._seen_step}" if self._total is None else f"{self._seen_step}/{self._total}"
        print(f"step {step}  {text}  {left}".rstrip(), file=sys.stderr)


def _last_step(trainer: Trainer) -> int | None:
    """The step at which training ends, if known; after a resume on other ranks, epochs may have other lengths."""
    if not trainer.lightning_module.automatic_optimization:  # it may take several steps per batch
        return trainer.max_steps if trainer.max_steps > 0 else None
    steps = trainer.estimated_stepping_batches
    if steps in (-1, float("inf")):
        return None
    loop: Any = trainer.fit_loop if trainer.global_step else None
    if loop is None or not loop.max_epochs or loop.max_epochs < 1:
        return int(steps)
    every, length = trainer.accumulate_grad_batches, int(trainer.num_training_batches)
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
    is_over = batches.ready >= length
    done = 0 if epochs.processed == epochs.ready else math.ceil(length / every) if is_over else batches.ready // every
    last = trainer.global_step + (loop.max_epochs - trainer.current_epoch) * math.ceil(length / every) - done
    return last if trainer.max_steps < 0 else min(last, trainer.max_steps)


def _first_validation(trainer: Trainer) -> int | None:
    """The optimizer step after which a new run first validates; None: it does not, or not at a known step."""
    every, length, epochs = trainer.val_check_batch, trainer.num_training_batches, trainer.check_val_every_n_epoch
    ours = getattr(getattr(trainer, "datamodule", None), "config", None)  # without rows it has an empty loader
    has_rows = trainer.enable_validation and (not isinstance(ours, DataConfig) or ours.has("val"))
    if not has_rows or not trainer.lightning_module.automatic_optimization or every is None:
        return None
    whole = 0 if epochs in (None, 1) else (epochs - 1) * math.ceil(length / trainer.accumulate_grad_batches)
    counted = whole + every / trainer.accumulate_grad_batches
    return math.ceil(counted) if math.isfinite(counted) else None
