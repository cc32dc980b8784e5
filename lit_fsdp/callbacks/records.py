"""Records of a run on the screen and in the run folder: data, units, dtypes, predictions."""

import contextlib
import json
import logging
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lit_fsdp.callbacks.stop import StopRequested
from lit_fsdp.checkpoint.files import replace_bytes
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.storage import versions
from lit_fsdp.config.sections import changed_values
from lit_fsdp.errors import CheckpointError
from lit_fsdp.metrics.hardware import is_accelerator, peak_device_bytes, peak_host_bytes, reset_peak_host_bytes
from lit_fsdp.metrics.step_metrics import end_of
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.redaction import redact, redact_values
from lit_fsdp.report.data import data_table
from lit_fsdp.report.tables import console_for, dtypes_table, parameter_counts, units_table

_log = logging.getLogger(__name__)
_MOST_SHOWN = 600  # characters of an error
_OF_TRAINING = ("status", "started", "ended", "measured_peak_bytes_per_rank")
"""Values of ``audit.json`` that steps of training replace."""
PENDING_RECIPE = ".recipe.yaml"
"""The recipe of a run that resumes, until its checkpoint is loaded."""


def record_data(datamodule: Any, stage: str, folder: Path) -> None:
    """Show the data of our data module; training also writes a record."""
    record = datamodule.describe()
    if stage == "fit":
        write_json(folder / "data.json", record)
    show(data_table(record))


class RunRecord(Callback):
    """Prints the FSDP units before step 1 and the realized dtypes after it; ``audit.json`` and ``dtypes.json``.

    The metric ``grad_norm``, the 2-norm of all gradients of a step before clipping, is logged.
    """

    _dtypes_written = _has_audit = False
    _changed: tuple[str, ...] = ()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the memory before the model is built."""
        self._changed = ()
        reset_peak_host_bytes()  # model conversion or tokenization may have used more
        self._before_bytes = peak_host_bytes()
        device = trainer.strategy.root_device
        if stage == "fit" and is_accelerator(device):
            # stacks of live allocations: about 2 us each (docstring of the function), without a growing history
            record = torch.get_device_module(device).memory._record_memory_history
            record("state", context="state", stacks="python")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Record how the run ended, and dump the memory of a full GPU before the Trainer clears it."""
        is_stop = isinstance(exception, (StopRequested, KeyboardInterrupt))
        words = f"failed: {type(exception).__name__}: {redact(str(exception).strip())[:_MOST_SHOWN]}".rstrip(": ")
        self._note(trainer, "stopped" if is_stop else words)
        device = trainer.strategy.root_device
        if not isinstance(exception, torch.OutOfMemoryError) or not is_accelerator(device):
            return
        path = Path(trainer.default_root_dir) / "debug" / f"rank-{trainer.global_rank}.memory.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.get_device_module(device).memory._dump_snapshot(str(path))
            exception.add_note(f"memory snapshot: {path}, for pytorch.org/memory_viz")
        except OSError as error:
            exception.add_note(f"the memory snapshot could not be written: {error}")

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Print the step from which the run resumes, and make its recipe that of the run folder."""
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            pending = Path(trainer.default_root_dir) / PENDING_RECIPE
            if pending.is_file():
                pending.replace(pending.with_name("recipe.yaml"))
            folder = getattr(trainer.strategy, "loaded_checkpoint", None)  # a third-party strategy has none
            where, root = f": {folder}" if folder else "", Path(trainer.default_root_dir)
            if folder and root.resolve() not in Path(folder).resolve().parents:
                where += f"; this run writes to {root}"
            if not Path(folder or "").name.startswith("."):  # not the temporary one of LearningRateFinder
                print(f"resumed from step {checkpoint['global_step']}{where}", file=sys.stderr)
            self._changed = tuple(_changes(trainer))
            for line in self._changed:
                print(f"  {line}", file=sys.stderr)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the audit; the strategy has already compared the plan with the live units."""
        strategy = trainer.strategy
        if not isinstance(strategy, EngineStrategy):
            return
        if trainer.is_global_zero:
            record, folder = {**strategy.audit, "versions": versions()}, Path(trainer.default_root_dir)
            with contextlib.suppress(OSError, ValueError):  # a run that resumes may have nothing left to train
                before = _audit_of(folder)
                record |= {key: before[key] for key in (*_OF_TRAINING, "starts") if key in before}
            write_json(folder / "audit.json", record)
            counts = f"{parameter_counts(record)} in {record['num_units']} units"
            text = f"{counts}, {record['num_params_on_this_rank']:,} on rank 0"
            show(units_table(record), text, *(f"replaced: {name}: {why}" for name, why in record["replaced"].items()))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record that the run has started; before, a resume may still be rejected."""
        self._has_audit = isinstance(trainer.strategy, EngineStrategy) and not trainer.fit_loop.done
        if self._has_audit and trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            record = {key: value for key, value in _audit_of(folder).items() if key not in _OF_TRAINING}
            start = {"step": trainer.global_step, "ranks": trainer.world_size, "changed": self._changed}
            record["starts"] = [*(record.get("starts", []) if trainer.global_step else []), start]
            write_json(folder / "audit.json", {**record, "status": "running, or killed", "started": _now()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Log the gradient norm; after the first step, write the dtypes that were compared with the declared ones."""
        strategy = trainer.strategy
        if not isinstance(strategy, EngineStrategy):
            return
        if strategy.precision_plugin.last_grad_norm is not None:
            pl_module.log("grad_norm", strategy.precision_plugin.last_grad_norm)
        if self._dtypes_written or strategy.contract.watching:
            return
        self._dtypes_written = True
        if trainer.is_global_zero:
            report = strategy.contract.report()
            write_json(Path(trainer.default_root_dir) / "dtypes.json", report)
            declared = ", ".join(f"{name} {dtype}" for name, dtype in report["declared"].items())
            show(f"Realized dtypes; precision {report['mode']} declares {declared}", dtypes_table(report))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add each rank's peak memory to the audit: the increase on a CPU, torch's allocations on CUDA."""
        if not isinstance(trainer.strategy, EngineStrategy):
            return
        device = trainer.strategy.root_device
        before = 0 if is_accelerator(device) else self._before_bytes
        ranks = gathered(peak_device_bytes(device) - before)
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            if self._has_audit or "measured_peak_bytes_per_rank" not in _audit_of(folder):
                add_to_audit(folder, {"measured_peak_bytes_per_rank": ranks})
            ended = why_ended(trainer)
            self._note(trainer, f"ended by {ended}" if ended else "finished")

    def _note(self, trainer: Trainer, status: str) -> None:
        if self._has_audit and trainer.is_global_zero:
            with contextlib.suppress(OSError, CheckpointError, ValueError):  # the disk may be full, or the file damaged
                add_to_audit(Path(trainer.default_root_dir), {"status": status, "ended": _now()})


def why_ended(trainer: Trainer) -> str:
    """What ended training before its last step: the time limit, or the name of a callback; else empty."""
    if trainer.global_step >= end_of(trainer):
        return ""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        remaining = callback.time_remaining() if isinstance(callback, Timer) else None
        if remaining is not None and remaining <= 0:
            return (
                f"the time limit of {timedelta(seconds=round(callback.time_elapsed() + remaining))} (trainer.max_time)"
            )
        has_stopped = trainer.should_stop and getattr(callback, "stopping_reason", None)  # the second is also restored
        if has_stopped and has_stopped is not EarlyStoppingReason.NOT_STOPPED:
            return f"{type(callback).__name__} on {callback.monitor}"
    return ""


class PredictionWriter(Callback):
    """Gathers the predictions of all ranks and writes ``predictions.jsonl`` to the run folder, one line per row.

    Outputs of ``predict_step`` in another format need a separate writer; a warning is logged.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._has_others = False

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *batch: Any) -> None:
        """Keep this rank's rows."""
        if isinstance(outputs, list) and all(isinstance(row, dict) and "row" in row for row in outputs):
            self._rows.extend(outputs)
        elif outputs is not None:
            self._has_others = True

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write all rows in order, on rank 0."""
        parts, self._rows = gathered(self._rows), []
        rows = sorted((row for part in parts for row in part), key=lambda row: row["row"])
        if trainer.is_global_zero and rows:
            path = Path(trainer.default_root_dir) / "predictions.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if trainer.is_global_zero and self._has_others:
            text = "%s.predict_step returns no rows with numbers, so predictions.jsonl does not contain them; use a "
            _log.warning(text + "BasePredictionWriter in trainer.callbacks", type(pl_module).__name__)


def gathered(own: Any) -> list[Any]:
    """The values of all ranks in rank order; collective."""
    return Ranks().run("gathering values of the ranks", lambda: own)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _changes(trainer: Trainer) -> list[str]:
    """Each value of the recipe that differs from the recipe of the loaded checkpoint."""
    strategy: Any = trainer.strategy
    if (folder := getattr(strategy, "loaded_checkpoint", None)) is None:
        return []
    before, now = folder / "recipe.yaml", strategy.checkpoint_files.get("recipe.yaml")
    if now is None or not before.is_file():  # an imported checkpoint has none
        return []
    return changed_values(*(yaml.safe_load(text) for text in (before.read_bytes(), now)))


def show(*parts: Any) -> None:
    """Print tables and plain text on standard error."""
    console = console_for(sys.stderr)
    for part in parts:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def add_to_audit(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Add values that are known only at the end of a run to its ``audit.json``, and return all of it."""
    record = {**_audit_of(folder), **values}
    write_json(folder / "audit.json", record)
    return record


def _audit_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    return found


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, with secrets as ``***``."""
    replace_bytes(path, f"{json.dumps(redact_values(content), indent=1)}\n".encode())
