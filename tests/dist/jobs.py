"""What ranks run: rows, a Trainer, a module, and what can be seen of a run; each function is called on every rank."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lit_fsdp import CausalLMModule, Checkpoint, EMAWeights, fsdp_strategy
from lit_fsdp.parallel.mesh import data_ranks
from tests.dist.reference import LEARNING_RATE, ROWS, global_batch

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@functools.cache
def here() -> tuple[int, int]:
    """Rank and ranks of this job; Lightning forgets WORLD_SIZE after a fit."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Rows:
    """Micro-batches of one rank: global batch g is cut into accumulation steps, each into ranks."""

    def __init__(self, rank: int, ranks: int, accumulate: int) -> None:
        self.rank, self.ranks, self.accumulate = rank, ranks, accumulate

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, micro = divmod(index, self.accumulate)
        size = ROWS // self.accumulate // self.ranks
        start = (micro * self.ranks + self.rank) * size
        return {name: tensor[start : start + size] for name, tensor in global_batch(step).items()}


class FromStep(IterableDataset[dict[str, torch.Tensor]]):
    """:class:`Rows` from the Trainer's step on, without an end, over epochs of ten global batches."""

    def __init__(self, rows: Rows, trainer: Trainer) -> None:
        self.rows, self.trainer = rows, trainer

    def __len__(self) -> int:
        return 10 * self.rows.accumulate

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from map(self.rows.__getitem__, itertools.count(self.trainer.global_step * self.rows.accumulate))


class TinyData(LightningDataModule):
    """Feeds :class:`Rows` to whatever Trainer it is given to."""

    rows: type[Rows] = Rows

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        ranks, rank = data_ranks(self.trainer)
        rows = self.rows(rank, ranks, self.trainer.accumulate_grad_batches)
        own = torch.Generator()  # a loader would draw from the global one at every epoch
        return DataLoader(FromStep(rows, self.trainer), batch_size=None, generator=own)


class TinyDataWithValidation(TinyData):
    """Adds one validation batch, the same on every rank."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader([global_batch(500)], batch_size=None, generator=torch.Generator())


class Losses(Callback):
    """Collects the logged loss after every optimizer step, and what the optimizer is told before it."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.groups: list[list[dict[str, Any]]] = []
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.groups.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.step < trainer.global_step:
            self.step = trainer.global_step
            self.values.append(float(trainer.callback_metrics["train_loss"]))


def trainer_for(strategy: Any, callbacks: Sequence[Callback], **options: Any) -> Trainer:
    """A quiet Trainer on as many CPU ranks as this job has; a mapping is the factory's arguments, None DDP."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": here()[1],
        "strategy": fsdp_strategy(**strategy) if isinstance(strategy, dict) else strategy or "ddp",
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "max_epochs": -1,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **options})


def module_for(folder: str, model: dict[str, Any] | None = None, **optim: Any) -> CausalLMModule:
    """Our module on a model folder with the reference's optimizer."""
    options = {"lr": LEARNING_RATE, "schedule": "constant", "weight_decay": 0.1, **optim}
    return CausalLMModule(name=folder, optim=options, **(model or {}))


def local(tensor: Any) -> torch.Tensor:
    """What of it is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Any) -> torch.Tensor:
    """All of it, on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(module: LightningModule, optimizer: Any) -> str:
    """A hash over all local parameters and optimizer tensors of this rank, bit for bit."""
    found = hashlib.sha256()
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            for tensor in (param, *(v for v in optimizer.state.get(param, {}).values() if torch.is_tensor(v))):
                mine = local(tensor).detach().contiguous()
                found.update(mine.view(torch.uint8).numpy().tobytes() if mine.dim() else b"")
    return found.hexdigest()


def fit(
    module: LightningModule,
    strategy: dict[str, Any],
    callbacks: Sequence[Callback] = (),
    data: LightningDataModule | None = None,
    ckpt_path: str | None = None,
    steps: int = 10,
    seed: int = 0,
    **options: Any,
) -> tuple[Trainer, dict[str, Any]]:
    """A run; its losses, audit, dtypes, learning rates, and a hash of its state at the end."""
    torch.manual_seed(seed)
    losses = Losses()
    trainer = trainer_for(strategy, [losses, *callbacks], max_steps=steps, **options)
    trainer.fit(module, datamodule=data or TinyData(), ckpt_path=ckpt_path)
    live: Any = trainer.strategy
    return trainer, {
        "losses": losses.values,
        "groups": losses.groups,
        "audit": live.audit,
        "dtypes": live.contract.report(),
        "local_numel": sum(local(p).numel() for p in module.parameters()),
        "digest": digest(module, trainer.optimizers[0]),
    }


def train(
    folder: str,
    strategy: dict[str, Any],
    run: str | None = None,
    every: int | None = None,
    model: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A run; with ``run`` it saves there, and keeps its whole live weights beside the checkpoints as ``live.pt``.

    Their averages are ``averages.pt``.
    """
    ema = EMAWeights(decay=0.5)
    saving = [ema, Checkpoint(every_steps=every, keep_last=-1)] if run else []
    data = TinyDataWithValidation() if "val_check_interval" in options else None
    module = module_for(folder, model, **(optim or {}))
    trainer, found = fit(module, strategy, saving, data, default_root_dir=run, **options)
    if run:
        keep_whole(trainer, f"{run}/live.pt", trainer.strategy.lightning_module_state_dict())
        keep_whole(trainer, f"{run}/averages.pt", ema.state_dict()["weights"])
    return found


def keep_whole(trainer: Trainer, path: str, tensors: dict[str, Any]) -> None:
    """Save them all under their names in the transformers model."""
    found = {name.removeprefix("model."): whole(tensor) for name, tensor in tensors.items()}
    if trainer.is_global_zero:
        torch.save(found, path)


def program(words: list[str], cwd: str) -> None:
    """``lit-fsdp`` as one of several ranks that somebody else started, as torchrun would."""
    from lit_fsdp.__main__ import main

    _go_to(cwd)
    raise SystemExit(main(words))


def script(words: list[str], cwd: str) -> None:
    """Somebody's own program, likewise."""
    _go_to(cwd)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _go_to(folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m` has it
