"""Which runs of other loggers belong to a run folder, so that a run that goes on there goes on in them too.

TensorBoard, W&B, MLflow and Comet would each begin a new run at every start. Lightning's CSVLogger would delete its
file if it were told to go on; ``metrics.csv`` is the one that continues.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.checkpoint.files import replace_bytes
from lit_fsdp.checkpoint.manifest import read_manifest

_log = logging.getLogger(__name__)
NAME = "loggers.json"
_ARGUMENTS = {
    "TensorBoardLogger": "version",
    "WandbLogger": "id",
    "MLFlowLogger": "run_id",
    "CometLogger": "experiment_key",
}
"""By class, the argument that takes what its ``version`` says."""


class LoggerRuns(Callback):
    """Writes ``loggers.json``: the class and the run of each logger that can go on, in their order in the recipe."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it on rank 0."""
        if not trainer.is_global_zero:
            return
        named = [(type(logger).__name__, logger) for logger in trainer.loggers]
        entries = [{"class": name, "run": _run_of(logger)} for name, logger in named if name in _ARGUMENTS]
        if entries:
            replace_bytes(Path(trainer.default_root_dir) / NAME, json.dumps(entries, indent=1).encode() + b"\n")


def _run_of(logger: Any) -> int | str | None:
    _ = logger.experiment  # only then does it have one
    return logger.version


def go_on_logging(config: Any, run_folder: Path, resumed_from: str | Path | None) -> None:
    """Give the loggers of a parsed ``trainer`` section the runs that a run folder has noted, in place.

    TensorBoard is told from which step on it should hide what a killed run has logged beyond its checkpoint.

    Args:
        config: The section; its ``logger`` is nothing, a switch, a logger or a list of them.
        run_folder: An argument that the recipe gives wins over what stands there.
        resumed_from: The checkpoint that the run goes on from; ``None``: from the start.
    """
    path = run_folder / NAME
    given = config.get("logger")
    if not path.is_file() or given is None or isinstance(given, bool):
        return
    noted = json.loads(path.read_text(encoding="utf-8"))
    for logger in given if isinstance(given, list) else [given]:
        name = logger.class_path.rpartition(".")[2]
        entry = next((entry for entry in noted if entry["class"] == name), None)
        if entry is None:
            continue
        noted.remove(entry)
        argument = _ARGUMENTS[name]
        if name == "TensorBoardLogger" and logger.init_args.get("purge_step", 0) is None:
            logger.init_args["purge_step"] = read_manifest(resumed_from).global_step if resumed_from else 0
        if logger.init_args.get(argument) is None:
            logger.init_args[argument] = entry["run"]
            _log.info("%s goes on in its run %s (%s)", name, entry["run"], path)
