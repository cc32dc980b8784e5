"""Work for several processes, its results in order.

What comes out does not depend on how many processes there are. The first tasks are done here, so that little work
starts no process. Workers are forked, which costs nothing and inherits what is at hand, a tokenizer say; they run no
threads of tokenizers, whose pool does not survive a fork. A worker ends when its parent does, however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

from lit_fsdp.data.workers import obey_parent_only, signals_held
from lit_fsdp.errors import ConfigError, DataError

Task = TypeVar("Task")
Result = TypeVar("Result")

_ALONE_SECONDS = 0.5
_AHEAD = 3
"""Tasks per worker that are on their way; with their size it bounds the memory."""
_THREADS = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True)
class _Answer:
    value: Any
    """The result, or the error that came in its place."""
    said: tuple[tuple[str, int, str, Any], ...] = ()
    """What was logged on the way: logger, level, message and its arguments."""


def usable_cores() -> int:
    """Cores that this process may run on, fewer where the container has a smaller quota of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def in_order(tasks: Iterable[Task], do: Callable[[Task], Result], num_processes: int) -> Iterator[Result]:
    """What ``do`` makes of every task, in the order of the tasks.

    Args:
        tasks: Read a few ahead, so that memory stays bounded; may raise DataError.
        do: Called in any process; what it logs there is said here, each message once.
        num_processes: Largest number of processes. Work of less than half a second is done by this one alone.

    Raises:
        DataError: The first one in the order of the tasks, or a process has died.
        ConfigError: The first one in the order of the tasks.
    """
    remaining = iter(tasks)
    start = time.monotonic()
    alone = num_processes == 1 or multiprocessing.current_process().daemon  # which may have no children
    while alone or time.monotonic() - start < _ALONE_SECONDS:
        for task in remaining:
            yield do(task)
            break
        else:
            return
    said: set[str] = set()
    for answer in _by_workers(remaining, do, num_processes):
        for logger, level, message, values in answer.said:
            if message not in said:
                said.add(message)
                logging.getLogger(logger).log(level, message, *values)
        if isinstance(answer.value, Exception):
            raise answer.value
        yield answer.value


def _by_workers(tasks: Iterator[Task], do: Callable[[Task], Result], num_processes: int) -> Iterator[_Answer]:
    with _workers(do, num_processes) as idle:
        most = _AHEAD * len(idle)
        busy: dict[Any, int] = {}
        done: dict[int, _Answer] = {}
        sent = given = 0
        more = True
        while more or given < sent:
            while idle and more and sent < given + most:
                try:
                    task = next(tasks, None)
                except DataError as error:  # its turn comes after the tasks before it
                    done[sent], sent, more = _Answer(error), sent + 1, False
                    break
                if task is None:
                    more = False
                    break
                worker = idle.pop()
                worker.send(task)
                busy[worker] = sent
                sent += 1
            if given in done:
                yield done.pop(given)
                given += 1
            elif busy:
                for ready in cast("list[_Worker]", wait(list(busy))):
                    done[busy.pop(ready)] = ready.receive()
                    idle.append(ready)


class _Worker:
    """A process that does one task at a time; ``others`` are this process's ends of the pipes to earlier ones."""

    def __init__(self, context: Any, do: Callable[[Any], Any], others: list[Connection]) -> None:
        self.connection, theirs = context.Pipe()
        inherited = [*others, self.connection] if context.get_start_method() == "fork" else []
        self._process = context.Process(target=_work, args=(theirs, do, inherited), daemon=True)
        self._process.start()
        theirs.close()

    def fileno(self) -> int:
        """What ``wait`` looks at."""
        return int(self.connection.fileno())

    def send(self, task: Any) -> None:
        try:
            self.connection.send(task)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None

    def receive(self) -> _Answer:
        try:
            answer: _Answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        return answer

    def _death(self) -> DataError:
        self._process.join(5)
        return DataError(
            f"a process that tokenises has ended (exit code {self._process.exitcode}; -9: killed, often for its "
            "memory)\n  fix:     free memory, or set data.num_tokenizers lower"
        )

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


@contextmanager
def _workers(do: Callable[[Any], Any], count: int) -> Iterator[list[_Worker]]:
    """Processes that wait for tasks; whatever happens, they are gone afterwards."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    started: list[_Worker] = []
    try:
        with signals_held(), _without_threads(), warnings.catch_warnings():
            # Python >= 3.12 warns of any thread at a fork, and torch has some; none holds a lock that a worker needs.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            for _ in range(count):
                started.append(_Worker(context, do, [worker.connection for worker in started]))
        yield list(started)
    finally:
        for worker in started:
            worker.end()


@contextmanager
def _without_threads() -> Iterator[None]:
    """Processes started now use no threads of tokenizers: after a fork there are none, and it would wait for them."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before


def _work(connection: Connection, do: Callable[[Any], Any], inherited: list[Connection]) -> None:
    """A worker: tasks in, answers out, until the other side is gone."""
    obey_parent_only(0)
    for other in inherited:  # or this process would keep a pipe open whose end is to tell of the parent's
        other.close()
    said = _Said()
    logger = logging.getLogger("lit_fsdp")
    logger.handlers, logger.propagate = [said], False
    while True:
        try:
            task = connection.recv()
            connection.send(_answer(task, do, said))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _answer(task: Any, do: Callable[[Any], Any], said: _Said) -> _Answer:
    said.records = []
    try:
        value: Any = do(task)
    except (DataError, ConfigError) as error:
        value = error
    except Exception as error:  # of our own making; it may not survive being sent
        value = RuntimeError(f"in a process that tokenises:\n{''.join(traceback.format_exception(error))}")
    return _Answer(value, tuple(said.records))


class _Said(logging.Handler):
    """Keeps what a worker logs, for its parent to say."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, int, str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelno, str(record.msg), record.args or ()))
