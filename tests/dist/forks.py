"""Jobs on ranks, and programs, as forks of a process that has imported everything: half a second instead of four.

A job is a function of one of the files ``*jobs.py`` of ``tests/dist`` and ``tests/faults``; every rank calls it with
the same arguments and returns something that JSON can hold. Ranks may be killed, stopped or hurt at any moment: they
have their own process, output and exit code, and leave nothing behind for the next job; all ranks of a job are one
process group, so that nothing of it is overlooked.

A shell, torchrun or another rank starts programs by the path `server().python`. What a test wants to know of the
start itself, of processes or of imports, it must ask of the real ``sys.executable``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist import client
from tests.runs import own_port

ROOT = Path(__file__).resolve().parents[2]
SMOKE = [
    *("--config", str(ROOT / "recipes/llama3.2-1b_full_fsdp2_8x24gb.yaml")),
    *("--config", str(ROOT / "configs/debug/smoke.yaml")),
]
"""Words for a recipe in miniature on two processes."""


class RankError(AssertionError):
    """What the ranks of a failed job wrote."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    code: int | None
    """Exit code; minus the number of the signal that killed it; None if it lived on after the time given."""
    answer: Any
    """What the job returned; None if it did not."""
    out: str
    err: str
    seconds: float
    """From the call of ``wait`` to its end."""

    @property
    def output(self) -> str:
        return self.out + self.err


class Job:
    """Forked ranks at work, whose files lie in ``place``."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.pids: list[int] = []
        self._answers: list[Any] = []
        self._codes: dict[int, int] = {}

    def begin(self, address: Path, request: dict[str, Any]) -> None:
        """Start the next rank."""
        rank = len(self.pids)
        out, err = ((self.place / f"{stream}-{rank}").open("w") for stream in ("out", "err"))
        with open(os.devnull) as nothing, out, err:
            request |= {"answer": self.place / f"answer-{rank}", "group": self.pids[0] if rank else 0}
            answered = client.connect(address, request, [nothing.fileno(), out.fileno(), err.fileno()])
        self._answers.append(answered[:2])
        self.pids.append(answered[2])

    def kill(self, ranks: Sequence[int] | None = None, number: int = signal.SIGKILL) -> None:
        """Send a signal to some ranks, or to all at once."""
        with contextlib.suppress(ProcessLookupError):
            if ranks is None or len(ranks) == len(self.pids):
                os.killpg(self.pids[0], number)
            else:
                for rank in ranks:
                    os.kill(self.pids[rank], number)

    def wait(self, timeout: float = 60, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """The outcomes of these ranks (default: all) once all of them have ended, or when the time is over."""
        begin, seconds = time.monotonic(), {}
        wanted = list(range(len(self.pids)) if ranks is None else ranks)
        while left := {self._answers[rank][0]: rank for rank in wanted if rank not in self._codes}:
            ended = select.select(list(left), [], [], max(0.0, begin + timeout - time.monotonic()))[0]
            if not ended:
                break
            for rank in map(left.__getitem__, ended):
                self._codes[rank], seconds[rank] = int(self._answers[rank][1].readline()), time.monotonic() - begin
        return [self._outcome(rank, seconds.get(rank, 0.0)) for rank in wanted]

    def end(self) -> None:
        """Kill what is left of it, if it was not waited for."""
        if len(self._codes) < len(self.pids):
            self.kill()
        for connection, answers in self._answers:
            answers.close()
            connection.close()

    def is_alive(self) -> bool:
        """Whether any process of this job is left; one that is just dying gets a moment."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pids[0], 0)
            except ProcessLookupError:
                return False
            time.sleep(0.01)
        return True

    def output(self, rank: int) -> str:
        """What a rank has written so far."""
        return "".join((self.place / f"{stream}-{rank}").read_text(errors="replace") for stream in ("out", "err"))

    def _outcome(self, rank: int, seconds: float) -> Outcome:
        answer = self.place / f"answer-{rank}"
        known = json.loads(answer.read_text()) if answer.exists() else None
        out, err = ((self.place / f"{stream}-{rank}").read_text(errors="replace") for stream in ("out", "err"))
        return Outcome(self._codes.get(rank), known, out, err, seconds)


class ForkServer:
    """The server process, from the side of the tests; see :mod:`tests.dist.preloaded`."""

    def __init__(self) -> None:
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "TORCH_WARM_POOL": "0"}
        self._places = tempfile.TemporaryDirectory(prefix="lit_fsdp_jobs_")
        self._address = Path(self._places.name) / "socket"
        self._jobs: list[Job] = []
        program = Path(self._places.name) / "python"
        words = f"-I -S {client.__file__} {self._address} {sys.executable}"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        program.chmod(0o755)
        self.python = str(program)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._address))
            listening.listen(64)
            command = [sys.executable, "-m", "tests.dist.preloaded", self._places.name, str(listening.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, env=self._env, pass_fds=[listening.fileno()])

    def start(
        self, job: str, ranks: int, env: dict[str, str] | None = None, each: Sequence[Any] = (), **arguments: Any
    ) -> Job:
        """Fork the ranks of ``job(**arguments)``; files of theirs go to a folder of their own."""
        self._jobs.append(Job(Path(tempfile.mkdtemp(dir=self._places.name))))
        meeting = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        meeting["MASTER_PORT"] = own_port()
        for rank in range(ranks):
            given = {**self._env, **meeting, "RANK": rank, "LOCAL_RANK": rank, **(env or {})}
            request = {"job": job, "arguments": arguments, "each": each, "cwd": ROOT, "mask": [], "files": [0, 1, 2]}
            request["env"] = {name: str(value) for name, value in given.items()}
            self._jobs[-1].begin(self._address, request)
        return self._jobs[-1]

    def end_jobs(self) -> None:
        """Kill what a test has left behind."""
        for job in self._jobs:
            job.end()
        self._jobs.clear()

    def close(self) -> None:
        """End the server and whatever ranks it still has."""
        self._process.kill()
        self._process.wait()
        self._places.cleanup()


@functools.cache
def server() -> ForkServer:
    """The one of this test process, which ends with it."""
    found = ForkServer()
    atexit.register(found.close)
    return found


def on_ranks(job: str, ranks: int, timeout: float = 280, **arguments: Any) -> list[Any]:
    """What each rank returns of ``job(**arguments)``; RankError with what all wrote unless all end well."""
    outcomes = server().start(job, ranks, **arguments).wait(timeout)
    server().end_jobs()
    if any(o.code != 0 for o in outcomes):
        raise RankError("\n".join(f"rank {r} ended with {o.code}: {o.output}" for r, o in enumerate(outcomes)))
    return [o.answer for o in outcomes]


def on_ranks_each(
    job: str, ranks: int, cases: Sequence[dict[str, Any]], timeout: float = 280, **arguments: Any
) -> list[list[Any]]:
    """The same for each case, which is further arguments: one after the other in the same processes.

    The first fit of a process costs as much as ten steps; what must not know of another run takes ``on_ranks``.
    """
    return list(map(list, zip(*on_ranks(job, ranks, timeout, each=cases, **arguments), strict=True)))


def command(
    ranks: int, words: Sequence[str | Path], cwd: Path, job: str = "program", patience: float = 20
) -> list[Outcome]:
    """``lit-fsdp WORDS`` in a folder, or another job that ends with an exit code.

    Ranks that still wait for the first one so many seconds after it has failed are ended, as torchrun does it.
    """
    running = server().start(job, ranks, words=words, cwd=cwd)
    (first,) = running.wait(280, [0])
    outcomes = running.wait(patience if first.code else 280)
    server().end_jobs()
    return outcomes
