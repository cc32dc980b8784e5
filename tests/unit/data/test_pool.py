"""Several processes: results in order, the first error in order, no process left, whatever happens."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.data import pool
from lit_fsdp.data.pool import in_order, usable_cores
from lit_fsdp.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers from the first task on, and none of them left."""
    monkeypatch.setattr(pool, "_ALONE_SECONDS", 0.0)
    yield
    assert multiprocessing.active_children() == []


def _uneven(number: int) -> tuple[int, int]:
    time.sleep(0.02 if number % 3 == 0 else 0)
    return number, os.getpid()


@pytest.mark.parametrize("processes", [1, 3])
def test_results_come_in_the_order_of_the_tasks(processes: int):
    found = list(in_order(range(40), _uneven, processes))
    assert [number for number, _ in found] == list(range(40))
    assert ({process for _, process in found} == {os.getpid()}) == (processes == 1)


def test_little_work_starts_no_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "_ALONE_SECONDS", 60.0)
    assert {process for _, process in in_order(range(4), _uneven, 3)} == {os.getpid()}


def test_tasks_are_read_a_few_ahead_only():
    tasks = itertools.count()
    for given, _ in zip(range(30), in_order(tasks, _uneven, 2), strict=False):
        assert given < int(repr(tasks)[6:-1]) <= given + 2 * pool._AHEAD + 1


def _fails(number: int) -> int:
    if number == 5:
        time.sleep(0.2)  # so that later ones have failed before
        raise DataError("five")
    if number > 5:
        raise (ConfigError("a", 1, "2", "write 2") if number % 2 else DataError("later"))
    return number


@pytest.mark.parametrize("processes", [1, 3])
def test_the_first_error_in_the_order_of_the_tasks(processes: int):
    results = in_order(range(20), _fails, processes)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="five"):
        next(results)


@pytest.mark.parametrize("processes", [1, 3])
def test_what_is_wrong_with_the_tasks_waits_for_its_turn(processes: int):
    def tasks() -> Iterator[int]:
        yield from range(4)
        raise DataError("no fifth")

    results = in_order(tasks(), _uneven, processes)
    assert [next(results)[0] for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(DataError, match="no fifth"):
        next(results)


def test_errors_keep_their_fields():
    with pytest.raises(ConfigError) as told:
        list(in_order([7], _fails, 2))
    assert (told.value.field, told.value.given, told.value.fix) == ("a", 1, "write 2")


def _broken(number: int) -> int:
    return [][number]


def test_a_mistake_of_our_own_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="in _broken"):
        list(in_order([1], _broken, 2))


def _dies(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_killed_worker_is_told():
    with pytest.raises(DataError, match=r"has ended \(exit code -9; .*\n  fix:     free memory, or set data.num_tok"):
        list(in_order(range(10), _dies, 2))


def _talks(number: int) -> int:
    logging.getLogger("lit_fsdp.data.encode").warning("row %d has no end", number)
    return number


def test_what_workers_say_is_said_once(caplog: pytest.LogCaptureFixture):
    assert list(in_order(range(10), _talks, 3)) == list(range(10))
    assert [record.getMessage() for record in caplog.records] == ["row 0 has no end"]


def _threads(number: int) -> str:
    return os.environ["TOKENIZERS_PARALLELISM"]


def test_workers_use_no_threads_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch):
    """They are gone after a fork, so that a tokenizer would wait for them for ever."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert set(in_order(range(3), _threads, 2)) == {"false"}
    assert "TOKENIZERS_PARALLELISM" not in os.environ


class _Encodes:
    def __init__(self, tokenizer: Any) -> None:
        self.backend = tokenizer.backend_tokenizer

    def __call__(self, number: int) -> list[int]:
        return [len(encoding.ids) for encoding in self.backend.encode_batch(["a" * number] * 200)]


def test_a_tokenizer_that_has_used_its_threads_before(small: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    encodes = _Encodes(small)
    encodes(3)
    assert list(in_order(range(1, 6), encodes, 2)) == [[number] * 200 for number in range(1, 6)]


def test_stopping_early_ends_the_workers():
    results = in_order(range(100), _uneven, 3)
    next(results)
    next(results)
    assert len(multiprocessing.active_children()) == 3
    results.close()  # type: ignore[attr-defined]


def test_a_quota_of_the_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    real = open
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr("builtins.open", lambda path, *args, **more: real(tmp_path / "cpu.max", *args, **more))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert usable_cores() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores() == 64


PARENT = """
import os, signal, sys, time
from lit_fsdp.data import pool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
pool._ALONE_SECONDS = 0.0
def slow(number):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(0.2)
    return number
def tasks():
    yield from range(10_000)
list(pool.in_order(tasks(), slow, 3))
"""


def _alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "stop", [lambda p: p.kill(), lambda p: os.killpg(p.pid, signal.SIGINT)], ids=["killed", "Ctrl-C"]
)
def test_no_worker_outlives_its_parent(stop: Callable[[subprocess.Popen[str]], None], root: Path):
    """However it ends: killed, or with Ctrl-C, which the terminal sends to all of them."""
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    workers: set[int] = set()
    while len(workers) < 3:
        workers.add(int(parent.stdout.readline()))
    stop(parent)
    _, said = parent.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(worker) for worker in workers)
    assert said.count("Traceback") <= 1
