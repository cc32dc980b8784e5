"""``metrics.csv``, and the runs of other loggers: a resumed run continues both.

Lightning's CSVLogger removes the file of an earlier start in the same folder; TensorBoard, W&B, MLflow and Comet would
each create a new run at every start.
"""

import csv
import hashlib
import importlib
import importlib.util
import io
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.logger import _add_prefix
from lightning.pytorch import Callback, LightningModule, Trainer, loggers
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from lit_fsdp.callbacks.records import PENDING_RECIPE, write_json
from lit_fsdp.checkpoint.run_folder import create_run_folder
from lit_fsdp.config.command_line import RUN_FOLDER
from lit_fsdp.config.sections import leaves
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.host import cache_root
from lit_fsdp.metrics.step_metrics import end_of
from lit_fsdp.redaction import redact_values

_log = logging.getLogger(__name__)
_NAME = "loggers.json"
_TRIES = 5
_PACKAGES = {
    "WandbLogger": "wandb", "MLFlowLogger": "mlflow", "CometLogger": "comet_ml",
    "TensorBoardLogger": "tensorboard",  # or tensorboardX
}  # fmt: skip
_ARGUMENTS = {
    "TensorBoardLogger": "version",
    "WandbLogger": "id",
    "RunWandbLogger": "id",
    "MLFlowLogger": "run_id",
    "CometLogger": "experiment_key",
}
"""Maps each class to the argument that accepts its ``version``."""


class RunCSVLogger(Logger, Callback):
    """Appends one row per logged step; only a new column rewrites the file. Also a callback, to track the step.

    The verb ``fit`` writes ``metrics.csv``: the column ``step`` is the number of optimizer steps taken, as in the names
    of checkpoints; the first and the last step always have a row. A run that resumes from a checkpoint keeps the rows
    up to its step and replaces the rest. The verbs ``validate`` and ``test`` each append one row per call to a separate
    file, at the step of the checkpoint.
    """

    name = version = ""  # the run folder is the name, and a run is resumed in place

    def __init__(self, run_folder: str | Path, verb: str = "fit") -> None:
        super().__init__()
        self._is_training = verb == "fit"
        self.path = Path(run_folder) / ("metrics.csv" if self._is_training else f"{verb}-metrics.csv")
        self._trainer: Any = None
        self._loaded_step: int | None = None
        self._seen_step = 0
        self._columns: list[str] = []
        self._last: dict[str, Any] = {}
        self._ahead: dict[str, float] = {}
        self._ahead_step = 0
        self._last_begins = 0

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self.path.parent)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the resolved recipe is saved next to this file."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row, or rewrite the last one if it has the same step."""
        if self._is_training:
            step = (step or 0) + 1
            if self._is_in_batch() and step > self._trainer.global_step:
                self._ahead, self._ahead_step = {**self._ahead, **metrics}, step  # for the row of the step that follows
                return
            # Lightning assigns a validation inside an accumulation to the next step
            step = min(step, self._trainer.global_step)
            if self._ahead and step >= self._ahead_step:
                metrics, self._ahead = {**self._ahead, **metrics}, {}
        else:
            step, metrics = self._loaded_step or 0, {n: value for n, value in metrics.items() if n != "epoch"}
        if not self._columns:
            self._columns = ["step"]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            goes_on = self.path.is_file() and not (self._is_training and self._loaded_step is None)
            end = self.path.stat().st_size if goes_on else 0
            self._rewrite(end, self._loaded_step if self._is_training else None)
        if self._last.get("step") != step:
            self._last, self._last_begins = {"step": step}, self.path.stat().st_size
        self._last.update({name: float(value) for name, value in metrics.items()})
        if new := [name for name in self._last if name not in self._columns]:
            self._columns += new
            self._rewrite(self._last_begins)
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerow(self._last)
        with self.path.open("r+b") as file:
            file.seek(self._last_begins)
            file.write(text.getvalue().encode())
            file.truncate()

    def _is_in_batch(self) -> bool:
        """Whether a batch has begun, where callbacks log values of the step that follows."""
        if not self._trainer.training:
            return False
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return bool(current.ready > current.processed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the Trainer to read its step, and log the recipe to the other loggers."""
        self._trainer = trainer
        if stage == "fit":
            self._log_recipe(Path(trainer.default_root_dir), trainer.loggers)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Note the step from which the run resumes."""
        self._loaded_step = checkpoint["global_step"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the row of this step now: Lightning logs after the callbacks, and a kill in between would lose it."""
        if trainer._logger_connector.should_update_logs:
            self._log_now(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Write the row of the first and the last step, which Lightning may skip."""
        step, is_logged = trainer.global_step, trainer._logger_connector.should_update_logs
        if not is_logged and step != self._seen_step and step in (1, end_of(trainer)):
            self._log_now(trainer)
        elif not is_logged and self._ahead and step >= self._ahead_step:
            self.log_metrics({}, step - 1)
        self._seen_step = step

    def _log_now(self, trainer: Trainer) -> None:
        connector = trainer._logger_connector
        is_step = trainer.training and connector._first_loop_iter is not None
        if is_step and not trainer.fit_loop._should_accumulate():
            metrics = {**convert_tensors_to_scalars(connector.metrics["log"]), "epoch": trainer.current_epoch}
            self.log_metrics(metrics, trainer.fit_loop.epoch_loop._batches_that_stepped)

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the runs of the other loggers that can resume, in order."""
        named = [(type(logger).__name__, logger) for logger in trainer.loggers if logger is not self]
        runs = [(name, logger.version if name in _ARGUMENTS else None) for name, logger in named]
        if any(run is not None for _, run in runs):
            write_json(Path(trainer.default_root_dir) / _NAME, runs)

    @rank_zero_only
    def _log_recipe(self, folder: Path, others: list[Logger]) -> None:
        """Log the resolved recipe as hyperparameters; resumed runs of loggers keep theirs: MLflow refuses to change."""
        resumed = folder / PENDING_RECIPE
        if resumed.is_file() and (folder / _NAME).is_file():
            return
        path = resumed if resumed.is_file() else folder / "recipe.yaml"
        recipe = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
        # MLflow refuses other characters in names, such as those of a validation set
        found = {re.sub(r"[^\w./ :-]", "_", key, flags=re.ASCII): value for key, value in leaves(redact_values(recipe))}
        for logger in others if found else ():
            logger.log_hyperparams(found)

    def _rewrite(self, end: int, last: int | None = None) -> None:
        """Rewrite the rows up to a byte and up to step ``last`` with all columns; a kill may have truncated a row."""
        self.path.touch()
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with self.path.open("rb") as old, temporary.open("w", newline="") as file:  # row by row: there may be a million
            reader = csv.DictReader(line.decode() for line in iter(old.readline, b"") if old.tell() <= end)
            rows = (row for row in reader if (row.get("step") or "").removeprefix("-").isdigit())
            self._columns = list(dict.fromkeys([*(reader.fieldnames or ()), *self._columns]))
            writer = csv.DictWriter(file, self._columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row for row in rows if last is None or int(row["step"]) <= last)
        self._last_begins = temporary.stat().st_size
        os.replace(temporary, self.path)


class RunWandbLogger(loggers.WandbLogger):
    """Lightning's logger; offline it also sets W&B's own step, which would otherwise restart at 0 in each start.

    If a module itself logs to W&B more than once per step, a row uses the next step instead.
    """

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log ``metrics`` at ``step``."""
        run: Any = self.experiment
        if step is None or not run.offline or self._wandb_init.get("sync_tensorboard") or step < run.step:
            super().log_metrics(metrics, step)
            return
        named = _add_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR)
        run.log({**named, "trainer/global_step": step}, step=step)


def check_loggers(config: Any) -> None:
    """Refuse a logger in a parsed ``trainer`` section whose package is missing, or whose options have no effect."""
    for logger in _named(config):
        name, uploads = logger.class_path.rpartition(".")[2], logger.init_args.get("log_model")
        given = f"{uploads} of {name}, which uploads no folders"
        fix = "set log_model: false; checkpoint.export: best writes a model that can be uploaded"
        require(not uploads, "trainer.logger.log_model", given, "false, because checkpoints are folders", fix)
        # Lightning-AI/pytorch-lightning#21617: 2.6.6 disables the experiment; delete this when a release does not
        records = name != "CometLogger" or logger.init_args.get("online") is not False
        fix = "set online: true, or use WandbLogger with offline: true"
        require(records, "trainer.logger.online", "false of CometLogger", "true: offline it records nothing", fix)
        package = _PACKAGES.get(name)
        is_there = package is None or any(importlib.util.find_spec(one) for one in (package, f"{package}X"))
        given, fix = f"{name}, whose package {package} is not installed", f"pip install {package}"
        require(is_there, "trainer.logger", given, "a logger with an installed package", fix)


def _named(config: Any) -> list[Namespace]:
    given = config.get("logger")
    return [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, Namespace)]


def write_to_run_folder(config: Any, run_folder: Path) -> None:
    """Let the loggers of a parsed ``trainer`` section write to the run folder unless they name another, in place."""
    for logger in _named(config):
        name, args = logger.class_path.rpartition(".")[2], logger.init_args
        if args.get("save_dir") == RUN_FOLDER or (name == "WandbLogger" and args.get("save_dir") == "."):
            args["save_dir"] = str(run_folder)
        is_open = not (args.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI"))
        if name == "MLFlowLogger" and is_open and args.get("save_dir") == "./mlruns":
            args["tracking_uri"] = f"sqlite:///{run_folder.resolve()}/mlflow.db"
            args["artifact_location"] = args.get("artifact_location") or f"{run_folder.resolve()}/mlartifacts"
            create_run_folder(run_folder)


def resume_loggers(config: Any, run_folder: Path, step: int | None) -> None:
    """Let the loggers of a parsed ``trainer`` section continue the runs saved in a run folder, in place.

    Arguments in the recipe take precedence. W&B writes to the run folder, MLflow to a database there because it refuses
    file stores from 3.7 on. TensorBoard gets a ``purge_step`` that hides logs of a killed run from ``step`` on, which
    works only if the first start (``step`` None) has set it too. The W&B logger is replaced by
    :class:`RunWandbLogger`.
    """
    write_to_run_folder(config, run_folder)
    path, found = run_folder / _NAME, _named(config)
    for logger in found:
        if logger.class_path == "lightning.pytorch.loggers.WandbLogger":
            logger.class_path = f"{__name__}.RunWandbLogger"
        if logger.class_path.endswith(".TensorBoardLogger") and logger.init_args.get("purge_step", 0) is None:
            logger.init_args["purge_step"] = step or 0
        if logger.class_path.endswith(".MLFlowLogger"):
            _open_store(logger.init_args)
    noted = [] if step is None or not path.is_file() else json.loads(path.read_text(encoding="utf-8"))
    names = [logger.class_path.rpartition(".")[2] for logger in found]
    owned = [(name, one.init_args.get(_ARGUMENTS.get(name, ""))) for name, one in zip(names, found, strict=True)]
    noted = [(name, run) for name, run in noted if name in _ARGUMENTS and (name, run) not in owned]
    for logger, (name, own) in zip(found, owned, strict=True):
        run = next((run for of, run in noted if of == name), None) if own is None else None
        if run is not None:
            noted.remove((name, run))  # another logger of this class continues the next one
            logger.init_args[_ARGUMENTS[name]] = run
            _log.info("%s resumes its run %s (%s)", name, run, path)


def _open_store(given: Any) -> None:
    """Let one process at a time open the MLflow database and its experiment; the first one creates them.

    It is retried because concurrent access by others, such as ``mlflow ui``, makes it fail.
    """
    uri, name = given.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI", ""), given.get("experiment_name")
    uri = uri or f"file:{given.get('save_dir') or './mlruns'}"  # Lightning's default
    if uri.startswith("http") or importlib.util.find_spec("mlflow") is None:
        return
    from filelock import FileLock

    is_file = "://" not in uri or uri.startswith("file:")
    lock = cache_root() / f"mlflow-{hashlib.sha256(uri.encode()).hexdigest()[:16]}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    for left in reversed(range(_TRIES)):
        try:
            with FileLock(lock):
                client = importlib.import_module("mlflow").MlflowClient(uri)
                if is_file:
                    return
                if name and client.get_experiment_by_name(name) is None:
                    client.create_experiment(name, given.get("artifact_location"))
                return
        except Exception as error:  # depends on the database
            if is_file:
                if type(error).__name__ != "MlflowException":
                    return  # Lightning's logger raises it again
                # file stores are refused from 3.7 on
                shown = f"MLFlowLogger with {uri} ({str(error).partition('. ')[0]})"
                fix = "set tracking_uri to a database, such as sqlite:///mlflow.db"
                raise ConfigError("trainer.logger", shown, "a database or server", fix) from None
            if not left:
                raise
            _log.info("MLflow's store could not be opened (%s); %d more tries", type(error).__name__, left)
            time.sleep(1)
