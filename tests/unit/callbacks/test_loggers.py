"""A run that goes on does so in metrics.csv, one row per step, and in the runs of its other loggers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_fsdp.callbacks.loggers import LoggerRuns, RunCSVLogger, go_on_logging
from lit_fsdp.checkpoint.manifest import Manifest


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_a_resumed_run_keeps_what_was_before_and_replaces_the_rest(tmp_path: Path):
    first = RunCSVLogger(tmp_path)
    for step in range(5):
        first.log_metrics({"a": float(step)}, step)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5,1.0\n,7\n")  # cut off by a kill
    second = RunCSVLogger(tmp_path)
    second.loaded_step = 3
    second.log_metrics({"a": 30.0, "b": 1.0}, 3)
    second.log_metrics({"a": 40.0}, 4)
    assert rows(tmp_path) == [
        *({"step": str(step), "a": f"{step}.0"} for step in range(3)),
        {"step": "3", "a": "30.0", "b": "1.0"},
        {"step": "4", "a": "40.0"},
    ]
    RunCSVLogger(tmp_path).log_metrics({"b": 2.0}, 0)  # a new run
    assert rows(tmp_path) == [{"step": "0", "b": "2.0"}]


class _Counting(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("train", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", float(self.trainer.global_step))


@pytest.mark.filterwarnings("ignore")
def test_a_validation_inside_an_accumulation_stands_in_the_row_of_the_step_before(tmp_path: Path):
    logger = RunCSVLogger(tmp_path)
    switched_off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps")
    options: dict[str, Any] = {"accelerator": "cpu", "logger": logger, "callbacks": [LoggerRuns()]}
    options |= {"max_steps": 3, "accumulate_grad_batches": 4, "val_check_interval": 6, "limit_val_batches": 1}
    trainer = Trainer(**options, **dict.fromkeys(switched_off, 0), log_every_n_steps=1)
    trainer.fit(_Counting())
    found = [(row["step"], row["train"], row.get("val")) for row in rows(tmp_path)]
    assert found == [("0", "0.0", "1.0"), ("1", "1.0", None), ("2", "2.0", "3.0")]


class _KilledAfterTheSave(ModelCheckpoint):
    def on_train_batch_end(self, trainer: Trainer, *more: Any) -> None:
        super().on_train_batch_end(trainer, *more)
        if trainer.global_step == 2:
            raise InterruptedError


@pytest.mark.filterwarnings("ignore")
def test_the_row_of_a_step_is_there_before_its_checkpoint(tmp_path: Path):
    """Lightning logs after the callbacks; a run that goes on from step 2 begins with the row behind it."""
    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    saved = _KilledAfterTheSave(tmp_path, every_n_train_steps=1)
    logs = {"callbacks": [LoggerRuns(), saved], "logger": RunCSVLogger(tmp_path), "log_every_n_steps": 1}
    with pytest.raises(InterruptedError):
        Trainer(**options, **logs, max_steps=3, limit_val_batches=0).fit(_Counting())
    assert [(row["step"], row["train"]) for row in rows(tmp_path)] == [("0", "0.0"), ("1", "1.0")]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_goes_on_and_hides_what_a_killed_run_had_logged_beyond_its_checkpoint(tmp_path: Path):
    (tmp_path / "step").mkdir()
    manifest = Manifest(
        folder=tmp_path / "step", layout="full", global_step=10, world_size=1, created="", versions={}, tensors={},
        files={}, metrics={},
    )  # fmt: skip
    (tmp_path / "step" / "manifest.json").write_bytes(manifest.dumps())
    options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"enable_checkpointing": False, "max_steps": 1, "limit_val_batches": 0, "default_root_dir": tmp_path}
    loggers = [TensorBoardLogger(tmp_path, version=3), CSVLogger(tmp_path)]
    Trainer(**options, callbacks=[LoggerRuns()], logger=loggers).fit(_Counting())
    for given, path, expected in (
        ({"version": None, "purge_step": None}, tmp_path / "step", {"version": 3, "purge_step": 10}),
        ({"version": None, "purge_step": None}, None, {"version": 3, "purge_step": 0}),
        ({"version": 5, "purge_step": 7}, tmp_path / "step", {"version": 5, "purge_step": 7}),  # the recipe says where
    ):
        board, plain, other = (
            Namespace(class_path=f"lightning.pytorch.loggers.{name}", init_args=Namespace(**arguments))
            for name, arguments in (("TensorBoardLogger", given), ("CSVLogger", {}), ("WandbLogger", {"id": None}))
        )
        go_on_logging({"logger": [other, plain, board]}, tmp_path, path)
        assert [logger.init_args for logger in (board, plain, other)] == [
            Namespace(**expected), Namespace(), Namespace(id=None),
        ]  # fmt: skip
    for switch in (None, True, False):
        go_on_logging({"logger": switch}, tmp_path, None)
