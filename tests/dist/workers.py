"""Worker processes that have paid for their imports once and then run many small distributed jobs.

A job is a function of ``tests.dist.jobs`` or of one of the other modules in ``_JOBS``; every rank calls it
with the same arguments, in a process group of its own (gloo on this host), and returns something JSON can hold. The
pool starts with the first test that asks for it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.ports import own_port

ROOT = Path(__file__).resolve().parents[2]
_JOBS = (
    "activation_jobs",
    "async_jobs",
    "audit_jobs",
    "choice_jobs",
    "foreign_life",
    "foreign_options",
    "grown_jobs",
    "foreign",
    "foreign_saving",
    "jobs",
    "units_jobs",
    "convert_jobs",
    "loading_jobs",
    "elastic_jobs",
    "import_jobs",
    "lora_jobs",
    "loss_jobs",
    "packing_jobs",
    "preference_jobs",
    "retention_jobs",
)
_MARK = "\x1eRESULT "
_AFTER_AN_ERROR = 30.0  # seconds in which the other ranks must answer too; who knows what they wait for


class RankError(AssertionError):
    """What the ranks of a failed job wrote."""


class Workers:
    """A growing pool of preloaded processes; ``run`` uses the first ``ranks`` of them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, job: str, ranks: int, timeout: float = 280, **arguments: Any) -> list[Any]:
        """The results of ``tests.dist.jobs.<job>(**arguments)`` by rank; raises RankError if any rank raised.

        Processes that have answered, be it with an error, go on to the next job; with one that has not, all are ended.
        """
        while len(self._processes) < ranks:
            self._processes.append(_start())
        port = own_port()
        chosen = self._processes[:ranks]
        try:
            for rank, process in enumerate(chosen):
                env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "NODE_RANK": 0}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                assert process.stdin is not None
                process.stdin.write(json.dumps({"job": job, "arguments": arguments, "env": env}) + "\n")
                process.stdin.flush()
            answers = _answers(chosen, timeout)
        except BaseException:  # the time of a test is over: what these processes do is for nobody
            self.close()
            raise
        if any(answer.get("is_lost") for answer in answers):
            self.close()
        if any("error" in answer for answer in answers):
            raise RankError("\n".join(f"rank {r}: {a.get('error', 'ok')}" for r, a in enumerate(answers)))
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.communicate()  # closes the pipes too
        self._processes.clear()


def _answers(processes: list[subprocess.Popen[str]], timeout: float) -> list[dict[str, Any]]:
    """Of every rank; soon after the first error, or when the time is over, without those that have not come."""
    found: dict[int, dict[str, Any]] = {}

    def listen(rank: int) -> None:
        found[rank] = _answer(processes[rank])

    threads = [threading.Thread(target=listen, args=(rank,), daemon=True) for rank in range(len(processes))]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    deadline = begin + timeout
    try:
        while (waiting := [t for t in threads if t.is_alive()]) and time.monotonic() < deadline:
            waiting[0].join(0.1)
            if any("error" in answer for answer in list(found.values())):
                deadline = min(deadline, time.monotonic() + _AFTER_AN_ERROR)
        late = {"error": f"no answer after {time.monotonic() - begin:.0f} s", "is_lost": True}
        return [found.get(rank, late) for rank in range(len(processes))]
    finally:  # the late ones, and all when the time of a test is over: nobody may read these pipes any more
        for process, thread in zip(processes, threads, strict=True):
            if thread.is_alive():
                process.kill()
                thread.join()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    return {"error": f"the process ended with exit code {process.wait()}", "is_lost": True}


def _start() -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.dist.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
    )


def _serve() -> None:
    """Read tasks from standard input until it closes."""
    import traceback

    import torch
    import torch.distributed as dist

    places = [importlib.import_module(f"tests.dist.{name}") for name in _JOBS]
    torch.set_num_threads(1)
    for line in sys.stdin:
        task = json.loads(line)
        before = dict(os.environ)
        os.environ.update({name: str(value) for name, value in task["env"].items()})
        try:
            place = next(place for place in places if hasattr(place, task["job"]))
            answer = {"result": getattr(place, task["job"])(**task["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()  # process groups of jobs before keep their threads, which never quite sleep
            os.environ.clear()  # a recipe's seed stays in PL_GLOBAL_SEED, and Lightning seeds the next job with it
            os.environ.update(before)
        print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
