"""Signals become votes, votes become one checkpoint and an exit code; nothing is saved in a handler."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_fsdp import signals
from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.callbacks.stop import StopOnSignal, StopRequested
from lit_fsdp.signals import SignalFlags


class Ended(BaseException):
    """Instead of os._exit."""


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> SignalFlags:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(signals.os, "_exit", end)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return SignalFlags()


def ends(flags: SignalFlags, number: signal.Signals) -> bool:
    try:
        flags.receive(number)
    except Ended as end:
        return end.args == (130 if number == signal.SIGINT else 75,)
    return False


def test_ctrl_c_waits_for_the_step_while_training_and_so_does_a_second_one(
    flags: SignalFlags, capsys: pytest.CaptureFixture[str]
):
    cleaned: list[str] = []
    flags.before_exit = lambda: cleaned.append("children")
    flags.training = True
    assert not ends(flags, signal.SIGINT)
    assert flags.interrupted
    assert not ends(flags, signal.SIGINT)
    assert "once more ends at once" in capsys.readouterr().err
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
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert ends(flags, signal.SIGINT)
    assert capsys.readouterr().err == ""


REQUESTS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])


@REQUESTS
@pytest.mark.parametrize("phase", ["has_peers", "training"])
def test_a_request_never_ends_a_rank_that_others_wait_for(flags: SignalFlags, number: signal.Signals, phase: str):
    setattr(flags, phase, True)
    assert not ends(flags, number)
    assert not ends(flags, number)
    assert (flags.terminated, flags.interrupted) == (True, False)


@REQUESTS
def test_a_request_ends_a_process_that_nobody_waits_for(
    flags: SignalFlags, number: signal.Signals, capsys: pytest.CaptureFixture[str]
):
    assert ends(flags, number)
    assert capsys.readouterr().err == "stopped by a signal; there is nothing to save yet\n"


@REQUESTS
def test_a_request_ends_a_command_that_does_not_train(flags: SignalFlags, number: signal.Signals):
    flags.can_save, flags.has_peers = False, True
    assert ends(flags, number)


def test_a_rank_that_lightning_started_waits_for_the_vote(flags: SignalFlags, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not ends(flags, signal.SIGINT)
    assert flags.interrupted
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # each rank of torchrun gets its own signal
    assert ends(SignalFlags(), signal.SIGINT)


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_ranks_that_somebody_else_started_have_peers(flags: SignalFlags, monkeypatch: pytest.MonkeyPatch, name: str):
    assert not flags.has_peers
    monkeypatch.setenv(name, "0")
    assert SignalFlags().has_peers


class Saving(Checkpoint):
    """Counts its saves."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[int] = []

    def save(self, trainer: Any, on_signal: bool = False) -> Path:
        """Only the step, and that it says why."""
        assert on_signal
        self.saved.append(trainer.global_step)
        return Path()


def trainer() -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    logged: list[int] = []
    logs = SimpleNamespace(on_batch_end=lambda: None, update_train_step_metrics=lambda: logged.append(run.global_step))
    run = SimpleNamespace(
        global_step=4, checkpoint_callbacks=[Saving()], strategy=strategy, _logger_connector=logs, logged=logged
    )
    return run


def module(*votes: float) -> Any:
    return SimpleNamespace(step_totals=torch.tensor([9.0, 9.0, 9.0, 9.0, *votes]), stop_votes=None)


def test_votes_of_this_rank_travel_with_the_step(flags: SignalFlags):
    callback, pl_module = StopOnSignal(flags), module(0, 0)
    callback.on_train_batch_start(trainer(), pl_module, None, 0)
    assert pl_module.stop_votes == [0.0, 0.0]
    flags.training = True
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
    assert str(caught.value) == (
        "stopped by a signal after step 5; the checkpoint is complete; resume with --ckpt_path last"
    )
    assert (run.checkpoint_callbacks[0].saved, run.logged) == ([5], [5])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_of_the_set_up_is_heard_before_the_first_batch(flags: SignalFlags, number: signal.Signals, code: int):
    """With nothing saved: there is nothing new."""
    callback, run = StopOnSignal(flags), trainer()
    flags.interrupted, flags.terminated = number == signal.SIGINT, number == signal.SIGTERM
    with pytest.raises(StopRequested, match="before step 5") as caught:
        callback.on_train_start(run, module(0, 0))
    assert (caught.value.exit_code, caught.value.step, caught.value.is_saved) == (code, 4, False)
    assert run.checkpoint_callbacks[0].saved == []


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
    flags.training = True
    try:
        flags.install()
        flags.install()  # changes nothing
        signal.raise_signal(signal.SIGUSR1)
        for _ in range(500):
            if flags.terminated:
                break
            signals.threading.Event().wait(0.01)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert flags.terminated


class Watched(LightningModule):
    """Notes the handlers that are there while it works."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """A loss."""
        self.seen = [signal.getsignal(number) for number in signals.STOPPING]
        return self.weight * batch.sum()

    validation_step = test_step = predict_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    ("verb", "ours"), [("fit", True), ("validate", True), ("test", True), ("predict", True), ("fit", False)]
)
def test_lightnings_handlers_stay_out_under_slurm_too(tmp_path: Path, flags: SignalFlags, verb: str, ours: bool):
    """Its handler of SIGUSR1 would save inside itself and requeue the job; without our callback it is there."""
    before = [signal.getsignal(number) for number in signals.STOPPING]
    watched, environment = Watched(), SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)
    run = Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[environment],
        callbacks=[StopOnSignal(flags)] if ours else [],
        max_steps=1,
        default_root_dir=tmp_path,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    getattr(run, verb)(watched, torch.utils.data.DataLoader([torch.ones(1)], num_workers=0))
    assert (watched.seen == before) is ours
    assert environment.auto_requeue is not ours
    assert [signal.getsignal(number) for number in signals.STOPPING] == before
