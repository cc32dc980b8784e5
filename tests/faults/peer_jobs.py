"""What peers.py runs on forked ranks, for every subject alike; every rank calls the same function."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.dist.jobs import digest
from tests.faults.peer_subjects import (
    FRESH_FOLDERS,
    MODEL_PARALLEL,
    ONE_FOLDER,
    OURS,
    PeerNet,
    PlainDCP,
    Steps,
    Subject,
    saving,
    trainer_of,
)


class Log(Callback):
    """Says where an attempt begins and what every step's loss was, before it is saved."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        say(self.path, f"start {trainer.global_step}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        say(self.path, f"{trainer.global_step} {float(pl_module.last_loss)!r}")


def say(path: str, line: str) -> None:
    if dist.get_rank() == 0:
        with open(path, "a") as file:
            file.write(line + "\n")


def peer_train(subject: str, run: str, log: str, steps: int = 100_000, save: bool = True) -> str:
    """Train from the newest checkpoint on, saving every step."""
    if subject in (ONE_FOLDER, FRESH_FOLDERS):
        loop = PlainDCP(subject, run)
        newest = loop.newest()
        if newest is not None:
            loop.load(newest)
        say(log, f"start {loop.step}")
        while loop.step < steps:
            say(log, f"{loop.step + 1} {loop.train()!r}")
            if save:
                loop.save()
        return digest(loop.net, loop.optimizer)
    torch.manual_seed(3)
    callbacks = [Log(log), saving(subject, run)] if save else [Log(log)]
    trainer = trainer_of(subject, run, callbacks, max_steps=steps, enable_checkpointing=save)
    net = PeerNet(is_model_parallel=subject == MODEL_PARALLEL)
    is_there = bool(checkpoints(run)) if subject == OURS else os.path.lexists(f"{run}/checkpoints/last.ckpt")
    trainer.fit(net, DataLoader(Steps(trainer), batch_size=None), ckpt_path="last" if is_there else None)
    return ""


class AtEnd(Callback):
    """Runs something with everything still in place."""

    def __init__(self, act: Callable[[Trainer, Any], None]) -> None:
        self.act = act

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.act(trainer, pl_module)


def with_subject(subject: str, run: str, act: Callable[[Subject], None]) -> None:
    """Take one step, then act."""
    if subject in (ONE_FOLDER, FRESH_FOLDERS):
        loop = PlainDCP(subject, run)
        loop.train()
        act(Subject(subject, run, loop=loop))
        return
    end = AtEnd(lambda trainer, module: act(Subject(subject, run, trainer=trainer)))
    trainer = trainer_of(subject, run, [end], max_steps=1, enable_checkpointing=False)
    trainer.fit(PeerNet(is_model_parallel=subject == MODEL_PARALLEL), DataLoader(Steps(trainer), batch_size=None))


def failed(act: Callable[[], Any]) -> bool:
    """Whether it raised on any rank."""
    bad = torch.zeros(())
    try:
        act()
    except BaseException:
        bad += 1
    dist.all_reduce(bad)
    return bool(bad)


def peer_full_disk(subject: str, disk: str) -> list[dict[str, Any]]:
    """With room for 0, 5, … 95 %: was there an error, is the newest that is found whole, was anything left behind."""
    found: list[dict[str, Any]] = []

    def act(live: Subject) -> None:
        live.write(1.0)
        saved = [live.save(1)]
        size = sum(path.stat().st_size for path in saved[0].rglob("*") if path.is_file())
        for percent in range(0, 100, 5):
            before = sorted(str(path) for path in live.run.rglob("*"))
            with filled(live.run, percent * size // 100):
                live.write(2.0)
                is_error = failed(lambda: live.save(2))
            left = sorted(str(path) for path in live.run.rglob("*")) != before
            newest = live.newest(saved)
            is_whole = newest is not None and not failed(functools.partial(live.load, newest)) and live.holds(1.0)
            found.append({"error": is_error, "whole": is_whole, "left": left})
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(live.run / "checkpoints")
            dist.barrier()
            live.write(1.0)
            saved[:] = [live.save(1)]

    with_subject(subject, disk, act)
    return found


@contextlib.contextmanager
def filled(disk: Path, free: int) -> Iterator[None]:
    """A file takes all room on ``disk`` but ``free`` bytes."""
    filler = disk / "filler"
    dist.barrier()
    if dist.get_rank() == 0:
        now = os.statvfs(disk)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, now.f_bavail * now.f_frsize - free)
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        filler.unlink()
    dist.barrier()


def peer_damage(subject: str, run: str, trials: int) -> list[bool]:
    """One flipped bit somewhere in the checkpoint: whether loading it says so."""
    found: list[bool] = []

    def act(live: Subject) -> None:
        live.write(1.0)
        place = live.save(1)
        files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
        weights = [path.stat().st_size for path in files]
        rng = random.Random(11)
        for _ in range(trials):
            path = rng.choices(files, weights)[0]
            sound = path.read_bytes()
            data = bytearray(sound)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            dist.barrier()
            if dist.get_rank() == 0:
                path.write_bytes(data)
            dist.barrier()
            found.append(failed(lambda: live.load(place)))
            if dist.get_rank() == 0:
                path.write_bytes(sound)
            dist.barrier()

    with_subject(subject, run, act)
    return found
