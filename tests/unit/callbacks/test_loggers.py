"""A run that goes on does so in metrics.csv, one row per step, and in the runs of its other loggers."""

from __future__ import annotations

import csv
import sys
import time
import tracemalloc
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.util import tensor_util

from lit_fsdp.callbacks.loggers import RunCSVLogger, RunWandbLogger, check_loggers, resume_loggers
from lit_fsdp.errors import ConfigError


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def test_a_resumed_run_keeps_what_was_before_and_replaces_the_rest(tmp_path: Path):
    def start(loaded_step: int | None) -> RunCSVLogger:
        logger = RunCSVLogger(tmp_path)
        logger.setup(
            SimpleNamespace(global_step=10, training=False, default_root_dir=tmp_path, loggers=[]), BoringModel(), "fit"
        )  # type: ignore[arg-type]
        if loaded_step is not None:
            logger.on_load_checkpoint(Trainer, BoringModel(), {"global_step": loaded_step})  # type: ignore[arg-type]
        return logger

    first, second = start(None), start(3)
    for step in range(5):
        first.log_metrics({"a": float(step)}, step)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5,1.0\n,7\n")  # cut off by a kill
    second.log_metrics({"a": 30.0, "b": 1.0}, 3)
    second.log_metrics({"a": 40.0}, 4)
    assert rows(tmp_path) == [
        *({"step": str(step + 1), "a": f"{step}.0"} for step in range(3)),
        {"step": "4", "a": "30.0", "b": "1.0"},
        {"step": "5", "a": "40.0"},
    ]
    peaks = []
    for steps in (1_000, 10_000):  # a longer run goes on in as much memory
        (tmp_path / "metrics.csv").write_text("step,a\n" + "".join(f"{step + 1},1.0\n" for step in range(steps)))
        tracemalloc.start()
        start(steps - 1).log_metrics({"b": 1.0}, 9)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(rows(tmp_path)) == steps
    assert peaks[1] < 1.5 * peaks[0]
    start(None).log_metrics({"b": 2.0}, 0)  # a new run
    assert rows(tmp_path) == [{"step": "1", "b": "2.0"}]


class _Counting(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("train", float(self.trainer.global_step))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", float(self.trainer.global_step))


def trainer_with(logger: Any, callbacks: list[Any], max_steps: int, **options: Any) -> Trainer:
    switched_off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "limit_val_batches")
    fixed = {**dict.fromkeys(switched_off, 0), "accelerator": "cpu", "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    return Trainer(**{**fixed, **options}, logger=logger, callbacks=callbacks, max_steps=max_steps)


@pytest.mark.filterwarnings("ignore")
def test_a_validation_inside_an_accumulation_stands_in_the_row_of_the_step_before(tmp_path: Path):
    logger = RunCSVLogger(tmp_path)
    options = {"accumulate_grad_batches": 4, "val_check_interval": 6, "limit_val_batches": 1}
    trainer_with(logger, [logger], 3, **options).fit(_Counting())
    found = [(row["step"], row["train"], row.get("val")) for row in rows(tmp_path)]
    assert found == [("1", "0.0", "1.0"), ("2", "1.0", None), ("3", "2.0", "3.0")]


@pytest.mark.filterwarnings("ignore")
def test_the_first_and_the_last_step_have_rows(tmp_path: Path):
    for every, wanted in ((2, ["1", "2", "4", "5"]), (50, ["1", "5"])):
        logger = RunCSVLogger(tmp_path / str(every))
        trainer_with(logger, [logger], 5, log_every_n_steps=every).fit(_Counting())
        found = rows(tmp_path / str(every))
        assert [(row["step"], row["train"]) for row in found] == [(step, f"{int(step) - 1}.0") for step in wanted]


class _Scheduled(_Counting):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [1, 2])
def test_what_a_callback_logs_before_a_step_is_in_the_row_of_that_step(tmp_path: Path, every: int):
    logger = RunCSVLogger(tmp_path)
    options = {"log_every_n_steps": every, "accumulate_grad_batches": 2}
    trainer_with(logger, [logger, LearningRateMonitor()], 4, **options).fit(_Scheduled())
    steps = range(1, 5) if every == 1 else (1, 2, 4)
    found = [(row["step"], row.get("lr-SGD")) for row in rows(tmp_path)]
    assert found == [(str(n), f"{float(n)}" if n % every == 0 else None) for n in steps]


class _Early(Callback):
    def on_train_batch_start(self, trainer: Trainer, *more: Any) -> None:
        trainer.logger.log_metrics({"early": trainer.global_step + 1.0}, trainer.global_step)  # type: ignore[union-attr]

    def on_validation_end(self, trainer: Trainer, *more: Any) -> None:
        trainer.logger.log_metrics({"late": float(trainer.global_step)}, trainer.global_step)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [1, 50])
def test_every_step_has_one_row_also_if_callbacks_log_in_every_batch(tmp_path: Path, every: int):
    logger = RunCSVLogger(tmp_path)
    options = {
        "log_every_n_steps": every,
        "accumulate_grad_batches": 3,
        "val_check_interval": 2,
        "limit_val_batches": 1,
    }
    trainer_with(logger, [logger, _Early()], 4, **options).fit(_Counting())
    found = rows(tmp_path)
    steps = [int(row["step"]) for row in found]
    assert steps == sorted(set(steps))
    assert [row["step"] for row in found if "early" in row] == ["1", "2", "3", "4"]
    assert all(float(row["early"]) == float(row["step"]) for row in found if "early" in row)


class _KilledAfterTheSave(ModelCheckpoint):
    def on_train_batch_end(self, trainer: Trainer, *more: Any) -> None:
        super().on_train_batch_end(trainer, *more)
        if trainer.global_step == 2:
            raise InterruptedError


@pytest.mark.filterwarnings("ignore")
def test_the_row_of_a_step_is_there_before_its_checkpoint(tmp_path: Path):
    """Lightning logs after the callbacks; a run that goes on from step 2 begins with the row behind it."""
    saved = _KilledAfterTheSave(tmp_path, every_n_train_steps=1)
    logger = RunCSVLogger(tmp_path)
    with pytest.raises(InterruptedError):
        trainer_with(logger, [logger, saved], 3, enable_checkpointing=True).fit(_Counting())
    assert [(row["step"], row["train"]) for row in rows(tmp_path)] == [("1", "0.0"), ("2", "1.0")]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_goes_on_and_hides_what_a_killed_run_had_logged_beyond_its_checkpoint(tmp_path: Path):
    own = RunCSVLogger(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: {name: mine, optim: {lr: 0.5}, api_key: tell-nobody}")
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path, version=3), TensorBoardLogger(tmp_path, version=4), own]
    trainer_with(loggers, [own], 1, default_root_dir=tmp_path).fit(_Counting())
    logged = (tmp_path / "lightning_logs/version_3/hparams.yaml").read_text()
    assert yaml.safe_load(logged) == {"model.name": "mine", "model.optim.lr": 0.5, "model.api_key": "***"}
    given = [Namespace(version=None, purge_step=None), Namespace(version=5, purge_step=7)]  # one says where
    boards = [Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=one) for one in given]
    plain = Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=Namespace())
    resume_loggers({"logger": [plain, *boards]}, tmp_path, 10)
    assert given == [Namespace(version=3, purge_step=10), Namespace(version=5, purge_step=7)]
    other = Namespace(class_path="lightning.pytorch.loggers.WandbLogger", init_args=Namespace(id=None))
    resume_loggers({"logger": [other, *boards]}, tmp_path, 10)
    assert (plain.init_args, other.init_args) == (Namespace(), Namespace(id=None))
    given[0].version = given[1].version = None
    resume_loggers({"logger": [*boards, plain]}, tmp_path, 10)  # in another order
    assert [one.version for one in given] == [3, 4]
    given[0].version, given[1].version = 3, None
    resume_loggers({"logger": boards}, tmp_path, 10)
    assert [one.version for one in given] == [3, 4]  # two loggers never continue the same run
    (tmp_path / ".recipe.yaml").write_text("model: {name: changed}")  # a resume, whose loggers keep their recipe
    seen: list[Any] = []
    board = SimpleNamespace(log_hyperparams=seen.append)
    for _ in range(2):
        own._log_recipe(tmp_path, [board])  # type: ignore[list-item]
        (tmp_path / "loggers.json").unlink(missing_ok=True)  # without runs to continue
    assert seen == [{"model.name": "changed"}]
    for switch in (None, True, False):
        resume_loggers({"logger": switch}, tmp_path, 0)


def test_the_page_of_tensorboard_hides_the_lost_steps(tmp_path: Path):
    """Read as the page reads it, which takes the first start of a session that it sees for no restart."""
    for start, (resumed_at, steps) in enumerate([(None, range(8)), (5, range(5, 7)), (6, range(6, 8))]):
        init = Namespace(version=0, purge_step=None)
        board = Namespace(class_path="lightning.pytorch.loggers.TensorBoardLogger", init_args=init)
        resume_loggers({"logger": board}, tmp_path, resumed_at)
        logger = TensorBoardLogger(tmp_path, **vars(init))
        for step in steps:
            logger.log_metrics({"loss": 10.0 * start + step}, step)
        logger.experiment.close()
    events = plugin_event_accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    found = [(event.step, float(tensor_util.make_ndarray(event.tensor_proto))) for event in events.Tensors("loss")]
    assert found == [*((step, step) for step in range(5)), (5, 15), (6, 26), (7, 27)]


class _Offline(RunWandbLogger):
    """With a run that keeps rows as wandb 0.31 does: a call without a step ends the row."""

    def __init__(self) -> None:
        self._wandb_init, self._prefix, self.rows, self.step, self.offline = {}, "", {}, 0, True

    experiment: Any = property(lambda self: self)

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        assert (step or self.step) >= self.step
        self.step = self.step if step is None else step
        self.rows.setdefault(self.step, {}).update(metrics)
        self.step += step is None


def test_the_folders_of_wandb_offline_go_on_at_the_steps_of_the_run():
    init = Namespace(id=None)
    board = Namespace(class_path="lightning.pytorch.loggers.WandbLogger", init_args=init)
    resume_loggers({"logger": board}, Path(), 10)
    assert (board.class_path, init.id) == ("lit_fsdp.callbacks.loggers.RunWandbLogger", None)
    logger = _Offline()
    for metrics, step in (({"a": 1}, 10), ({"val": 2}, 10), ({"a": 3}, 12)):
        logger.log_metrics(metrics, step)
    for word in ("x", "y"):  # by the module itself
        logger.log({word: 1})
    logger.log_metrics({"a": 4}, 13)
    of = "trainer/global_step"
    assert logger.rows == {
        10: {"a": 1, "val": 2, of: 10},
        12: {"a": 3, "x": 1, of: 12},
        13: {"y": 1},
        14: {"a": 4, of: 13},
    }
    online = _Offline()
    online.offline = False
    online.log_metrics({"a": 5}, 20)  # W&B goes on by itself there
    assert online.rows == {0: {"a": 5, of: 20}}


def test_the_store_of_mlflow_is_tried_again_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    made: list[Any] = []

    class Client:
        def __init__(self, uri: str) -> None:
            made.append(uri)
            assert len(made) > failures, "duplicate column name: step"

        def get_experiment_by_name(self, name: str) -> None: ...

        def create_experiment(self, *given: Any) -> None:
            made.append(given)

    module = ModuleType("mlflow")
    module.MlflowClient, module.__spec__ = Client, ModuleSpec("mlflow", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for uri, failures, tries in (("sqlite:///x.db", 2, 3), ("http://server", 0, 0), ("sqlite:///x.db", 9, 5)):
        made.clear()
        init = Namespace(tracking_uri=uri, experiment_name="mine", artifact_location=None)
        config = {"logger": [Namespace(class_path="lightning.pytorch.loggers.MLFlowLogger", init_args=init)]}
        with pytest.raises(AssertionError) if failures > tries else nullcontext():
            resume_loggers(config, tmp_path, None)
        assert made == [uri] * tries + ([("mine", None)] if 0 < failures < tries else [])


def test_a_file_store_that_mlflow_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path))

    class MlflowException(Exception):
        pass

    def refuse(uri: str) -> None:
        raise MlflowException("The filesystem tracking backend is in maintenance mode. To migrate, ...")

    module = ModuleType("mlflow")
    module.MlflowClient, module.__spec__ = refuse, ModuleSpec("mlflow", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for given, shown in (({"tracking_uri": "file:./mine"}, "file:./mine"), ({"save_dir": "mine"}, "file:mine")):
        init = Namespace(**{"tracking_uri": None, "save_dir": "./mlruns", "experiment_name": "x", **given})
        config = {"logger": [Namespace(class_path="lightning.pytorch.loggers.MLFlowLogger", init_args=init)]}
        with pytest.raises(ConfigError) as refused:
            resume_loggers(config, tmp_path, None)
        backend = "The filesystem tracking backend is in maintenance mode"
        assert refused.value.given == f"MLFlowLogger with {shown} ({backend})"
        assert "sqlite:///mlflow.db" in refused.value.fix


def test_a_logger_without_its_package_is_refused_and_stores_are_in_the_run_folder(tmp_path: Path, monkeypatch):
    def section(path: str, **given: Any) -> Any:
        return Namespace(
            logger=[Namespace(class_path=f"lightning.pytorch.loggers.{path}", init_args=Namespace(**given))]
        )

    with pytest.raises(ConfigError, match="CometLogger, whose package comet_ml is not installed") as refused:
        check_loggers(section("CometLogger"))
    assert refused.value.fix == "pip install comet_ml"
    with pytest.raises(ConfigError, match=r"^trainer\.logger\.log_model: got all of WandbLogger") as refused:
        check_loggers(section("WandbLogger", log_model="all"))
    assert refused.value.fix.startswith("set log_model: false")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    check_loggers(section("CometLogger"))
    with pytest.raises(ConfigError, match=r"^trainer\.logger\.online: got false of CometLogger"):
        check_loggers(section("CometLogger", online=False))
    monkeypatch.undo()
    check_loggers(section("CSVLogger"))
    found = {"tensorboardX"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in found else None)
    check_loggers(section("TensorBoardLogger"))
    found.clear()
    with pytest.raises(ConfigError, match="TensorBoardLogger, whose package tensorboard is not installed"):
        check_loggers(section("TensorBoardLogger"))
    monkeypatch.undo()
    check_loggers(Namespace(logger=False))
    wandb, mlflow = (
        section("WandbLogger", save_dir="."),
        section("MLFlowLogger", save_dir="./mlruns", tracking_uri=None),
    )
    own = section("MLFlowLogger", save_dir="./mlruns", tracking_uri="http://there")
    for config in (wandb, mlflow, own):
        resume_loggers(config, tmp_path, None)
    assert wandb.logger[0].init_args.save_dir == str(tmp_path)
    assert mlflow.logger[0].init_args.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert mlflow.logger[0].init_args.artifact_location == f"{tmp_path}/mlartifacts"
    assert own.logger[0].init_args.tracking_uri == "http://there"
