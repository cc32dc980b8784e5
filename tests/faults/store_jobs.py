"""Saves alone, without a training, that meet a failing disk; every rank calls the same function."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lit_fsdp.checkpoint import run_folder, store
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.verify import verify
from lit_fsdp.errors import CheckpointError
from tests.faults.tracing import Event, Tracer, hurt
from tests.runs import content


def tensors_of(step: int, rows: int = 64) -> dict[str, torch.Tensor]:
    """A sharded and a whole tensor that say which step they belong to; 4 KiB per row in all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = torch.full((rows, 1016), float(step))
    return {"model/sharded": distribute_tensor(sharded, mesh, [Shard(0)]), "model/whole": torch.full((rows, 8), step)}


def save(folder: Path, step: int, layout: Any, rows: int = 64) -> str:
    """The error of this rank, or nothing."""
    try:
        store.save_checkpoint(
            step_folder(folder, step),
            tensors_of(step, rows),
            {"step": step},
            {"global_step": step},
            layout,
            files={"hf/config.json": b"{}"},
            rank_state={"rank": dist.get_rank(), "noise": torch.full((8,), step)},
        )
    except CheckpointError as error:
        return str(error)
    return ""


def everyone(mine: Any) -> list[Any]:
    """``mine`` of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def on_first(act: Callable[[], Any]) -> None:
    """What only the first rank does, between two barriers."""
    dist.barrier()
    if dist.get_rank() == 0:
        act()
    dist.barrier()


class FailingDisk:
    """Records the changes of a save, and afterwards lets one of them fail."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[Event] = []
        self.target: tuple[Event, int] | None = None
        self.armed = self.hit = False
        Tracer(folder, self._react)

    def _react(self, event: Event) -> None:
        if not self.armed:
            return
        self.seen.append(event)
        if self.target == (event, self.seen.count(event)):
            self.hit = True
            hurt("raise", event)

    @contextlib.contextmanager
    def watching(self, target: tuple[Event, int] | None = None) -> Iterator[None]:
        """Record; the change ``target`` fails when it comes for the given time."""
        self.seen, self.target, self.armed, self.hit = [], target, True, False
        yield
        self.armed = False


def fail_at_every_change(folder: str, layout: str) -> list[dict[str, Any]]:
    """Every rank × every change it makes in a save: the errors of all ranks and what is left on the disk."""
    run, found = Path(folder), []
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step, old in ((1, "sharded"), (2, "full")):
        assert save(run, step, old) == ""
    disk = FailingDisk(run)
    with disk.watching():
        assert save(run, 3, layout) == ""
    changes = everyone([(event, disk.seen[: number + 1].count(event)) for number, event in enumerate(disk.seen)])
    if rank == 0:
        run_folder.remove(step_folder(run, 3))
        before = content(run / "checkpoints")
    for bad_rank, targets in enumerate(changes):
        for target in targets:
            dist.barrier()
            with disk.watching(target if rank == bad_rank else None):
                errors = everyone(save(run, 3, layout))
            is_hit = any(everyone(disk.hit))  # a folder that both would make is made by either
            if rank == 0:
                left = sorted(path.name for path in (run / "checkpoints").iterdir())
                _take_back(run, 3)
                intact = content(run / "checkpoints") == before
                entry = {"rank": bad_rank, "event": vars(target[0]), "hit": is_hit, "errors": errors}
                found.append({**entry, "left": left, "intact": intact})
    return found


def fill_the_disk(disk: str, temporary: str, layout: str) -> list[dict[str, Any]]:
    """Saves with room for 0, 5, … 130 % of the bytes of a checkpoint, and what they leave behind."""
    run, filler, found = Path(disk), Path(disk) / "filler", []
    tempfile.tempdir = None
    os.environ["TMPDIR"] = temporary
    dist.init_process_group("gloo")
    assert save(run, 1, layout, rows=256) == ""
    before = content(run / "checkpoints")
    size = sum(path.stat().st_size for path in step_folder(run, 1).rglob("*") if path.is_file())
    for percent in range(0, 135, 5):
        on_first(partial(leave_free, filler, percent * size // 100))
        errors = everyone(save(run, 2, layout, rows=256))
        if dist.get_rank() == 0:
            left = sorted(os.listdir(run / "checkpoints"))
            _take_back(run, 2)
            filler.unlink()
            entry = {"percent": percent, "errors": errors, "left": left, "temporary": os.listdir(temporary)}
            found.append({**entry, "intact": content(run / "checkpoints") == before})
    return found


def leave_free(filler: Path, num_bytes: int) -> None:
    """Make a file of all that its disk has beyond these bytes."""
    disk = os.statvfs(filler.parent)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - num_bytes)


def _take_back(run: Path, step: int) -> None:
    """Remove the checkpoint of ``step`` if it stands, and then it must be a whole one."""
    if step_folder(run, step).exists():
        assert verify(step_folder(run, step)) == {}
        run_folder.remove(step_folder(run, step))


def save_once(folder: str, step: int, layout: str) -> str:
    """One save; its error."""
    dist.init_process_group("gloo")
    return save(Path(folder), step, layout)
