"""A small network under lit_fsdp and under what others use, and the same words for saving and loading all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import IterableDataset

from lit_fsdp import Checkpoint, fsdp_strategy
from lit_fsdp.checkpoint.run_folder import checkpoints

ROWS, WIDTH = 8, 96
SUBJECTS = ("lit_fsdp", "ModelParallelStrategy", "FSDPStrategy subclass", "DCP, one folder", "DCP, fresh folders")
OURS, MODEL_PARALLEL, FSDP1, ONE_FOLDER, FRESH_FOLDERS = SUBJECTS


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one optimizer step, the same for every subject."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sum(dim=1, keepdim=True).sin()


class PeerNet(LightningModule):
    """A regression; 230 kB of parameters, three times as much in a checkpoint."""

    def __init__(self, is_model_parallel: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.is_model_parallel = is_model_parallel
        blocks = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(6))
        self.layers = torch.nn.ModuleList(blocks)
        self.dropout, self.head = torch.nn.Dropout(dropout), torch.nn.Linear(WIDTH, 1)

    def configure_model(self) -> None:
        """Shards by hand, which ModelParallelStrategy asks for."""
        if self.is_model_parallel:
            shard(self, self.device_mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dropout(x))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.last_loss = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def shard(net: PeerNet, mesh: Any) -> None:
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


class Steps(IterableDataset[Any]):
    """Rows from the Trainer's step on: no subject is blamed for its data loader here."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        step = self.trainer.global_step
        while True:
            yield batch_of(step)
            step += 1


class CpuFSDPStrategy(FSDPStrategy):
    """Lightning's strategy, with the device that torch asks for on a CPU; Lightning refuses exactly its own type."""

    def _setup_model(self, model: Any) -> Any:
        original = FullyShardedDataParallel.__init__

        def on_cpu(*args: Any, **kwargs: Any) -> None:
            original(*args, **{**kwargs, "device_id": torch.device("cpu")})

        with mock.patch.object(FullyShardedDataParallel, "__init__", on_cpu):
            return super()._setup_model(model)


def trainer_of(subject: str, run: str, callbacks: list[Callback], **options: Any) -> Trainer:
    """A Trainer as the subject's documentation suggests it."""
    timeout = timedelta(seconds=60)
    strategy: Any = {
        OURS: lambda: fsdp_strategy(precision="fp32", timeout_seconds=60),
        MODEL_PARALLEL: lambda: ModelParallelStrategy(timeout=timeout),
        FSDP1: lambda: CpuFSDPStrategy(state_dict_type="sharded", use_orig_params=True, timeout=timeout),
    }[subject]()
    return Trainer(
        strategy=strategy, callbacks=callbacks, accelerator="cpu", devices=dist_size(), logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        default_root_dir=run, max_epochs=-1, **options,
    )  # fmt: skip


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def saving(subject: str, run: str) -> Callback:
    """Every step, the last two kept; the link to the last one only moves when that one is written."""
    if subject == OURS:
        return Checkpoint(every_steps=1, keep_last=2)
    return ModelCheckpoint(
        dirpath=f"{run}/checkpoints", filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step",
        mode="max", save_last="link",
    )  # fmt: skip


class PlainDCP:
    """A loop as in torch's tutorials: fully_shard, AdamW, get_state_dict and dcp.save."""

    def __init__(self, subject: str, run: str) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        torch.manual_seed(3)
        self.net, self.run, self.is_fresh = PeerNet(), Path(run) / "checkpoints", subject == FRESH_FOLDERS
        shard(self.net, init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = self.net.configure_optimizers()
        self.step = 0

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def train(self) -> float:
        x, y = batch_of(self.step)
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def save(self) -> Path:
        place = self.run / f"step-{self.step:08d}" if self.is_fresh else self.run / "checkpoint"
        dcp.save(self.state(), checkpoint_id=place)
        if self.is_fresh and dist.get_rank() == 0:
            for old in sorted(self.run.glob("step-*"))[:-2]:
                shutil.rmtree(old)
        return place

    def newest(self) -> Path | None:
        found = sorted(path.parent for path in self.run.glob("*/.metadata"))
        return found[-1] if found else None

    def load(self, place: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=place)
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(state["step"])


class Subject:
    """Saving and loading by hand, the same words for everyone."""

    def __init__(self, subject: str, run: str, trainer: Trainer | None = None, loop: PlainDCP | None = None) -> None:
        self.subject, self.run, self.trainer, self.loop = subject, Path(run), trainer, loop

    def save(self, step: int) -> Path:
        if self.loop is not None:
            self.loop.step = step
            return self.loop.save()
        assert self.trainer is not None
        place = self.run / "checkpoints" / (f"step-{step:08d}" if self.subject == OURS else f"step={step}.ckpt")
        self.trainer.save_checkpoint(place)
        return place

    def load(self, place: Path) -> None:
        if self.loop is not None:
            self.loop.load(place)
            return
        strategy: Any = self.trainer.strategy  # type: ignore[union-attr]
        strategy.load_checkpoint(place)

    def newest(self, saved: list[Path]) -> Path | None:
        """What a resume would take: for the Trainers the last one that was saved without an error."""
        if self.loop is not None:
            return self.loop.newest()
        found = checkpoints(self.run)
        return (found[-1].path if found else None) if self.subject == OURS else saved[-1]

    def parameters(self) -> list[torch.nn.Parameter]:
        return list((self.loop.net if self.loop is not None else self.trainer.lightning_module).parameters())  # type: ignore[union-attr]

    def write(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def holds(self, value: float) -> bool:
        """Whether every rank has this value in every parameter."""
        local = [p.to_local() if hasattr(p, "to_local") else p for p in self.parameters()]
        mine = torch.tensor(float(all(bool((tensor == value).all()) for tensor in local)))
        dist.all_reduce(mine, op=dist.ReduceOp.MIN)
        return bool(mine)
