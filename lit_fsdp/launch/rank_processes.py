"""Processes that measure together, started, watched and ended by us: a hang is a result and never ours.

Each child reads its plan from standard input, which stays open: when it closes, because this process is gone, the
child ends itself. What it does goes to standard output, one JSON object per marked line.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from lit_fsdp.launch.checks.row import shortened

MARK = "\x1e"
MODULE = "lit_fsdp.commands.doctor_rank"
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_OF_OTHER_LAUNCHES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass
class Outcome:
    """What became of one rank."""

    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    """``None``: it was ended because the time was over, or because another one had failed."""
    said: str = ""
    """The end of its standard error."""
    out_of_time: bool = False

    @property
    def phase(self) -> str:
        """What it began last."""
        return next((event["phase"] for event in reversed(self.events) if "phase" in event), "starting")

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return any("done" in event for event in self.events)

    @property
    def problem(self) -> str | None:
        """One line on what went wrong, or ``None``."""
        if self.is_done and self.exit_code == 0:
            return None
        error = next((event["error"] for event in self.events if "error" in event), "")
        if error:
            return f"rank {self.rank} in {self.phase}: {error}"
        if self.exit_code is None:
            why = "did not come to an end in time" if self.out_of_time else "was still waiting"
            return f"rank {self.rank} {why} in {self.phase}"
        how = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"rank {self.rank} ended by {how} in {self.phase}{': ' + self.said if self.said else ''}"

    @property
    def is_cause(self) -> bool:
        """Whether it failed by itself, rather than for want of another rank."""
        return self.problem is not None and (self.exit_code is not None or self.out_of_time)


class _Rank:
    """One child, and the thread that reads it."""

    def __init__(self, plan: dict[str, Any], module: str) -> None:
        self.outcome = Outcome(int(plan["rank"]))
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in end)
        env = {name: value for name, value in os.environ.items() if name not in _OF_OTHER_LAUNCHES}
        env.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        # A session of its own: Ctrl-C is for this process, which ends the others in order.
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=env,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True, name=f"rank-{self.outcome.rank}")
        self.reader.start()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has failed already, which its exit code says
            self.process.stdin.write(json.dumps(plan).encode() + b"\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode("utf-8", "replace")
            if text.startswith(MARK):
                with contextlib.suppress(ValueError):  # cut off by a kill
                    self.outcome.events.append(json.loads(text.removeprefix(MARK)))

    def end(self) -> None:
        """Kill it if it still runs, and take its last words."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join(_GRACE_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.errors.seek(0)
        self.outcome.said = shortened(self.errors.read().decode("utf-8", "replace"))
        self.errors.close()


def run_ranks(plans: Sequence[dict[str, Any]], seconds: float, module: str = MODULE) -> list[Outcome]:
    """Start one process per plan, wait for all of them at most so long, and end what is left.

    Args:
        plans: One object for each, with its ``rank``; given to it as one line of JSON.
        seconds: Time for all together, their imports included.
        module: What each of them runs.

    Returns:
        One outcome per plan, in that order; nothing runs any more.
    """
    ranks: list[_Rank] = []
    deadline = time.monotonic() + seconds
    try:
        for plan in plans:
            ranks.append(_Rank(plan, module))  # one by one: those that started must be ended if the next does not
        while time.monotonic() < deadline and any(rank.process.poll() is None for rank in ranks):
            if any(rank.process.poll() not in (None, 0) for rank in ranks):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)  # the others will notice, or not
                _wait(ranks, deadline)
                break
            time.sleep(_POLL_SECONDS)
        failed = any(rank.process.poll() not in (None, 0) for rank in ranks)
        for rank in ranks:
            rank.outcome.exit_code = rank.process.poll()
            rank.outcome.out_of_time = rank.outcome.exit_code is None and not failed
    finally:
        for rank in ranks:
            rank.end()
    return [rank.outcome for rank in ranks]


def _wait(ranks: Sequence[_Rank], deadline: float) -> None:
    while time.monotonic() < deadline and any(rank.process.poll() is None for rank in ranks):
        time.sleep(_POLL_SECONDS)
