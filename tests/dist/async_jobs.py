"""Runs that save in the background, and what is done to them; each function is called on every rank."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.staging import DefaultStager

from lit_fsdp import Checkpoint
from lit_fsdp.callbacks.stop import StopOnSignal, StopRequested
from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint import ranks
from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.errors import CheckpointError
from lit_fsdp.signals import SignalFlags
from tests.dist.foreign_jobs import ForeignNet, StepLosses, loader
from tests.dist.jobs import Losses, TinyData, TinyDataWithValidation, digest, module_for, trainer_for

STEPS = 9
EVERY = 3


class Watch(Callback):
    """What a test does to a run, and what it sees at each step."""

    def __init__(self, fault: str, rank: int) -> None:
        self.fault, self.rank = fault, rank
        self.flags = SignalFlags()
        self.visible: dict[int, list[int]] = {}
        self.pending: dict[int, bool] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Raise, or ask for the end, while the save of step 3 is being written."""
        if trainer.global_step == 4 and self.rank == 1 and self.fault == "raise":
            raise ValueError("a bad row")
        if trainer.global_step == 4 and self.rank == 1 and self.fault == "signal":
            self.flags.terminated = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        background: Any = trainer.strategy.background  # type: ignore[attr-defined]
        step = trainer.global_step
        self.visible[step] = [found.step for found in checkpoints(Path(trainer.default_root_dir))]
        self.pending[step] = background is not None and not all(save.done() for save in background._pending)
        (Path(trainer.default_root_dir) / f"rank-{self.rank}-ended-{step}").touch()  # the writer waits for it


def train_async(
    folder: str,
    run: str,
    strategy: dict[str, Any],
    async_save: bool | None,
    fault: str = "",
    keep_last: int = -1,
    more_steps: int | None = None,
    foreign: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Nine steps with a save every third one, of somebody else's module too; what was seen, and how it ended."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(7)
    losses, watch = StepLosses() if foreign else Losses(), Watch(fault, rank)
    saving = Checkpoint(every_steps=EVERY, keep_last=keep_last, async_save=async_save)
    callbacks: list[Callback] = [watch, StopOnSignal(watch.flags), losses, saving]
    steps = options.pop("steps", STEPS)
    trainer = trainer_for(strategy, callbacks, max_steps=steps, default_root_dir=run, **options)
    module = ForeignNet() if foreign else module_for(folder, warmup_steps=8)
    data = TinyDataWithValidation() if "val_check_interval" in options else TinyData()
    rows: dict[str, Any] = {"train_dataloaders": loader(range(STEPS))} if foreign else {"datamodule": data}
    found: dict[str, Any] = {"error": ""}
    _hurt(fault, rank, Path(run))
    said, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lit_fsdp").addHandler(handler)
    staged, stage = [0], DefaultStager.stage

    def counted(self: DefaultStager, state: Any) -> Any:
        staged.append(sum(tensor.untyped_storage().nbytes() for tensor in state.values()))
        return stage(self, state)

    DefaultStager.stage = counted  # type: ignore[assignment, method-assign]
    try:
        trainer.fit(module, **rows)
        if more_steps:
            trainer.fit_loop.epoch_loop.max_steps = more_steps  # a second fit of the same Trainer goes on
            trainer.fit(module, **rows)
    except (CheckpointError, ValueError, StopRequested, RuntimeError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return {
        **found,
        "said": said,
        "losses": losses.values,
        "digest": digest(module, trainer.optimizers[0]),
        "step": trainer.global_step,
        "visible": watch.visible,
        "pending": watch.pending,
        "staged": staged[-1],
        "last_model_path": Path(saving.last_model_path).name,
        "best_model_path": Path(saving.best_model_path).name,
    }


def _hurt(fault: str, rank: int, run: Path) -> None:
    """Let the end of a save wait for the step after it, or take long, or rank 1 fail to write its shard of step 6."""
    publish, write = disk.publish, disk.HashedFile.write

    def next_step_first(place: Path, folder: Path) -> None:
        step = int(folder.name.removeprefix("step-"))
        deadline = time.monotonic() + 60
        while step < STEPS and not all((run / f"rank-{r}-ended-{step + 1}").exists() for r in range(2)):
            assert time.monotonic() < deadline, f"no step {step + 1}"
            time.sleep(0.02)
        publish(place, folder)

    def slow(place: Path, folder: Path) -> None:
        time.sleep(0.5)
        publish(place, folder)

    def failing(self: disk.HashedFile, data: Any) -> int:
        if rank == 1 and self.path.name == "rank-00001.safetensors" and "00000006" in str(self.path):
            time.sleep(0.2)
            raise CheckpointError(f"{self.path}: No space left on device")
        return write(self, data)

    meet, make = dist.new_group, c10d.ProcessGroupGloo

    def apart(*args: Any, backend: str | None = None, **options: Any) -> Any:
        with mock.patch.object(c10d, "ProcessGroupGloo", not_found if backend == "gloo" else make):
            return meet(*args, backend=backend, **options)

    def not_found(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Unable to find address for: ib0")

    if fault == "apart":
        ranks.MEETING_SECONDS = 2.0
        dist.new_group = apart if rank == 1 else meet  # which rank 0 waits for
    if fault == "slow":
        disk.publish = next_step_first  # type: ignore[assignment]
    if fault in ("raise", "signal"):
        disk.publish = slow  # type: ignore[assignment]
    if fault == "full disk":
        disk.HashedFile.write = failing  # type: ignore[method-assign]
