"""Somebody else's module and what saves, loads and removes its checkpoints, on disks as full as a test says."""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
)
from torch.utils.data import DataLoader

from lit_fsdp import Checkpoint, EMAWeights
from lit_fsdp.callbacks.progress import RunProgress
from lit_fsdp.callbacks.stop import StopOnSignal, StopRequested
from lit_fsdp.checkpoint import disk_space, run_folder
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.signals import SignalFlags
from tests.dist.foreign_jobs import ForeignNet, ForeignNetWithValidation, StepLosses, loader
from tests.dist.jobs import here, local, trainer_for, whole


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


class Numbered(ForeignNet):
    """Trains on 48 numbered rows of a loader without a sampler, and notes which by epoch and step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def train_dataloader(self) -> Any:
        return DataLoader(range(48), batch_size=4, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(range(2), batch_size=1)  # type: ignore[arg-type]

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", batch.float().mean(), sync_dist=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += [[self.trainer.current_epoch, self.trainer.global_step, int(row)] for row in batch]
        return self(batch.float()[:, None].expand(-1, 12)).square().mean()


def see_rows(run: str, epochs: int, ckpt_path: str | None = None) -> dict[str, Any]:
    """The rows that this rank has seen, and the last step of the progress lines."""
    module, progress = Numbered(), RunProgress()
    callbacks = [Checkpoint(every_steps=4, keep_last=-1), progress]
    options: dict[str, Any] = {"max_epochs": epochs, "default_root_dir": run, "use_distributed_sampler": True}
    trainer = trainer_for({"engine": "fsdp2"}, callbacks, enable_progress_bar=True, **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    return {"seen": module.seen, "steps": trainer.global_step, "total": progress._total if here()[0] == 0 else None}


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


def warnings_said() -> list[str]:
    """What is said from now on."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lit_fsdp").addHandler(handler)
    return messages


def train_where_nothing_can_be_removed(strategy: dict[str, Any], run: str, lightnings: bool) -> dict[str, Any]:
    """Old checkpoints that the file system does not let go; what is logged and what is there at the end."""
    saving: Any = Checkpoint(every_steps=1, keep_last=1)
    if lightnings:
        names = {"filename": "step-0000000{step}", "auto_insert_metric_name": False}
        saving = ModelCheckpoint(f"{run}/checkpoints", every_n_train_steps=1, **names)
    trainer = trainer_for({"precision": "fp32", **strategy}, [saving], max_steps=3, default_root_dir=run)
    messages = warnings_said()

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


class Keeper(Callback):
    """Somebody's callback and the state it keeps: what ``kind`` makes of this rank and its shards after each step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.kept: Any = None
        self.given: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        live: Any = trainer.strategy
        rank, tensors = trainer.global_rank, live.lightning_module_state_dict()
        numbers = {"seen": {str(rank): rank + 0.5, "step": trainer.global_step}, "last": [rank, None][rank % 2]}
        numbers["best"] = torch.tensor(rank + 0.5)  # as EarlyStopping keeps it
        kinds: dict[str, Callable[[], Any]] = {
            "shards": lambda: [local(param).detach().clone() for param in pl_module.parameters()],
            "sharded": lambda: {"all": [None, ({name: tensor.clone() * 2 for name, tensor in tensors.items()},)]},
            "numbers": lambda: numbers,
            "odd": lambda: {
                "a": torch.arange(rank + 1),
                "no": torch.zeros(0, 3),
                "b": (torch.ones(2, rank), {7: rank}),
            },
            "first": lambda: None if rank else {"words": ["a", torch.ones(2)]},
            "lambda": lambda: {"x": [print]},
            "one rank's": lambda: {"x": None if rank else next(iter(tensors.values()))},
        }
        found = kinds[self.kind]()
        self.kept = {} if found is None else {"it": found}

    on_train_batch_end = on_train_start

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict


class Keeping(ForeignNet):
    """Saves the same beside its weights."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self.keeper = keeper

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"of_module": self.keeper.kept}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.given = checkpoint["mine"]["of_module"]


def alike(one: Any, other: Any) -> bool:
    """Of the same types, the same bits, and split in the same way."""
    if isinstance(one, torch.Tensor):
        same = [(t.shape, t.dtype, getattr(t, "placements", None)) for t in (one, other)]
        return same[0] == same[1] and torch.equal(local(one), local(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def plain(value: Any) -> Any:
    """As JSON, with tensors whole."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return (
        [plain(item) for item in value]
        if isinstance(value, (list, tuple))
        else whole(value).tolist()
        if torch.is_tensor(value)
        else value
    )


def keep(strategy: dict[str, Any], run: str, kind: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """Two steps and a resume, or the resume of another job's: what was kept and is given back, what is said."""
    messages, before = warnings_said(), None
    for start in (ckpt_path,) if ckpt_path else (None, f"{run}/step=2.ckpt"):
        torch.manual_seed(3)
        keeper = Keeper(kind)
        module, saving = Keeping(keeper), ModelCheckpoint(run, filename="{step}", every_n_train_steps=2)
        options = {"max_steps": 3 if start else 2, "default_root_dir": run}
        trainer = trainer_for({"precision": "fp32", **strategy}, [keeper, saving], **options)
        try:
            trainer.fit(module, loader(range(4)), ckpt_path=start)
        except CheckpointError as error:
            return {"error": str(error), "steps": trainer.global_step}
        before = before or keeper.kept
    same = alike(before, keeper.given) and alike(before, module.given)
    return {"same": same, "given": plain(keeper.given), "said": messages}


def average(
    strategy: dict[str, Any],
    run: str,
    ckpt_path: str | None = None,
    stops: bool = False,
    steps: int = 8,
    lightnings: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Two epochs of four steps with a validation after each second step; ``stops``: by a signal in step 4.

    On rank 1 the module starts from other weights; what stops and saves comes before the averages.
    """
    torch.manual_seed(11 + int(os.environ["RANK"]))
    flags, found = SignalFlags(), {"val": [], "error": "", "said": warnings_said()}  # type: ignore[var-annotated]

    def stop(trainer: Trainer, *_: Any) -> None:
        flags.terminated = stops and trainer.global_step == 3 and trainer.is_global_zero

    def note(trainer: Trainer, *_: Any) -> None:
        found["val"].append(float(trainer.callback_metrics["val_loss"]))

    watch = LambdaCallback(on_train_batch_start=stop, on_validation_end=note)
    ema: Any = EMAWeightAveraging(decay=0.5, **options) if lightnings else EMAWeights(decay=0.5, **options)
    callbacks: list[Any] = [watch, StopOnSignal(flags), ema, Checkpoint(every_steps=4, keep_last=-1)]
    if lightnings:
        callbacks.sort(key=lambda one: one is not ema)
    limits = {"max_steps": steps, "max_epochs": 2, "default_root_dir": run, "val_check_interval": 2}
    trainer = trainer_for({"precision": "fp32", **strategy}, callbacks, **limits)
    module = ForeignNetWithValidation()
    try:
        trainer.fit(module, loader(range(4)), loader((100, 101)), ckpt_path=ckpt_path)
    except (StopRequested, CheckpointError, ConfigError) as error:
        found["error"] = str(error)
    if found["error"] and not trainer.global_step:
        return found
    live: Any = trainer.strategy
    kept = ema.state_dict()["weights"] if not lightnings else {}
    weights = {name: local(param).flatten().tolist() for name, param in module.named_parameters()}
    return {**found, "averages": plain(kept), "live": plain(live.lightning_module_state_dict()), "own": weights}


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
