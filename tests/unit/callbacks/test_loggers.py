"""A run that goes on does so in metrics.csv, one row per step, and in the runs of its other loggers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_fsdp.callbacks import loggers
from lit_fsdp.callbacks.loggers import LoggerRuns, RunCSVLogger, go_on_logging


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_one_row_per_step_and_columns_as_they_come(tmp_path: Path):
    logger = RunCSVLogger(tmp_path / "run")
    logger.log_metrics({"train_loss": 2.5}, 0)
    logger.log_metrics({"train_loss": 2.25}, 1)
    logger.log_metrics({"val_loss": 3.0}, 1)
    logger.log_metrics({"train_loss": 2.0, "lr": 0.5}, 2)
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines() == [
        "step,train_loss,val_loss,lr",
        "0,2.5,,",
        "1,2.25,3.0,",
        "2,2.0,,0.5",
    ]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.csv"]


def test_nothing_is_rewritten_where_the_columns_are_known(tmp_path: Path):
    logger = RunCSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0, "b": 1.0}, 0)
    inode = (tmp_path / "metrics.csv").stat().st_ino
    for step in (1, 2):
        logger.log_metrics({"a": 2.0}, step)
        logger.log_metrics({"b": 3.0}, step)
        logger.log_metrics({"a": 2.5}, step)
    assert (tmp_path / "metrics.csv").stat().st_ino == inode
    second = [{"step": str(step), "a": "2.5", "b": "3.0"} for step in (1, 2)]
    assert rows(tmp_path) == [{"step": "0", "a": "1.0", "b": "1.0"}, *second]


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


def test_validate_adds_a_row_per_call_beside(tmp_path: Path):
    RunCSVLogger(tmp_path).log_metrics({"a": 1.0}, 0)
    for value in (1.5, 2.5):
        logger = RunCSVLogger(tmp_path, "validate")
        logger.loaded_step = 4
        logger.log_metrics({"b": value, "epoch": 0}, 0)
        logger.log_metrics({"c": value}, 0)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,a", "0,1.0"]
    assert (tmp_path / "validate-metrics.csv").read_text().splitlines() == ["step,b,c", "4,1.5,1.5", "4,2.5,2.5"]


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


class TensorBoardLogger:
    """As much of Lightning's as is looked at."""

    def __init__(self, version: int | str) -> None:
        self.version = version
        self.experiment: Any = None


class MLFlowLogger(TensorBoardLogger):
    """Another one."""


class CSVLogger(TensorBoardLogger):
    """One that cannot go on."""


def noted(folder: Path, *loggers: Any, first: bool = True) -> Any:
    run = SimpleNamespace(is_global_zero=first, loggers=loggers, default_root_dir=folder)
    LoggerRuns().on_train_start(run, None)  # type: ignore[arg-type]
    path = folder / "loggers.json"
    return json.loads(path.read_text()) if path.exists() else None


def asked(name: str, **arguments: Any) -> Any:
    return Namespace(class_path=f"lightning.pytorch.loggers.{name}", init_args=Namespace(**arguments))


def test_what_can_go_on_is_noted_on_the_first_rank(tmp_path: Path):
    three = CSVLogger(0), TensorBoardLogger(3), MLFlowLogger("abc")
    assert noted(tmp_path, *three, first=False) is None
    assert noted(tmp_path, CSVLogger(0)) is None
    found = [{"class": "TensorBoardLogger", "run": 3}, {"class": "MLFlowLogger", "run": "abc"}]
    assert noted(tmp_path, *three) == found


def test_tensorboard_hides_what_a_killed_run_had_logged_beyond_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loggers, "read_manifest", lambda path: SimpleNamespace(global_step={"there": 10}[path]))
    noted(tmp_path, TensorBoardLogger(0))
    for given, path, step in ((None, "there", 10), (None, None, 0), (7, "there", 7)):
        logger = asked("TensorBoardLogger", version=None, purge_step=given)
        go_on_logging({"logger": logger}, tmp_path, path)
        assert logger.init_args == Namespace(version=0, purge_step=step)


def test_they_are_told_to_go_on_unless_the_recipe_says_where(tmp_path: Path):
    go_on_logging({"logger": asked("WandbLogger", id=None)}, tmp_path, None)  # nothing is noted yet
    noted(tmp_path, TensorBoardLogger(3), TensorBoardLogger(7), MLFlowLogger("abc"))
    for given, expected in (
        ([asked("TensorBoardLogger", version=None)], [Namespace(version=3)]),
        ([asked("TensorBoardLogger", version=None), asked("CSVLogger")], [Namespace(version=3), Namespace()]),
        ([asked("TensorBoardLogger", version=None) for _ in "ab"], [Namespace(version=3), Namespace(version=7)]),
        ([asked("MLFlowLogger", run_id="mine")], [Namespace(run_id="mine")]),
        ([asked("WandbLogger", id=None)], [Namespace(id=None)]),
    ):
        go_on_logging({"logger": given if len(given) > 1 else given[0]}, tmp_path, None)
        assert [logger.init_args for logger in given] == expected
    for switch in (None, True, False):
        go_on_logging({"logger": switch}, tmp_path, None)
