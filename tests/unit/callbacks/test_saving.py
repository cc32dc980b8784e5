"""Which steps are saved, which stay, and what a validation adds; without a Trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.ddp import ReplicatedStrategy


class Run:
    """As much of a Trainer as the callback looks at; saving really writes a checkpoint."""

    def __init__(self, folder: Path, max_steps: int = -1, **options: Any) -> None:
        self.default_root_dir, self.max_steps, self.global_step = str(folder), max_steps, 0
        self.sanity_checking = self.fast_dev_run = False
        device = torch.device("cpu")
        self.strategy = mock.create_autospec(ReplicatedStrategy, root_device=device, damaged_checkpoints={})
        self.is_global_zero, self.current_epoch = True, 0
        self.state = SimpleNamespace(fn="fit")
        progress = SimpleNamespace(is_last_batch=False)
        self.fit_loop = SimpleNamespace(max_epochs=-1, epoch_loop=SimpleNamespace(batch_progress=progress))
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.saved: list[int] = []
        self.callback: Any = Checkpoint(**options)
        self.callback._check_room = self.callback._check_next = lambda *_: None
        self.callback.setup(self, None, "fit")
        self.callback.on_train_start(self, None)

    def save_checkpoint(self, folder: Path, weights_only: bool) -> None:
        """What the strategy would do."""
        self.saved.append(self.global_step)
        save_checkpoint(folder, {"w": torch.ones(1)}, {}, {"global_step": self.global_step}, "full")

    def steps(self, count: int) -> Run:
        """That many optimizer steps of two micro-batches."""
        for _ in range(count):
            self.callback.on_train_batch_end(self, None, None, None, 0)
            self.global_step += 1
            self.callback.on_train_batch_end(self, None, None, None, 1)
        return self

    def validate(self, loss: float, name: str = "val_loss") -> Run:
        """The end of a validation."""
        self.callback_metrics = {name: torch.tensor(loss)}
        self.callback.on_validation_end(self, None)
        return self

    @property
    def there(self) -> list[int]:
        """Steps on disk."""
        return [entry.step for entry in checkpoints(Path(self.default_root_dir))]


def test_an_end_is_saved_once(tmp_path: Path):
    """That of the last epoch, and one that nobody foresaw."""
    run = Run(tmp_path / "epoch", keep_last=-1).steps(2)
    run.fit_loop.max_epochs = 1
    run.fit_loop.epoch_loop.batch_progress.is_last_batch = True
    assert run.steps(1).saved == [3]
    run = Run(tmp_path / "other").steps(5)
    for _ in range(2):
        run.callback.on_train_end(run, None)
    assert run.saved == [5]


def test_a_better_validation_is_saved_between_the_others(tmp_path: Path):
    run = Run(tmp_path, keep_last=1)
    for loss in (3.0, float("nan"), 2.0, 2.0, 2.5):
        run.steps(1).validate(loss)
    assert run.saved == [1, 3]  # an equal one is not better
    assert run.there == [3]


def test_a_resumed_run_knows_the_best_before_it(tmp_path: Path):
    Run(tmp_path, keep_last=-1).steps(1).validate(1.0)
    again = Run.__new__(Run)
    Run.__init__(again, tmp_path / "other")
    again.default_root_dir, again.global_step = str(tmp_path), 1
    again.callback.setup(again, None, "fit")
    again.callback.on_train_start(again, None)
    again.steps(1).validate(1.5)
    assert again.saved == []
    assert again.steps(1).validate(0.5).saved == [3]


def test_other_validations_save_nothing(tmp_path: Path):
    changes = {"sanity_checking": True}, {"fast_dev_run": True}, {"state": SimpleNamespace(fn="validate")}
    for number, change in enumerate(changes):
        run = Run(tmp_path / str(number)).steps(1)
        vars(run).update(change)
        assert run.validate(1.0).saved == [], change


def test_hyperparameters_are_saved_without_secrets(tmp_path: Path):
    run = Run(tmp_path)
    run.accumulate_grad_batches = 2
    checkpoint = {"hyper_parameters": {"lr": 0.1, "api_key": "canary", "layers": (1, 2)}}
    run.callback.on_save_checkpoint(run, None, checkpoint)
    assert checkpoint["hyper_parameters"] == {"lr": 0.1, "api_key": "***", "layers": (1, 2)}


def test_a_strategy_that_writes_other_files_is_refused(tmp_path: Path):
    """They would neither be tidied away nor found by ``ckpt_path="last"``."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(callbacks=[Checkpoint()], default_root_dir=tmp_path, accelerator="cpu", max_steps=2, **quiet)
    with pytest.raises(ConfigError, match=r"SingleDeviceStrategy with lit_fsdp.Checkpoint(.|\n)*ModelCheckpoint"):
        trainer.fit(BoringModel())
    assert not (tmp_path / "checkpoints").exists()
