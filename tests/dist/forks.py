"""Jobs on ranks that may be killed, stopped or hurt at any moment: a server pays the imports once and forks each rank.

Started as ``python -m tests.dist.forks MODULE...``; a job is a function of one of those modules. Every rank has its own
process, output file and exit code; all ranks of a job are one process group, so that nothing of it can be overlooked.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import own_port

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended."""

    code: int | None
    """Exit code; minus the number of the signal that killed it; None if it lived on after the time given."""
    answer: Any
    """What the job returned; None if it did not."""
    output: str
    """Standard output and standard error."""
    seconds: float
    """From the call of ``wait`` to its end."""


class Job:
    """Forked ranks at work."""

    def __init__(self, server: ForkServer, place: Path, pids: list[int]) -> None:
        self.server, self.place, self.pids = server, place, pids
        self._ended: set[int] = set()

    def kill(self, ranks: Sequence[int] | None = None, number: int = signal.SIGKILL) -> None:
        """Send a signal to some ranks, or to all at once."""
        if ranks is None or len(ranks) == len(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pids[0], number)
            return
        for rank in range(len(self.pids)) if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def wait(self, timeout: float = 60, ranks: Sequence[int] | None = None) -> list[Outcome]:
        """The outcomes of these ranks (default: all) once all of them have ended, or when the time is over."""
        wanted = list(range(len(self.pids)) if ranks is None else ranks)
        ends = self.server.ask({"wait": [self.pids[rank] for rank in wanted], "timeout": timeout})
        self._ended.update(rank for rank, (code, _) in zip(wanted, ends, strict=True) if code is not None)
        return [self._outcome(rank, *end) for rank, end in zip(wanted, ends, strict=True)]

    def end(self) -> None:
        """Kill what is left of it, if it was not waited for."""
        if len(self._ended) < len(self.pids):  # the numbers are still its own
            self.kill()

    def is_alive(self) -> bool:
        """Whether any process of this job is left."""
        try:
            os.killpg(self.pids[0], 0)
        except ProcessLookupError:
            return False
        return True

    def output(self, rank: int) -> str:
        """What a rank has written so far."""
        return (self.place / f"output-{rank}").read_text(errors="replace")

    def _outcome(self, rank: int, code: int | None, seconds: float) -> Outcome:
        answer = self.place / f"answer-{rank}"
        known = json.loads(answer.read_text()) if answer.exists() else None
        return Outcome(code, known, self.output(rank), seconds)


class ForkServer:
    """The server process, from the side of the tests.

    Args:
        modules: Where the jobs are; imported once, by the server.
        env: Changes to the environment of the server and so of all ranks.
    """

    def __init__(self, *modules: str, env: dict[str, str] | None = None) -> None:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._places = tempfile.TemporaryDirectory(prefix="lit_fsdp_jobs_")
        self.jobs: list[Job] = []
        """Those that :meth:`end_jobs` has not ended."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.forks", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **own, **(env or {})},
        )

    def start(self, job: str, ranks: int, env: dict[str, str] | None = None, **arguments: Any) -> Job:
        """Fork the ranks of ``job(**arguments)``; files of theirs go to a folder of their own."""
        place = Path(tempfile.mkdtemp(dir=self._places.name))
        task = {"job": job, "ranks": ranks, "place": str(place), "env": env or {}, "arguments": arguments}
        self.jobs.append(Job(self, place, self.ask({"start": task})))
        return self.jobs[-1]

    def run(self, job: str, ranks: int, timeout: float = 250, **arguments: Any) -> list[Any]:
        """The answers of all ranks; AssertionError with their output unless all end well."""
        outcomes = self.start(job, ranks, **arguments).wait(timeout)
        assert all(o.code == 0 for o in outcomes), "\n".join(f"{o.code}: {o.output}" for o in outcomes)
        return [o.answer for o in outcomes]

    def end_jobs(self) -> None:
        """Kill what a test has left behind."""
        for job in self.jobs:
            job.end()
        self.jobs.clear()

    def ask(self, request: dict[str, Any]) -> Any:
        """One request, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the server and whatever ranks it still has."""
        self._process.communicate()
        self._places.cleanup()
        assert self._process.returncode == 0


def _start(jobs: Sequence[Any], task: dict[str, Any]) -> list[int]:
    size, place = task["ranks"], Path(task["place"])
    job = next(getattr(module, task["job"]) for module in jobs if hasattr(module, task["job"]))
    port = own_port()
    meeting = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    pids: list[int] = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            env = {**meeting, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, **task["env"]}
            os.environ.update({name: str(value) for name, value in env.items()})
            _be_rank(job, task["arguments"], place, rank)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it has done so itself, or is dead already
            os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    return pids


def _be_rank(job: Any, arguments: dict[str, Any], place: Path, rank: int) -> None:
    """Never returns."""
    code = 1
    _die_with_parent()
    try:
        output = os.open(place / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, stream in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(number, stream)
        answer = job(**arguments)
        (place / f"answer-{rank}").write_text(json.dumps(answer))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as the interpreter does it at its end
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """However the one that started this process ends, this one must not stay; Linux only, as the rest."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _wait(pids: list[int], timeout: float, ended: dict[int, int]) -> list[tuple[int | None, float]]:
    begin = time.monotonic()
    found: dict[int, tuple[int | None, float]] = {}
    while len(found) < len(pids):
        now = time.monotonic() - begin
        for pid in [p for p in pids if p not in found]:
            if pid not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            if pid in ended:
                found[pid] = (ended[pid], now)
            elif now > timeout:
                found[pid] = (None, now)
        time.sleep(0.005)
    return [found[pid] for pid in pids]


def _serve(modules: Sequence[str]) -> None:
    import torch

    _die_with_parent()
    torch.set_num_threads(1)  # a forked process must not inherit the idea of threads it does not have
    jobs = [importlib.import_module(name) for name in modules]
    started: set[int] = set()
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer: Any = _start(jobs, request["start"])
            started.update(answer)
        else:
            answer = _wait(request["wait"], request["timeout"], ended)
        print(json.dumps(answer), flush=True)
    for pid in started - set(ended):
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _serve(sys.argv[1:])
