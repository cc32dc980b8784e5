"""A training that is interrupted again and again, and what must be true of it after every interruption."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_fsdp.checkpoint.run_folder import survey
from lit_fsdp.checkpoint.store import verify_files
from tests.dist.forks import Job, server

CHAOS = os.environ.get("LIT_FSDP_FAULTS") == "long"
ENDLESS = 100_000
SURVIVED: Counter[str] = Counter()
"""How often so far, by injection; what is not survived fails its test. `make chaos` prints it."""
COLLECTIVE_TIMEOUT = 30.0  # seconds; a busy machine may need ten between two ranks


def attempts(log: Path) -> list[tuple[int, dict[int, str]]]:
    """Of each attempt the step it began at and the losses of its steps as written, bit for bit."""
    found: list[tuple[int, dict[int, str]]] = []
    for line in log.read_text().splitlines(keepends=True) if log.exists() else []:
        first, second = line.split()
        if first == "start":
            found.append((int(second), {}))
        elif line.endswith("\n"):
            found[-1][1][int(first)] = second
    return found


class TrackedRun:
    """Many attempts of one run, in an empty ``folder`` for it alone; ``job`` is what else ``train_tracked`` takes."""

    def __init__(self, model: Path, folder: Path, **job: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.model, self.folder = model, folder
        self.run, self.log = folder / "run", folder / "log"
        self.job = {**job, "strategy": {"timeout_seconds": COLLECTIVE_TIMEOUT, **job.get("strategy", {})}}
        self.save_seconds = 0.0

    def start(self, steps: int = ENDLESS, **harm: Any) -> Job:
        """Train on two ranks from the newest checkpoint on."""
        names = {"model": self.model, "run": self.run, "log": self.log}
        return server().start("train_tracked", 2, steps=steps, **names, **self.job, **harm)

    def steps(self) -> list[int]:
        """Steps whose folders are visible, whatever is in them."""
        return sorted(int(path.name[5:]) for path in (self.run / "checkpoints").glob("step-*"))

    def newest(self) -> int:
        """The newest visible step; 0 if there is none."""
        return max(self.steps(), default=0)

    def wait_for(self, count: Callable[[], int], number: int, job: Job) -> float:
        """Until there are so many; the time of that moment."""
        deadline = time.monotonic() + 90
        while count() < number:
            assert time.monotonic() < deadline, f"no {number} after 90 s: {job.output(0)}"
            time.sleep(0.002)
        return time.monotonic()

    def kill_at_random(self, rng: random.Random) -> Job:
        """Start, let one more step be saved, kill within the time the next one takes."""
        job = self.start()
        first = self.wait_for(self.newest, self.newest() + 1, job)
        if not self.save_seconds:
            self.save_seconds = self.wait_for(self.newest, self.newest() + 1, job) - first
        time.sleep(rng.uniform(0, self.save_seconds))
        job.kill()
        return job

    def check(self, resumed_from: int, may_lose: int | None = None) -> None:
        """Every visible checkpoint is whole; the last attempt did at most ``may_lose`` steps more than the newest has.

        By default 1; in the background a step is still being written while the next one is taken.
        """
        if may_lose is None:
            may_lose = 2 if self.job.get("checkpoint", {}).get("async_save") else 1
        found = survey(self.run / "checkpoints")
        for entry in found:
            verify_files(entry.path)
        assert [entry.step for entry in found] == self.steps()
        begun, losses = attempts(self.log)[-1]
        assert begun == resumed_from
        done = max(losses, default=begun)
        assert done - found[-1].step <= may_lose, f"step {done} was done, {found[-1].step} is the newest checkpoint"

    def finish(self, timeout: float = 240) -> None:
        """Two more steps than ever without harm, then compare with a run that nobody interrupted."""
        newest = self.newest()
        last = max(newest, *(max(losses, default=0) for _, losses in attempts(self.log))) + 2
        (first, other) = self._to_the_end(self.start(last), timeout)
        assert attempts(self.log)[-1][0] == newest
        job = {**self.job, "checkpoint": {"every_steps": None}}
        whole = TrackedRun(self.model, self.folder / "uninterrupted", **job)
        assert self._to_the_end(whole.start(last), timeout) == [first, other], "not the state of the uninterrupted run"
        ((_, wanted),) = attempts(whole.log)
        assert not list((self.run / "checkpoints").glob(".*")), "not swept"
        for _, losses in attempts(self.log):
            assert {step: wanted[step] for step in losses} == losses

    @staticmethod
    def _to_the_end(job: Job, timeout: float) -> list[Any]:
        outcomes = job.wait(timeout)
        assert [o.code for o in outcomes] == [0, 0], "\n".join(f"{o.code}: {o.output}" for o in outcomes)
        return [o.answer for o in outcomes]
