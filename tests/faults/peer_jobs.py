"""What peers.py runs on forked ranks: a small network under lit_fsdp and under what others use, harmed alike."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

from lit_fsdp import Checkpoint, fsdp_strategy
from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.dist.import_jobs import CPUFSDPStrategy
from tests.dist.jobs import local, trainer_for
from tests.faults.store_jobs import leave_free, on_first

ROWS, WIDTH = 8, 96
SUBJECTS = ("lit_fsdp", "ModelParallelStrategy", "FSDPStrategy subclass", "DCP, fresh folders")
OURS, MODEL_PARALLEL, FSDP1, PLAIN_DCP = SUBJECTS
TIMEOUT = timedelta(seconds=60)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one optimizer step, the same for every subject."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sum(dim=1, keepdim=True).sin()


class PeerNet(LightningModule):
    """A regression; 230 kB of parameters, three times as much in a checkpoint."""

    def __init__(self, shards_itself: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.shards_itself = shards_itself
        blocks = (torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(6))
        self.layers, self.head = torch.nn.ModuleList(blocks), torch.nn.Linear(WIDTH, 1)

    def configure_model(self) -> None:
        """ModelParallelStrategy asks for it."""
        if self.shards_itself:
            shard(self, self.device_mesh["data_parallel"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

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


class PlainDCP:
    """A loop as in torch's tutorials: fully_shard, AdamW, get_state_dict and dcp.save."""

    def __init__(self, run: str) -> None:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self.net, self.run = PeerNet(False), Path(run)
        shard(self.net, init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer, self.step = self.net.configure_optimizers(), 0

    def train(self) -> float:
        """One step; its loss."""
        loss = self.net.training_step(batch_of(self.step), 0)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def save(self, step: int) -> Path:
        """Into a folder for each step, of which two are kept."""
        self.step, place = step, self.run / "checkpoints" / f"step-{step:08d}"
        dcp.save(self._state(), checkpoint_id=place)
        if dist.get_rank() == 0:
            for old in sorted(place.parent.glob("step-*"))[:-2]:
                shutil.rmtree(old)
        return place

    def newest(self) -> Path | None:
        """What a resume would take."""
        return max((path.parent for path in self.run.glob("checkpoints/*/.metadata")), default=None)

    def load(self, place: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=place)
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = int(state["step"])


class Trained:
    """A Trainer in its last hook, in the same words."""

    def __init__(self, subject: str, run: str, trainer: Trainer, net: LightningModule) -> None:
        self.subject, self.run, self.trainer, self.net = subject, Path(run), trainer, net
        self.saved: list[Path] = []

    def save(self, step: int) -> Path:
        place = self.run / "checkpoints" / (f"step-{step:08d}" if self.subject == OURS else f"step={step}.ckpt")
        self.trainer.save_checkpoint(place)
        self.saved.append(place)
        return place

    def newest(self) -> Path | None:
        """Lightning would take the last one that was saved without an error."""
        if self.subject != OURS:
            return self.saved[-1]
        return max((entry.path for entry in checkpoints(self.run)), default=None)

    def load(self, place: Path) -> None:
        self.trainer.strategy.load_checkpoint(place)


def trainer_of(subject: str, run: str, callbacks: list[Callback], **options: Any) -> Trainer:
    """A Trainer as the subject's documentation suggests it."""
    strategies: dict[str, Callable[[], Any]] = {
        OURS: lambda: fsdp_strategy(precision="fp32", timeout_seconds=TIMEOUT.total_seconds()),
        MODEL_PARALLEL: lambda: ModelParallelStrategy(timeout=TIMEOUT),
        FSDP1: lambda: CPUFSDPStrategy(state_dict_type="sharded", use_orig_params=True, timeout=TIMEOUT),
    }
    return trainer_for(strategies[subject](), callbacks, default_root_dir=run, **options)


def saving(subject: str, run: str) -> Callback:
    """Every step, the last two kept; the link to the last one only moves when that one is written."""
    if subject == OURS:
        return Checkpoint(every_steps=1, keep_last=2)
    lightnings = {"dirpath": f"{run}/checkpoints", "filename": "{step}", "monitor": "step", "mode": "max"}
    return ModelCheckpoint(every_n_train_steps=1, save_top_k=2, save_last="link", **lightnings)  # type: ignore[arg-type]


def peer_train(subject: str, run: str, log: str, steps: int = 100_000, saves: bool = True) -> None:
    """Train from the newest checkpoint on, saving every step; ``log`` has the start and, before its save, each loss."""

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            with open(log, "a") as file:
                file.write(line + "\n")

    def begun(trainer: Trainer, net: LightningModule) -> None:
        say(f"start {trainer.global_step}")

    def done(trainer: Trainer, net: LightningModule, *rest: Any) -> None:
        say(f"{trainer.global_step} {float(net.last_loss)!r}")

    seen = LambdaCallback(on_train_start=begun, on_train_batch_end=done)
    if subject != PLAIN_DCP:
        trainer = trainer_of(subject, run, [seen, *([saving(subject, run)] if saves else [])], max_steps=steps)
        is_there = bool(checkpoints(run)) if subject == OURS else os.path.lexists(f"{run}/checkpoints/last.ckpt")
        rows = DataLoader(Steps(trainer), batch_size=None)
        trainer.fit(PeerNet(subject == MODEL_PARALLEL), rows, ckpt_path="last" if is_there else None)
        return
    loop = PlainDCP(run)
    newest = loop.newest()
    if newest is not None:
        loop.load(newest)
    say(f"start {loop.step}")
    while loop.step < steps:
        say(f"{loop.step + 1} {loop.train()!r}")
        if saves:
            loop.save(loop.step)


def with_subject(subject: str, run: str, act: Callable[[Any], None]) -> None:
    """Take one step, then act."""
    if subject == PLAIN_DCP:
        loop = PlainDCP(run)
        loop.train()
        act(loop)
    else:
        end = LambdaCallback(on_train_end=lambda trainer, net: act(Trained(subject, run, trainer, net)))
        trainer = trainer_of(subject, run, [end], max_steps=1)
        trainer.fit(PeerNet(subject == MODEL_PARALLEL), DataLoader(Steps(trainer), batch_size=None))


def failed(act: Callable[..., Any], *arguments: Any) -> bool:
    """Whether it raised on any rank."""
    bad = torch.zeros(())
    try:
        act(*arguments)
    except BaseException:
        bad += 1
    dist.all_reduce(bad)
    return bool(bad)


def write(net: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)


def holds(net: torch.nn.Module, value: float) -> bool:
    """Whether every rank has this value in every parameter."""
    mine = torch.tensor(float(all(bool((local(p) == value).all()) for p in net.parameters())))
    dist.all_reduce(mine, op=dist.ReduceOp.MIN)
    return bool(mine)


def peer_full_disk(subject: str, run: str) -> list[dict[str, bool]]:
    """With room for 0, 5, … 95 %: was there an error, is the newest that is found whole, was anything left behind."""
    found: list[dict[str, bool]] = []
    filler = Path(run) / "filler"

    def act(live: Any) -> None:
        for percent in range(0, 100, 5):
            write(live.net, 1.0)
            size = sum(path.stat().st_size for path in live.save(1).rglob("*") if path.is_file())
            before = sorted(map(str, live.run.rglob("*")))
            write(live.net, 2.0)
            on_first(partial(leave_free, filler, percent * size // 100))
            is_error = failed(live.save, 2)
            on_first(filler.unlink)
            left = sorted(map(str, live.run.rglob("*"))) != before
            newest = live.newest()
            is_whole = newest is not None and not failed(live.load, newest) and holds(live.net, 1.0)
            found.append({"error": is_error, "whole": is_whole, "left": left})
            on_first(lambda: shutil.rmtree(live.run / "checkpoints"))

    with_subject(subject, run, act)
    return found


def peer_damage(subject: str, run: str, trials: int) -> list[bool]:
    """One flipped bit somewhere in the checkpoint: whether loading it says so."""
    found: list[bool] = []

    def act(live: Any) -> None:
        place = live.save(1)
        files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
        weights, rng = [path.stat().st_size for path in files], random.Random(11)
        for _ in range(trials):
            path = rng.choices(files, weights)[0]
            sound = path.read_bytes()
            data = bytearray(sound)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            on_first(partial(path.write_bytes, data))
            found.append(failed(live.load, place))
            on_first(partial(path.write_bytes, sound))

    with_subject(subject, run, act)
    return found
