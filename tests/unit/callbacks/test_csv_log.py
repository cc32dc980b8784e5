"""metrics.csv: one row per step, continued by a resumed run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_fsdp.callbacks.csv_log import RunCSVLogger


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


def test_a_known_row_is_appended_and_nothing_is_rewritten(tmp_path: Path):
    logger = RunCSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    inode = (tmp_path / "metrics.csv").stat().st_ino
    logger.log_metrics({"a": 2.0}, 1)
    assert (tmp_path / "metrics.csv").stat().st_ino == inode
    assert rows(tmp_path) == [{"step": "0", "a": "1.0"}, {"step": "1", "a": "2.0"}]


def test_a_resumed_run_keeps_what_was_before_and_replaces_the_rest(tmp_path: Path):
    first = RunCSVLogger(tmp_path)
    for step in range(5):
        first.log_metrics({"a": float(step)}, step)
    second = RunCSVLogger(tmp_path)
    second.loaded_step = 3
    assert len(rows(tmp_path)) == 5  # nothing happens before the first row
    second.log_metrics({"a": 30.0, "b": 1.0}, 3)
    second.log_metrics({"a": 40.0}, 4)
    assert rows(tmp_path) == [
        *({"step": str(step), "a": f"{step}.0"} for step in range(3)),
        {"step": "3", "a": "30.0", "b": "1.0"},
        {"step": "4", "a": "40.0"},
    ]


def test_a_row_cut_off_by_a_kill_is_dropped(tmp_path: Path):
    (tmp_path / "metrics.csv").write_text("step,a,b\n0,1.0,2.0\n1,1.5\n,7\n")
    logger = RunCSVLogger(tmp_path)
    logger.loaded_step = 2
    logger.log_metrics({"a": 9.0}, 2)
    assert rows(tmp_path) == [
        {"step": "0", "a": "1.0", "b": "2.0"},
        {"step": "1", "a": "1.5"},
        {"step": "2", "a": "9.0"},
    ]


def test_a_new_run_replaces_the_file(tmp_path: Path):
    RunCSVLogger(tmp_path).log_metrics({"a": 1.0}, 0)
    RunCSVLogger(tmp_path).log_metrics({"b": 2.0}, 0)
    assert rows(tmp_path) == [{"step": "0", "b": "2.0"}]


def test_the_run_folder_is_its_place(tmp_path: Path):
    logger = RunCSVLogger(tmp_path)
    assert (logger.log_dir, logger.save_dir, logger.name, logger.version) == (str(tmp_path), str(tmp_path), "", "")


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
    options: dict[str, Any] = {"accelerator": "cpu", "logger": logger, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(
        **options,
        max_steps=3,
        accumulate_grad_batches=4,
        val_check_interval=6,
        limit_val_batches=1,
        log_every_n_steps=1,
    )
    logger.trainer = trainer
    trainer.fit(_Counting())
    found = [(row["step"], row["train"], row.get("val")) for row in rows(tmp_path)]
    assert found == [("0", "0.0", "1.0"), ("1", "1.0", None), ("2", "2.0", "3.0")]
