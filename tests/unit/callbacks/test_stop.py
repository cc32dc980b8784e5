"""Signals become votes, votes become one checkpoint and an exit code; nothing is saved in a handler."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
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
    once_more = "Ctrl-C: the step is being finished and saved; once more ends at once, without saving\n"
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
            for name, value in attributes.items():
                setattr(flags, name, value)
            try:
                for number in numbers:
                    flags.receive(number)
            except Ended as end:
                ended = end.args[0]
        case = (attributes, environment, numbers)
        assert (ended, capsys.readouterr().err) == (code, said), case
        assert cleaned == (["children"] if code else []), case
        if code is None:
            assert (flags.interrupted, flags.terminated) == (SIGINT in numbers, numbers[0] != SIGINT), case


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

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:You defined a `validation_step`")
def test_lightnings_handlers_stay_out_under_slurm_too(tmp_path, flags):
    """Its handler of SIGUSR1 would save inside itself and requeue the job; without our callback it is there."""
    before = [signal.getsignal(number) for number in signals.STOPPING]
    switched_off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    for verb, ours in (("validate", True), ("fit", False)):
        watched, environment = Watched(), SLURMEnvironment(auto_requeue=True, requeue_signal=SIGUSR1)
        run = Trainer(
            accelerator="cpu", devices=1, plugins=[environment], callbacks=[StopOnSignal(flags)] if ours else [],
            max_steps=1, default_root_dir=tmp_path, **dict.fromkeys(switched_off, False),
        )  # fmt: skip
        getattr(run, verb)(watched, torch.utils.data.DataLoader([torch.ones(1)], num_workers=0))
        assert (watched.seen == before) is ours
        assert environment.auto_requeue is not ours
        assert [signal.getsignal(number) for number in signals.STOPPING] == before


class AsksToStop(Callback):
    """A signal during the second step."""

    def __init__(self, flags: SignalFlags) -> None:
        self.flags = flags

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Before ranks vote."""
        self.flags.terminated = trainer.global_step == 1


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:You defined a `validation_step`")
@pytest.mark.parametrize("saves", [True, False])
def test_where_lightnings_own_callback_saves_it_does_so_here_too(tmp_path, flags, saves):
    theirs = [ModelCheckpoint(tmp_path / "theirs")] if saves else []
    run = Trainer(
        accelerator="cpu", devices=1, max_steps=5, logger=False, enable_checkpointing=saves,
        callbacks=[AsksToStop(flags), StopOnSignal(flags), *theirs], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    said = "the checkpoint is complete" if saves else "which nothing saves"
    with pytest.raises(StopRequested, match=f"after step 2.* {said}") as caught:
        run.fit(Watched(), torch.utils.data.DataLoader([torch.ones(1)] * 5, num_workers=0))
    assert caught.value.exit_code == 75
    if saves:
        saved = torch.load(tmp_path / "theirs" / "last.ckpt", weights_only=True)
        assert saved["global_step"] == 2


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
