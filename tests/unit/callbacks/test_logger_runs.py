"""A run that goes on does so in the runs of its loggers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonargparse import Namespace

from lit_fsdp.callbacks import logger_runs
from lit_fsdp.callbacks.logger_runs import LoggerRuns, go_on_logging


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
    loggers = CSVLogger(0), TensorBoardLogger(3), MLFlowLogger("abc")
    assert noted(tmp_path, *loggers, first=False) is None
    assert noted(tmp_path, CSVLogger(0)) is None
    found = [{"class": "TensorBoardLogger", "run": 3}, {"class": "MLFlowLogger", "run": "abc"}]
    assert noted(tmp_path, *loggers) == found


@pytest.mark.parametrize(("given", "path", "step"), [(None, "there", 10), (None, None, 0), (7, "there", 7)])
def test_tensorboard_hides_what_a_killed_run_had_logged_beyond_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None, path: str | None, step: int
):
    monkeypatch.setattr(logger_runs, "read_manifest", lambda path: SimpleNamespace(global_step={"there": 10}[path]))
    noted(tmp_path, TensorBoardLogger(0), MLFlowLogger("x"))
    loggers = [asked("TensorBoardLogger", version=None, purge_step=given), asked("MLFlowLogger", run_id=None)]
    go_on_logging({"logger": loggers}, tmp_path, path)
    assert loggers[0].init_args == Namespace(version=0, purge_step=step)
    assert loggers[1].init_args == Namespace(run_id="x")


@pytest.mark.parametrize("alone", [True, False])
def test_they_are_told_to_go_on_unless_the_recipe_says_where(tmp_path: Path, alone: bool):
    noted(tmp_path, TensorBoardLogger(3), TensorBoardLogger(7), MLFlowLogger("abc"))
    first = asked("TensorBoardLogger", save_dir="x", version=None)
    section = {"logger": first if alone else [first, asked("CSVLogger"), asked("TensorBoardLogger", version=None)]}
    go_on_logging(section, tmp_path, None)
    assert first.init_args.version == 3
    if not alone:
        assert section["logger"][1].init_args == Namespace()
        assert section["logger"][2].init_args.version == 7
    section = {"logger": [asked("MLFlowLogger", run_id="mine"), asked("WandbLogger", id=None)]}
    go_on_logging(section, tmp_path, None)
    assert [entry.init_args for entry in section["logger"]] == [Namespace(run_id="mine"), Namespace(id=None)]


@pytest.mark.parametrize("logger", [None, True, False])
def test_nothing_to_go_on_with(tmp_path: Path, logger: bool | None):
    section = {"logger": logger}
    go_on_logging(section, tmp_path, None)
    noted(tmp_path, TensorBoardLogger(3))
    go_on_logging(section, tmp_path, None)
    assert section == {"logger": logger}
    section = {"logger": asked("TensorBoardLogger", version=None)}
    go_on_logging(section, tmp_path / "another", None)
    assert section["logger"].init_args.version is None
