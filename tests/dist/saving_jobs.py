"""Somebody else's module and what saves, loads and removes its checkpoints, on disks as full as a test says."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from torch.utils.data import DataLoader

from lit_fsdp import Checkpoint
from lit_fsdp.checkpoint import disk_space, run_folder
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.parallel.base import EngineStrategy
from tests.dist.foreign_jobs import ForeignNet, StepLosses, loader
from tests.dist.jobs import trainer_for, whole


class OwnMetric(ForeignNet):
    """Logs what each rank has been told at each validation, and nothing for ``None``; nobody averages it."""

    def __init__(self, told: list[float | None]) -> None:
        super().__init__()
        self.told = told

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.told[self.trainer.global_step - 1]
        if value is not None:
            self.log("val_loss", value)


def train_with_own_metrics(
    strategy: dict[str, Any], run: str, told: list[list[float | None]], lightnings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A step per value, each with a validation; what is there at the end, and which one is the best."""
    rank = int(os.environ["RANK"])
    steps = len(told[rank])
    saving = ModelCheckpoint(run, monitor="val_loss", **lightnings) if lightnings else Checkpoint(keep_last=1)
    ours = {"timeout_seconds": 20, "precision": "fp32", **strategy}
    trainer = trainer_for(ours, [saving], max_steps=steps, val_check_interval=1, default_root_dir=run)
    trainer.fit(OwnMetric(told[rank]), loader(range(steps)), loader([0]))
    place = Path(run) if lightnings else Path(run) / "checkpoints"
    return {
        "there": sorted(path.name for path in place.iterdir() if path.name.startswith("step")),
        "best": Path(saving.best_model_path).name,
        "score": None if saving.best_model_score is None else saving.best_model_score.item(),
    }


def train_and_save_again(
    strategy: dict[str, Any], run: str, lightnings: dict[str, Any], steps: int = 6, ckpt_path: str | None = None
) -> dict[str, Any]:
    """Lightning's callback after every second step; in the end the Trainer saves twice at one path."""
    losses, saving = StepLosses(), ModelCheckpoint(run, every_n_train_steps=2, **lightnings)
    ours = {"precision": "fp32", **strategy}
    trainer = trainer_for(ours, [losses, saving], max_steps=steps, default_root_dir=run)
    trainer.fit(ForeignNet(), loader(range(steps)), ckpt_path=ckpt_path)
    for _ in range(2):
        trainer.save_checkpoint(Path(run) / "by-hand.ckpt")
    there = {path.name: read_manifest(path).global_step for path in Path(run).glob("*.ckpt")}
    return {"losses": losses.values, "there": there, "hidden": [path.name for path in Path(run).glob(".*")]}


def train_with_schedule(
    strategy: dict[str, Any], run: str, schedule: dict[str, int], ckpt_path: str | None = None
) -> dict[str, Any]:
    """Three epochs of five micro-batches, of which each epoch accumulates as many as the schedule says."""
    seen: list[tuple[int, int, int]] = []

    def note(trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        seen.append((trainer.global_step, trainer.current_epoch, index))

    callbacks = [LambdaCallback(on_train_batch_start=note), Checkpoint(every_steps=1, keep_last=-1)]
    accumulation = GradientAccumulationScheduler({int(epoch): count for epoch, count in schedule.items()})
    options = {"max_epochs": 3, "default_root_dir": run}
    trainer = trainer_for({"precision": "fp32", **strategy}, [*callbacks, accumulation], **options)
    trainer.fit(ForeignNet(), loader(range(5)), ckpt_path=ckpt_path)
    return {"seen": seen, "steps": trainer.global_step}


class Described(ForeignNet):
    """Keeps its arguments, one of which no checkpoint can hold."""

    def __init__(self, width: int, layer: Any, options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Unwritable(ForeignNet):
    """Wants checkpoints to have a value that is no JSON, or a file that cannot be made."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, self.fail if name == "checkpoint_files" else lambda: {"made_by": object()})

    def fail(self) -> dict[str, bytes]:
        raise NotImplementedError("this tokenizer cannot be saved")


def said_at_the_start(
    strategy: dict[str, Any], run: str, saves: bool, unwritable: str | None = None
) -> tuple[str, int]:
    """What the start of a training says, and how many steps it takes."""
    module = Described(3, torch.nn.Linear, {"lr": 0.1, "make": functools.partial(print)})
    module = Unwritable(unwritable) if unwritable else module
    options = {"enable_checkpointing": saves, "max_steps": 1, "default_root_dir": run}
    trainer = trainer_for({"precision": "fp32", **strategy}, [], **options)
    try:
        trainer.fit(module, loader([0]))
    except (ConfigError, CheckpointError) as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


def train_where_nothing_can_be_removed(strategy: dict[str, Any], run: str, lightnings: bool) -> dict[str, Any]:
    """Old checkpoints that the file system does not let go; what is logged and what is there at the end."""
    saving: Any = Checkpoint(every_steps=1, keep_last=1)
    if lightnings:
        names = {"filename": "step-0000000{step}", "auto_insert_metric_name": False}
        saving = ModelCheckpoint(f"{run}/checkpoints", every_n_train_steps=1, **names)
    trainer = trainer_for({"precision": "fp32", **strategy}, [saving], max_steps=3, default_root_dir=run)
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lit_fsdp").addHandler(handler)

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy", "nfs0001")

    shutil.rmtree = busy  # type: ignore[assignment]
    trainer.fit(ForeignNet(), loader(range(3)))
    there = sorted(path.name for path in Path(run, "checkpoints").iterdir() if path.name.startswith("step"))
    return {"messages": messages, "there": there}


class Changed(ForeignNet):
    """Has a parameter that older checkpoints lack, and lacks one that they have."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict_loading = strict
        self.gate = torch.nn.Parameter(torch.full((4,), 0.5))
        del self.scale
        self.scale = torch.ones(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gate.sum() / 2


def train_changed(
    strategy: dict[str, Any] | None, run: str, ckpt_path: str | None = None, strict: bool = True, changed: bool = True
) -> Any:
    """Two steps of a module, or from its checkpoint on two of one that is not the same.

    ``start`` and ``steps`` are sums of all parameters and, by parameter, the optimizer's steps at the start.
    Without a strategy it is Lightning's own, DDP.
    """
    sums: dict[str, float] = {}
    steps: dict[str, float] = {}

    def note(trainer: Trainer, module: LightningModule) -> None:
        live: Any = trainer.strategy
        sums.update({name: float(whole(t).sum()) for name, t in live.lightning_module_state_dict().items()})
        if trainer.global_step and isinstance(live, EngineStrategy):  # to ask at step 0 would make a state
            state = live.optimizer_state(trainer.optimizers[0])["state"]
            steps.update({name: float(entry["step"]) for name, entry in state.items()})

    start, losses = LambdaCallback(on_train_start=note), StepLosses()
    saving = ModelCheckpoint(run, filename="{step}", every_n_train_steps=2)
    ours, last = None if strategy is None else {"precision": "fp32", **strategy}, 4 if ckpt_path else 2
    trainer = trainer_for(ours, [start, saving, losses], max_steps=last, default_root_dir=run)
    torch.manual_seed(13)
    module = Changed(strict) if ckpt_path and changed else ForeignNet()
    try:
        trainer.fit(module, loader(range(4)), ckpt_path=ckpt_path)
    except CheckpointError as error:
        return str(error)
    live: Any = trainer.strategy
    end = {name: float(whole(t).sum()) for name, t in live.lightning_module_state_dict().items()}
    return {"start": sums, "steps": steps, "end": end, "losses": losses.values}


class WideNet(LightningModule):
    """Large enough that a checkpoint is mostly tensors; one layer is frozen, one bias has rows to spare."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(513, 513) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.register_buffer("scale", torch.ones(7))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        loss = (batch * self.scale.mean()).square().mean()
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def fit_with_room(
    strategy: dict[str, Any],
    run: str,
    steps: int,
    free: list[int] | None = None,
    ckpt_path: str | None = None,
    unseen: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train; ``free`` are the free bytes at each look (the last one stays).

    Rank 1 does not see the ``unseen`` newest checkpoints, as on NFS with a stale cache.
    """
    torch.manual_seed(3)
    callback: Any = Checkpoint(**options)
    if free is not None:
        disk_space.free_bytes = lambda folder: free.pop(0) if len(free) > 1 else free[0]

    survey = run_folder.survey
    if unseen and os.environ["RANK"] == "1":
        run_folder.survey = lambda folder: survey(folder)[:-unseen]

    trainer = trainer_for(strategy, [callback], max_steps=steps, default_root_dir=run)
    rows = DataLoader([torch.ones(2, 513)] * steps, batch_size=None)
    error = None
    try:
        trainer.fit(WideNet(), rows, ckpt_path=ckpt_path)
    except (CheckpointError, ConfigError) as caught:
        error = str(caught)
    run_folder.survey = survey
    return {
        "error": error,
        "loaded": str(getattr(trainer.strategy, "loaded_checkpoint", None)),
        "taken": trainer.global_step,
        "estimate": callback._checkpoint_bytes,
        "there": [entry.step for entry in checkpoints(Path(run))],
    }
