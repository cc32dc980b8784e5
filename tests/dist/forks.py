"""Jobs on ranks that may be killed, stopped or hurt at any moment: a server pays the imports once and forks each rank.

A job is a function of one of the files ``*jobs.py`` of ``tests/dist`` and ``tests/faults``; every rank calls it with
the same arguments and returns something that JSON can hold. Ranks have their own process, output and exit code, and
leave nothing behind for the next job; all ranks of a job are one process group, so that nothing of it is overlooked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist import preloaded
from tests.ports import own_port

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
        """Standard output, then standard error."""
        return self.out + self.err


class Job:
    """Forked ranks at work."""

    def __init__(self, server: ForkServer, place: Path, pids: list[int]) -> None:
        self.server, self.place, self.pids = server, place, pids
        self._ended: set[int] = set()

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
        wanted = list(range(len(self.pids)) if ranks is None else ranks)
        ends = self.server.ask({"wait": [self.pids[rank] for rank in wanted], "timeout": timeout})
        self._ended.update(rank for rank, (code, _) in zip(wanted, ends, strict=True) if code is not None)
        return [self._outcome(rank, *end) for rank, end in zip(wanted, ends, strict=True)]

    def end(self) -> None:
        """Kill what is left of it, if it was not waited for."""
        if len(self._ended) < len(self.pids):  # the numbers are still its own
            self.kill()

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

    def _outcome(self, rank: int, code: int | None, seconds: float) -> Outcome:
        answer = self.place / f"answer-{rank}"
        known = json.loads(answer.read_text()) if answer.exists() else None
        out, err = ((self.place / f"{stream}-{rank}").read_text(errors="replace") for stream in ("out", "err"))
        return Outcome(code, known, out, err, seconds)


class ForkServer:
    """The server process, from the side of the tests."""

    def __init__(self) -> None:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_WARM_POOL": "0"}
        self._places = tempfile.TemporaryDirectory(prefix="lit_fsdp_jobs_")
        self.jobs: list[Job] = []
        """Those that :meth:`end_jobs` has not ended."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **own},
        )

    def start(self, job: str, ranks: int, env: dict[str, str] | None = None, **arguments: Any) -> Job:
        """Fork the ranks of ``job(**arguments)``; files of theirs go to a folder of their own."""
        place = Path(tempfile.mkdtemp(dir=self._places.name))
        task = {"job": job, "ranks": ranks, "place": place, "env": env or {}, "arguments": arguments}
        self.jobs.append(Job(self, place, self.ask({"start": task})))
        return self.jobs[-1]

    def run(self, job: str, ranks: int, timeout: float = 280, **arguments: Any) -> list[Any]:
        outcomes = self.start(job, ranks, **arguments).wait(timeout)
        self.end_jobs()
        if any(o.code != 0 for o in outcomes):
            raise RankError("\n".join(f"rank {r} ended with {o.code}: {o.output}" for r, o in enumerate(outcomes)))
        return [o.answer for o in outcomes]

    @functools.cached_property
    def python(self) -> str:
        """A program to be started in place of ``sys.executable``; see :mod:`tests.dist.preloaded`."""
        return str(self.ask({"serve": tempfile.mkdtemp(dir=self._places.name)}))

    def end_jobs(self) -> None:
        """Kill what a test has left behind."""
        for job in self.jobs:
            job.end()
        self.jobs.clear()

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request, default=str), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except BaseException:  # the time of a test is over: the next one would be given its answer
            self._process.kill()
            server.cache_clear()
            raise

    def close(self) -> None:
        """End the server and whatever ranks it still has."""
        self._process.communicate()
        self._places.cleanup()


@functools.cache
def server() -> ForkServer:
    """The one of this test process, which ends with it."""
    found = ForkServer()
    atexit.register(found.close)
    return found


def on_ranks(job: str, ranks: int, timeout: float = 280, **arguments: Any) -> list[Any]:
    """What each rank returns of ``job(**arguments)``; RankError with what all wrote unless all end well."""
    return server().run(job, ranks, timeout, **arguments)


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


def _start(modules: Sequence[Any], task: dict[str, Any]) -> list[int]:
    size, place = task["ranks"], Path(task["place"])
    job = next(vars(module)[task["job"]] for module in modules if task["job"] in vars(module))
    port = own_port()
    meeting = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    pids: list[int] = []
    gc.freeze()  # what all ranks share is then neither searched nor copied by their garbage collection
    for rank in range(size):
        for stream in ("out", "err"):
            (place / f"{stream}-{rank}").touch()
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
    code, known = 1, set(sys.modules)
    preloaded.die_with_parent()
    random.seed(0)  # Python gives each fork another seed, and checkpoints hold its state
    try:
        for number, name in enumerate((os.devnull, place / f"out-{rank}", place / f"err-{rank}")):
            os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), number)
        answer = json.dumps(job(**arguments))
        (place / f"answer-{rank}").write_text(answer)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as the interpreter does it at its end
    finally:
        (place / f"imported-{rank}").write_text(json.dumps(sorted(set(sys.modules) - known)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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


def _imported(place: Path) -> None:
    """What the job before had to import, so that the next one finds it."""
    for found in place.glob("imported-0"):
        preloaded.import_too(json.loads(found.read_text()))


def _build_parsers() -> None:
    """Those of a recipe and of its sections, for which every rank and command would need a tenth of a second."""
    from lit_fsdp import CausalLMDataModule, CausalLMModule, Checkpoint, fsdp_strategy
    from lit_fsdp.config.parser import recipe_parser

    recipe_parser()
    CausalLMModule(name="a-model")
    CausalLMDataModule(train="rows.jsonl")
    Checkpoint()
    fsdp_strategy()


def _serve() -> None:
    import torch

    preloaded.die_with_parent()
    torch.set_num_threads(1)  # a forked process must not inherit the idea of threads it does not have
    files = [path for folder in ("dist", "faults") for path in sorted((ROOT / "tests" / folder).glob("*jobs.py"))]
    modules = [importlib.import_module(f"tests.{path.parent.name}.{path.stem}") for path in files]
    _build_parsers()
    places: dict[int, Path] = {}
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            pids = _start(modules, request["start"])
            places.update(dict.fromkeys(pids, Path(request["start"]["place"])))
            print(json.dumps(pids), flush=True)
        elif "serve" in request:
            folder = Path(request["serve"])
            listening = preloaded.listen(folder)
            if os.fork() == 0:
                preloaded.die_with_parent()
                preloaded.serve(folder, listening)
            listening.close()
            print(json.dumps(str(preloaded.write_python(folder))), flush=True)
        else:
            print(json.dumps(_wait(request["wait"], request["timeout"], ended)), flush=True)
            _imported(places[request["wait"][0]])
    for pid in set(places) - set(ended):
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _serve()
