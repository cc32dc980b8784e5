"""Plain progress lines where there is no terminal."""

from __future__ import annotations

import itertools
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fsdp.callbacks import progress
from lit_fsdp.callbacks.progress import RunProgress

METRICS = {"train_loss": 1.25, "tokens_per_second": 12345.6, "peak_memory_gib": 0.5, "val_loss": 2.0}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def trainer() -> Any:
    metrics = {name: torch.tensor(value) for name, value in METRICS.items()}
    loop = SimpleNamespace(max_epochs=-1)
    plan = {"estimated_stepping_batches": 20, "log_every_n_steps": 2, "is_global_zero": True, "fit_loop": loop}
    plan |= {"max_steps": -1, "max_epochs": 1, "accumulate_grad_batches": 2, "num_training_batches": 8}
    plan |= {"enable_validation": False, "val_check_batch": 50, "check_val_every_n_epoch": None}
    plan["lightning_module"] = SimpleNamespace(automatic_optimization=True)
    state = {"sanity_checking": False, "validating": False, "state": SimpleNamespace(fn="fit")}
    state["strategy"] = SimpleNamespace()
    return SimpleNamespace(global_step=0, callback_metrics=metrics, **plan, **state)


def run(trainer: Any, now: list[float], steps: int) -> None:
    bar = RunProgress()
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    for _ in range(steps):
        now[0] += 5
        trainer.global_step += 1
        for batch in range(2):  # the second micro-batch of an accumulation says nothing new
            bar.on_train_batch_end(trainer, None, None, None, batch)  # type: ignore[arg-type]
    for _ in range(2):  # between the same two optimizer steps
        bar.on_validation_end(trainer, None)  # type: ignore[arg-type]
    bar.on_train_end(trainer, None)  # type: ignore[arg-type]


def test_plain_lines_where_there_is_no_terminal(trainer, now, capsys):
    run(trainer, now, steps=4)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 1/20  loss 1.2500  12,346 tokens/s  peak 0.50 GiB  1:35 left",
        "step 2/20  loss 1.2500  12,346 tokens/s  peak 0.50 GiB  1:30 left",
        "step 4/20  loss 1.2500  12,346 tokens/s  peak 0.50 GiB  1:20 left",
        "step 4: val_loss 2.0000",
    ]
    run(trainer, now, steps=2)  # the time left counts the steps of this start only
    assert [line[-9:] for line in capsys.readouterr().err.splitlines()[:2]] == ["1:15 left", "1:10 left"]
    trainer.is_global_zero = False
    run(trainer, now, steps=2)
    assert capsys.readouterr().err == ""


def test_a_run_that_ends_before_its_first_validation_says_so(trainer, now, capsys):
    trainer.enable_validation = True
    for every, epochs, first in ((42, None, 21), (8, 6, 24), (40, None, None), (8, 5, None), (float("inf"), 9, None)):
        trainer.val_check_batch, trainer.check_val_every_n_epoch, trainer.global_step = every, epochs, 0
        run(trainer, now, steps=1)
        text = f"the first validation would follow step {first}, but training ends at step 20: no val_ metrics"
        assert (text in (err := capsys.readouterr().err), "validation would" in err) == (first is not None,) * 2


def test_several_optimizer_steps_per_batch_have_no_known_end(trainer, now, capsys):
    trainer.lightning_module.automatic_optimization = False
    run(trainer, now, steps=1)
    assert capsys.readouterr().err.splitlines()[0] == "step 1  loss 1.2500  12,346 tokens/s  peak 0.50 GiB"
    trainer.max_steps = 4
    run(trainer, now, steps=1)
    assert capsys.readouterr().err.startswith("step 2/4  loss")


def test_a_bar_of_60_columns_keeps_step_and_time(trainer, now, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    trainer.callback_metrics["mfu"] = torch.tensor(0.25)
    for name, value in (("COLUMNS", "60"), ("NO_COLOR", "1"), ("TTY_INTERACTIVE", "1"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    run(trainer, now, steps=4)
    shown = re.sub(r"\x1b\[[?\d]*[A-Za-z]", "", capsys.readouterr().err)
    last = re.split(r"[\r\n]+", shown.rstrip())[-1]
    assert re.search(r"^step 4: val_loss 2.0000$", shown.replace("\r", "\n"), re.MULTILINE)  # above the bar
    assert re.match(r"step 4/20 [-:\d]+ left loss 1.2500  12,346 tokens/s  M", last)
    assert len(last) <= 60
    bar = RunProgress()
    bar.on_train_start(trainer, None)
    now[0] += 3
    for is_saving, text in ((False, ""), (True, "saving a checkpoint: 3 s so far")):
        trainer.strategy.is_saving = is_saving
        bar.break_silence(trainer)
        assert bar._bar is not None
        assert bar._bar.tasks[0].description == text
    bar.on_train_end(trainer, None)
    capsys.readouterr()
    monkeypatch.delenv("TTY_INTERACTIVE")
    monkeypatch.setenv("TERM", "dumb")
    run(trainer, now, steps=4)
    assert capsys.readouterr().err.startswith("step 5/20  loss 1.2500")


def test_there_is_a_line_at_least_every_20_seconds(trainer, now, monkeypatch, capsys):
    bar = RunProgress()
    trainer.log_every_n_steps = 50
    monkeypatch.setattr(progress.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    bar.on_train_start(trainer, None)
    spoken = [0.0]
    for seconds_of_step in (40, 2, 2, 2, 2, 2, 14, 35, 3):  # the first is slow, and one that another process disturbs
        for _ in range(seconds_of_step):
            now[0] += 1
            bar.break_silence(trainer)
            spoken += [now[0]] if capsys.readouterr().err else []
        trainer.global_step += 1
        bar.on_train_batch_end(trainer, None, None, None, 0)
        spoken += [now[0]] if capsys.readouterr().err else []
    assert 40.0 in spoken  # after the first step
    assert max(b - a for a, b in itertools.pairwise(spoken)) <= 20
    trainer.validating = True
    now[0] += 16
    bar.break_silence(trainer)
    assert capsys.readouterr().err == "step 9/20  validation: 16 s so far  2:04 left\n"
    trainer.validating, trainer.strategy = False, SimpleNamespace(is_saving=True)
    now[0] += 16
    bar.break_silence(trainer)
    assert capsys.readouterr().err == "step 9/20  saving a checkpoint: 32 s so far  2:04 left\n"


def test_it_speaks_by_itself_while_a_step_goes_on_and_not_after_the_end(trainer, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SILENCE_SECONDS", 0.0)
    bar = RunProgress()
    bar.on_train_start(trainer, None)
    threads = [thread for thread in threading.enumerate() if thread.name == "progress"]
    while not (err := capsys.readouterr().err):
        threads[0].join(0.05)
    assert re.match(r"step 0/20  next step: \d s so far\n", err)
    bar.on_exception(trainer, None, KeyboardInterrupt())
    threads[0].join(10)
    assert not threads[0].is_alive()
