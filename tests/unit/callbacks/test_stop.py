"""Signals become votes, votes become one checkpoint and an exit code; nothing is saved in a handler."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lit_fsdp import signals
from lit_fsdp.callbacks.stop import StopOnSignal, StopRequested
from lit_fsdp.signals import SignalFlags

SIGINT, SIGTERM, SIGUSR1 = signals.STOPPING


class Ended(BaseException):
    """Instead of os._exit."""


@pytest.fixture
def flags(monkeypatch) -> SignalFlags:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(signals.os, "_exit", end)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return SignalFlags()


@pytest.mark.usefixtures("flags")
def test_what_a_signal_does_in_each_phase(monkeypatch, capsys):
    """The table in lit_fsdp/signals.py; None: the process goes on."""
    lightning_started, torchrun = {"LOCAL_RANK": "1"}, {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "1"}
    once_more = "Ctrl-C: finishing and saving the current step; press again to stop at once, without saving\n"
    nothing = "stopped by a signal; there is nothing to save yet\n"
    phases: list[tuple[dict[str, bool], dict[str, str], list[Any], int | None, str]] = [
        ({}, {}, [SIGINT], 130, "interrupted\n"),
        ({}, {}, [SIGTERM], 75, nothing),
        ({}, {}, [SIGUSR1], 75, nothing),
        ({"can_save": False, "has_peers": True}, {}, [SIGTERM], 75, nothing),
        ({}, {"RANK": "0"}, [SIGTERM, SIGUSR1], None, ""),
        ({}, {"SLURM_PROCID": "0"}, [SIGTERM], None, ""),
        ({}, lightning_started, [SIGTERM, SIGINT], None, ""),  # waits for the vote
        ({}, torchrun, [SIGINT], 130, ""),  # each rank gets its own signal; only the first process speaks
        ({"training": True}, {}, [SIGTERM, SIGUSR1, SIGTERM], None, ""),
        ({"training": True}, {}, [SIGINT, SIGINT], None, once_more),
        ({"training": True}, {}, [SIGINT, SIGINT, SIGINT], 130, f"{once_more}interrupted\n"),
    ]
    for attributes, environment, numbers, code, said in phases:
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            flags, cleaned, ended = SignalFlags(), [], None
            flags.before_exit = lambda cleaned=cleaned: cleaned.append("children")
            vars(flags).update(attributes)
            try:
                for number in numbers:
                    flags.receive(number)
            except Ended as end:
                ended = end.args[0]
        case = (attributes, environment, numbers)
        assert (ended, capsys.readouterr().err) == (code, said), case
        assert cleaned == (["children"] if code else []), case
        assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
        if code is None:
            assert (flags.interrupted, flags.terminated) == (SIGINT in numbers, numbers[0] != SIGINT), case


@pytest.mark.usefixtures("flags")
def test_a_signal_while_the_ranks_meet_ends_this_one_unless_they_have_met(monkeypatch):
    ends: list[int] = []
    monkeypatch.setattr(signals, "_PATIENCE_SECONDS", 0.05)
    for is_early, is_met in itertools.product((True, False), (False, True)):
        flags, ended = SignalFlags(), threading.Event()
        monkeypatch.setattr(signals.os, "_exit", lambda code, ended=ended: (ends.append(code), ended.set()))
        flags.has_peers = True
        ends.clear()
        if is_early:
            flags.receive(SIGTERM)
        with flags.meeting():
            if not is_early:
                flags.receive(SIGTERM)
            assert flags.terminated
            assert not ends
            if not is_met:
                assert ended.wait(10)
        for thread in [one for one in threading.enumerate() if isinstance(one, threading.Timer)]:
            thread.join()
        assert ends == ([] if is_met else [75])


class Watch(Callback):
    """Notes the handlers that are there while a batch is worked on; perhaps a signal comes in the second step."""

    def __init__(self, flags: SignalFlags | None = None) -> None:
        self.flags = flags
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.seen = [signal.getsignal(number) for number in signals.STOPPING]
        if self.flags is not None:
            self.flags.terminated = trainer.global_step == 1

    on_validation_batch_start = on_train_batch_start


def trainer_with(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    limits = {"max_steps": 5, "limit_val_batches": 1, "devices": 1}
    return Trainer(callbacks=list(callbacks), default_root_dir=folder, **quiet, **limits, **options)


@pytest.mark.filterwarnings("ignore")
def test_lightnings_handlers_stay_out_under_slurm_too(tmp_path, flags):
    """Its handler of SIGUSR1 would save inside itself and requeue the job; without our callback it is there."""
    before = [signal.getsignal(number) for number in signals.STOPPING]
    for verb, ours in (("validate", [StopOnSignal(flags)]), ("fit", [])):
        watch, environment = Watch(), SLURMEnvironment(auto_requeue=True, requeue_signal=SIGUSR1)
        trainer = trainer_with(tmp_path, watch, *ours, plugins=[environment], enable_checkpointing=False)
        getattr(trainer, verb)(BoringModel())
        assert (watch.seen == before) is bool(ours)
        assert environment.auto_requeue is not bool(ours)
        assert [signal.getsignal(number) for number in signals.STOPPING] == before


@pytest.mark.filterwarnings("ignore")
def test_where_lightnings_own_callback_saves_it_does_so_here_too(tmp_path, flags):
    for saves, said in ((True, "the checkpoint is complete"), (False, "without saving")):
        theirs = [ModelCheckpoint(tmp_path / "theirs")] if saves else []
        trainer = trainer_with(tmp_path, Watch(flags), StopOnSignal(flags), *theirs, enable_checkpointing=saves)
        with pytest.raises(StopRequested, match=f"after step 2.* {said}") as caught:
            trainer.fit(BoringModel())
        assert caught.value.exit_code == 75
    assert torch.load(tmp_path / "theirs" / "last.ckpt", weights_only=True)["global_step"] == 2


CODE = """
import os, signal, sys, time
from lit_fsdp.signals import SignalFlags

SignalFlags().install()
while not any(frame.f_code.co_name == "_listen" for frame in sys._current_frames().values()):
    time.sleep(0.01)

def waiting_for_a_peer():
    os.kill(os.getpid(), signal.SIGUSR2)

waiting_for_a_peer()
print("goes on")
"""


def test_sigusr2_shows_the_stacks_and_stops_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "in waiting_for_a_peer" in done.stderr
    assert "in _listen" in done.stderr  # of each thread
