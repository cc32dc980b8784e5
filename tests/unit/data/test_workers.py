"""Loader processes end with their parent; that signals to the whole job leave them alone is tried in tests/dist."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader

from lit_fsdp.data.workers import obey_parent_only


class Stuck(torch.utils.data.IterableDataset[int]):
    """Gives nothing and never returns."""

    def __init__(self, writer: int) -> None:
        self.writer = writer

    def __iter__(self) -> Iterator[int]:
        os.write(self.writer, str(os.getpid()).encode())
        while True:
            time.sleep(0.01)


def test_a_stuck_loader_ends_when_its_parent_dies() -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        loader: DataLoader[int] = DataLoader(
            Stuck(writer), batch_size=None, num_workers=1, worker_init_fn=obey_parent_only, generator=torch.Generator()
        )
        next(iter(loader))
    worker = int(os.read(reader, 20))
    os.close(writer)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    ended, _, _ = select.select([reader], [], [], 30)
    if not ended:
        os.kill(worker, signal.SIGKILL)
    assert ended  # the last writer is gone
    os.close(reader)
