"""Signals become votes, votes become one checkpoint and an exit code; nothing is saved in a handler."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fsdp.callbacks import stop
from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.callbacks.stop import SignalFlags, StopOnSignal, StopRequested


class Ended(BaseException):
    """Instead of os._exit."""


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> SignalFlags:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(stop.os, "_exit", end)
    return SignalFlags()


def ends(flags: SignalFlags, number: signal.Signals) -> bool:
    try:
        flags.receive(number)
    except Ended as end:
        return end.args == (130,)
    return False


def test_ctrl_c_waits_for_the_step_while_training_and_ends_at_once_twice(flags: SignalFlags):
    cleaned: list[str] = []
    flags.before_exit = lambda: cleaned.append("children")
    flags.training = True
    assert not ends(flags, signal.SIGINT)
    assert flags.interrupted
    assert cleaned == []
    assert ends(flags, signal.SIGINT)
    assert cleaned == ["children"]


def test_ctrl_c_before_training_ends_at_once(flags: SignalFlags, capsys: pytest.CaptureFixture[str]):
    assert ends(flags, signal.SIGINT)
    assert not flags.interrupted
    assert capsys.readouterr().err == "interrupted\n"


def test_only_the_first_process_speaks(
    flags: SignalFlags, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert ends(flags, signal.SIGINT)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("training", [False, True])
def test_a_request_to_stop_never_ends_the_process(flags: SignalFlags, number: signal.Signals, training: bool):
    flags.training = training
    assert not ends(flags, number)
    assert not ends(flags, number)
    assert (flags.terminated, flags.interrupted) == (True, False)


class Saving(Checkpoint):
    """Counts its saves."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[int] = []

    def save(self, trainer: Any) -> Path:
        """Only the step."""
        self.saved.append(trainer.global_step)
        return Path()


def trainer() -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(global_step=4, checkpoint_callbacks=[Saving()], strategy=strategy)


def module(*votes: float) -> Any:
    return SimpleNamespace(step_totals=torch.tensor([9.0, 9.0, 9.0, 9.0, *votes]), stop_votes=None)


def test_votes_of_this_rank_travel_with_the_step(flags: SignalFlags):
    callback, pl_module = StopOnSignal(flags), module(0, 0)
    callback.on_train_batch_start(trainer(), pl_module, None, 0)
    assert pl_module.stop_votes == [0.0, 0.0]
    flags.receive(signal.SIGTERM)
    callback.on_train_batch_start(trainer(), pl_module, None, 0)
    assert pl_module.stop_votes == [0.0, 1.0]


@pytest.mark.parametrize(("votes", "code"), [((0, 1), 75), ((2, 0), 130), ((1, 1), 130)])
def test_one_vote_of_any_rank_saves_once_and_stops(flags: SignalFlags, votes: tuple[int, int], code: int):
    callback, run = StopOnSignal(flags), trainer()
    callback.on_train_start(run, module(0, 0))
    assert flags.training
    callback.on_train_batch_end(run, module(*votes), None, None, 0)  # in the middle of an accumulation
    assert run.checkpoint_callbacks[0].saved == []
    run.global_step = 5
    with pytest.raises(StopRequested) as caught:
        callback.on_train_batch_end(run, module(*votes), None, None, 0)
    assert (caught.value.exit_code, caught.value.step) == (code, 5)
    assert str(caught.value) == "stopped by a signal after step 5; the checkpoint is complete"
    assert run.checkpoint_callbacks[0].saved == [5]


def test_no_vote_no_stop(flags: SignalFlags):
    callback, run = StopOnSignal(flags), trainer()
    callback.on_train_start(run, module(0, 0))
    run.global_step = 5
    callback.on_train_batch_end(run, module(0, 0), None, None, 0)
    assert run.checkpoint_callbacks[0].saved == []


def test_somebody_elses_module_stops_too(flags: SignalFlags):
    callback, run = StopOnSignal(flags), trainer()
    callback.on_train_start(run, SimpleNamespace())
    flags.receive(signal.SIGUSR1)
    run.global_step = 5
    with pytest.raises(StopRequested) as caught:
        callback.on_train_batch_end(run, SimpleNamespace(), None, None, 0)
    assert caught.value.exit_code == 75


def test_a_signal_is_heard_by_a_thread():
    """Also while the main thread waits in C++, where Python's own handlers would wait too."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    flags = SignalFlags()
    try:
        flags.install()
        signal.raise_signal(signal.SIGUSR1)
        for _ in range(500):
            if flags.terminated:
                break
            stop.threading.Event().wait(0.01)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert flags.terminated
