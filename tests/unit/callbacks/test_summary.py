"""What a verb says at its end is what was logged and saved, and the command it gives works on that."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.callbacks.summary import summary_of


@pytest.fixture(autouse=True)
def _peak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_fsdp.callbacks.summary.peak_device_bytes", lambda device: 2 << 30)


def _trainer(folder: Path, **given: Any) -> Any:
    metrics = {"train_loss": 0.25, "val_loss": 0.5, "lr": 1e-3, "test_loss": 0.75}
    limits = {"global_step": 60, "max_steps": 60, "max_epochs": None, "checkpoint_callback": None, "ckpt_path": None}
    limits |= {
        "checkpoint_callbacks": [],
        "progress_bar_callback": None,
        "current_epoch": 0,
        "estimated_stepping_batches": 60,
    }
    limits |= {"num_training_batches": 60, "accumulate_grad_batches": 1, "should_stop": False}
    limits |= {"callbacks": [], "strategy": SimpleNamespace(root_device=torch.device("cpu"))}
    module = SimpleNamespace(read_tensor=None)
    return SimpleNamespace(
        **{"default_root_dir": str(folder), "callback_metrics": metrics, "lightning_module": module, **limits, **given}
    )


def test_a_fit_names_steps_losses_memory_checkpoints_and_the_next_command(tmp_path: Path):
    saved = Checkpoint()
    saved.best_model_path, saved.last_model_path = "run/best-one", "run/last-one"
    lines = summary_of(_trainer(tmp_path, checkpoint_callback=saved), "fit", 83.4, 20).splitlines()
    assert lines == [
        "40 steps in 0:01:23, to step 60, train_loss 0.2500, val_loss 0.5000, peak memory 2.00 GiB per rank",
        "best checkpoint: run/best-one",
        "last checkpoint: run/last-one",
        f"next: lit-fsdp export --ckpt {tmp_path}/best --out {tmp_path}/export/best",
    ]
    bar = SimpleNamespace(validated_step=48)
    text = summary_of(_trainer(tmp_path, checkpoint_callback=saved, progress_bar_callback=bar), "fit", 1, 0)
    assert ", val_loss 0.5000 of step 48, peak" in text
    saved.exported = tmp_path / "export/step-00000060"
    text = summary_of(_trainer(tmp_path, checkpoint_callback=saved), "fit", 1, 0)
    assert text.endswith(f"next: lit-fsdp generate --model {tmp_path}/export/step-00000060")
    saved.exported = Path("my runs/export")
    text = summary_of(_trainer(tmp_path, checkpoint_callback=saved), "fit", 1, 0)
    assert text.endswith("next: lit-fsdp generate --model 'my runs/export'")
    two = {"checkpoint_callback": ModelCheckpoint(), "checkpoint_callbacks": [ModelCheckpoint(), saved]}
    assert summary_of(_trainer(tmp_path, **two), "fit", 1, 0).endswith(text.partition("\n")[2])  # says it of ours
    own = _trainer(tmp_path, checkpoint_callback=saved, lightning_module=SimpleNamespace())
    assert "next:" not in summary_of(own, "fit", 1, 0)  # of somebody's module nobody knows how it is exported


def test_a_finished_run_says_how_to_train_further(tmp_path: Path):
    by_steps = summary_of(_trainer(tmp_path), "fit", 1, 60)
    assert by_steps.startswith("already at trainer.max_steps 60, step 60: nothing was trained")
    assert by_steps.endswith("add --ckpt_path last --trainer.max_steps 120")
    both = _trainer(tmp_path, max_epochs=2, current_epoch=2)
    assert summary_of(both, "fit", 1, 60).endswith("--trainer.max_steps 120 --trainer.max_epochs -1")
    by_epochs = summary_of(_trainer(tmp_path, max_steps=-1, max_epochs=3), "fit", 1, 60)
    assert by_epochs.endswith("add --ckpt_path last --trainer.max_epochs 6")
    lowered = summary_of(_trainer(tmp_path, max_steps=-1, max_epochs=1, current_epoch=2), "fit", 1, 60)
    assert lowered.endswith("add --ckpt_path last --trainer.max_epochs 4")


def test_what_ended_a_run_early_is_named(tmp_path: Path):
    over = Timer(timedelta(seconds=0))
    given: Any = {"callbacks": [over], "max_steps": -1, "max_epochs": 1, "global_step": 3}
    limit = "the time limit of 0:00:00 (trainer.max_time)"
    assert summary_of(_trainer(tmp_path, **given), "fit", 1, 3) == f"{limit} ended the run before its first step"
    assert f"\n{limit} ended the run before step 60" in summary_of(_trainer(tmp_path, **given), "fit", 1, 0)
    stopped = EarlyStopping("val_loss")
    assert "ended the run" not in summary_of(_trainer(tmp_path, **given | {"callbacks": [stopped]}), "fit", 1, 0)
    stopped.stopping_reason = EarlyStoppingReason.PATIENCE_EXHAUSTED  # as also after a resume of a stopped run
    assert "ended the run" not in summary_of(_trainer(tmp_path, **given | {"callbacks": [stopped]}), "fit", 1, 0)
    given |= {"callbacks": [stopped], "should_stop": True}
    text = summary_of(_trainer(tmp_path, **given), "fit", 1, 0)
    assert "\nEarlyStopping on val_loss ended the run before step 60" in text
    assert "ended the run" not in summary_of(_trainer(tmp_path, **given | {"global_step": 60}), "fit", 1, 0)


def test_a_fit_that_epochs_ended_before_max_steps_says_so(tmp_path: Path):
    limits = {"max_steps": 100, "max_epochs": 1, "current_epoch": 1}
    text = summary_of(_trainer(tmp_path, **limits), "fit", 1, 0)
    assert "max_epochs 1 ended the run before trainer.max_steps; to train all 100 steps, set trainer.max_epochs" in text
    assert "ended" not in summary_of(_trainer(tmp_path, **limits | {"current_epoch": 0}), "fit", 1, 0)  # a signal did


def test_the_other_verbs_name_their_numbers_and_files(tmp_path: Path):
    trainer = _trainer(tmp_path)
    assert "written" not in summary_of(trainer, "validate", 2, 0)  # without a logger
    (tmp_path / "validate-metrics.csv").touch()
    assert summary_of(trainer, "validate", 2, 0) == (
        f"validate took 0:00:02, val_loss 0.5000, peak memory 2.00 GiB per rank; "
        f"written to {tmp_path}/validate-metrics.csv"
    )
    trainer.ckpt_path = "run/checkpoints/step-00000050"
    assert "next:" not in summary_of(trainer, "validate", 2, 0)  # not our checkpoint
    trainer.checkpoint_callback = Checkpoint()
    said, following = summary_of(trainer, "validate", 2, 0).splitlines()
    assert said.startswith("validate of run/checkpoints/step-00000050 took 0:00:02, val_loss 0.5000, peak")
    assert following == f"next: lit-fsdp export --ckpt {trainer.ckpt_path} --out {tmp_path}/export/model"
    trainer.ckpt_path = None
    assert "test_loss 0.7500" in summary_of(trainer, "test", 2, 0)
    assert summary_of(trainer, "predict", 2, 0) == "predict took 0:00:02, peak memory 2.00 GiB per rank"
    (tmp_path / "predictions.jsonl").touch()
    assert summary_of(trainer, "predict", 2, 0).endswith(f"predictions: {tmp_path}/predictions.jsonl")
