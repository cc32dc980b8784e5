"""Which steps are saved, which stay, and what a validation adds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_fsdp import Checkpoint, fsdp_strategy
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _this_process_as_before() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Told(BoringModel):
    """Has the validation losses that it is told, one for each step."""

    def __init__(self, told: list[float]) -> None:
        super().__init__()
        self.told = told

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.told[self.trainer.global_step - 1])


def trainer_of(folder: Path, callback: Checkpoint, strategy: Any = None, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options = {"val_check_interval": 1, "limit_val_batches": 1, "num_sanity_val_steps": 1, **options}
    strategy = strategy or fsdp_strategy(engine="single")
    return Trainer(strategy=strategy, callbacks=[callback], default_root_dir=folder, devices=1, **quiet, **options)


def saved(folder: Path, told: list[float], ckpt_path: str | None = None, **options: Any) -> list[int]:
    """Steps on disk after a run."""
    trainer_of(folder, Checkpoint(**options), max_steps=len(told)).fit(Told(told), ckpt_path=ckpt_path)
    return [entry.step for entry in checkpoints(folder)]


def test_a_better_validation_is_saved_between_the_others(tmp_path: Path):
    losses = [3.0, math.nan, 2.0, 2.0, 2.5]
    assert saved(tmp_path / "all", losses, keep_last=-1) == [1, 3, 5]  # an equal one is not better; the end is saved
    assert saved(tmp_path / "one", losses, keep_last=1) == [3, 5]
    assert read_manifest(tmp_path / "one/checkpoints/step-00000003").metrics["val_loss"] == 2.0
    assert saved(tmp_path / "resumed", [1.0], keep_last=-1) == [1]
    assert saved(tmp_path / "resumed", [1.0, 1.5, 0.5, 0.7], "last", keep_last=-1) == [1, 3, 4]


def test_other_validations_save_nothing_and_hyperparameters_are_saved_without_secrets(tmp_path: Path):
    callback = Checkpoint()
    trainer_of(tmp_path, callback, fast_dev_run=True).fit(Told([1.0]))
    trainer = trainer_of(tmp_path, callback)
    trainer.validate(Told([1.0]))
    assert checkpoints(tmp_path) == []
    checkpoint = {"hyper_parameters": {"lr": 0.1, "api_key": "canary", "layers": (1, 2)}}
    callback.on_save_checkpoint(trainer, Told([]), checkpoint)
    assert checkpoint["hyper_parameters"] == {"lr": 0.1, "api_key": "***", "layers": (1, 2)}


def test_a_callback_that_saves_on_errors_removes_nothing_without_one(tmp_path: Path, caplog: Any):
    callback: Any = OnExceptionCheckpoint(tmp_path)
    trainer_of(tmp_path, callback, max_steps=1).fit(BoringModel())
    assert "not removed" not in caplog.text


def test_a_strategy_that_writes_other_files_is_refused(tmp_path: Path):
    """They would neither be tidied away nor found by ``ckpt_path="last"``."""
    with pytest.raises(ConfigError, match=r"SingleDeviceStrategy with lit_fsdp.Checkpoint(.|\n)*ModelCheckpoint"):
        trainer_of(tmp_path, Checkpoint(), "auto", max_steps=2).fit(BoringModel())
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("device", "offload", "async_save", "opens"),
    [("cuda", False, None, 1), ("cuda", True, None, 0), ("cuda", True, True, 1), ("cpu", False, None, 0)],
)
def test_saves_are_in_the_background_where_the_host_has_room(
    tmp_path: Path, device: str, offload: bool, async_save: bool | None, opens: int
):
    callback, strategy = Checkpoint(async_save=async_save), fsdp_strategy(cpu_offload=offload)
    trainer = trainer_of(tmp_path, callback, strategy)
    with (
        mock.patch.object(type(strategy), "root_device", torch.device(device)),
        mock.patch.object(strategy, "open_background") as opened,
    ):
        callback.setup(trainer, BoringModel(), "fit")
    callback.teardown(trainer, BoringModel(), "fit")
    assert opened.call_count == opens
