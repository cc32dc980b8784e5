"""Loader processes live through signals to the whole job, and end when their parent says so."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from lit_fsdp.data.workers import obey_parent_only, signals_held

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that this process got, by a pipe that forked loaders inherit, as the command line has one."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    signal.set_wakeup_fd(writer)
    found: list[int] = []
    yield found
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)
    os.write(writer, b"\0")
    found.extend(set(os.read(reader, 64)) - {signal.SIGCHLD})
    os.close(reader)
    os.close(writer)
    assert found == [0]


def test_only_the_parent_ends_a_loader(heard: list[int]) -> None:
    loader: DataLoader[int] = DataLoader(
        range(20), num_workers=2, worker_init_fn=obey_parent_only, generator=torch.Generator()
    )
    with signals_held():
        batches = iter(loader)
    next(batches)
    workers = batches._workers  # type: ignore[attr-defined]
    grandchild = os.fork()
    if grandchild == 0:  # somebody who is not the parent
        signal.set_wakeup_fd(-1)
        for worker in workers:
            for number in SIGNALS:
                os.kill(worker.pid, number)
        os._exit(0)
    os.waitpid(grandchild, 0)
    time.sleep(0.2)
    assert all(worker.is_alive() for worker in workers)
    assert len(list(batches)) == 19
    more = iter(loader)
    next(more)
    last = more._workers[0]  # type: ignore[attr-defined]
    last.terminate()
    last.join(100)
    assert last.exitcode == 0


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


def test_nothing_is_blocked_afterwards() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals_held():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= {*SIGNALS}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
