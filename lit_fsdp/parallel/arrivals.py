"""Before the first collective: what the ranks wait for is said after a few seconds, not when the time is over.

``init_process_group`` waits in silence for an address that does not resolve, for a rank 0 that is not there, and for
ranks that were never started. A watch beside it says which of them it is. A start without trouble pays nothing for it:
only ranks that wait open a connection of their own, and only one per node keeps it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lit_fsdp.errors import ConfigError

_log = logging.getLogger(__name__)
_QUIET_SECONDS = 3.0
_REMIND_SECONDS = 30.0
_REACH_SECONDS = 5.0
_POLL_SECONDS = 0.25
_KEY = "arrived"


@dataclass(frozen=True)
class Meeting:
    """Where a rank meets the others."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    timeout_seconds: float
    hosted_by_agent: bool = False
    """Whether torchrun's agent listens there, and not rank 0."""

    @property
    def place(self) -> str:
        """``address:port``."""
        return f"{self.address}:{self.port}"

    @property
    def host(self) -> str:
        """Who listens."""
        return "torchrun's agent on the first node" if self.hosted_by_agent else "rank 0"


@contextlib.contextmanager
def watched(meeting: Meeting) -> Iterator[None]:
    """Around the start of the process group: say what it waits for, and put that into the error if it fails.

    Raises:
        ConfigError: Another process listens where this one must.
    """
    watch = _Watch(meeting)
    if meeting.world > 1:
        watch.start()
    try:
        yield
    except Exception as error:
        if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error):
            raise _taken(meeting) from error
        error.add_note(watch.report())
        raise
    finally:
        watch.stop()


def _taken(meeting: Meeting) -> ConfigError:
    own = "with none, a free one is chosen"
    if "SLURM_JOB_ID" in os.environ:
        own = "in jobs of lit-fsdp slurm submit it is slurm.master_port, or by the job's number"
    return ConfigError(
        "MASTER_PORT",
        f"{meeting.port}, where another process of {socket.gethostname()} listens already",
        "a port that nobody listens on where rank 0 runs",
        f"start again with another MASTER_PORT ({own}), or end what listens there: ss -ltnp sport = :{meeting.port}",
    )


class _Watch:
    """Two threads: one tries, which may take long where names do not resolve, and one speaks in time."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._begin = time.monotonic()
        self._done = threading.Event()
        self._trouble: str | None = "no answer yet"
        self._arrived: set[int] = {meeting.rank}
        self._has_spoken = False

    def start(self) -> None:
        for name, body in (("arrivals", self._speak), ("arrivals-probe", self._probe)):
            threading.Thread(target=body, name=name, daemon=True).start()

    def stop(self) -> None:
        self._done.set()
        if self._has_spoken:
            _log.warning("the ranks have met after %.0f s", time.monotonic() - self._begin)

    def report(self) -> str:
        """What this rank waits for."""
        at, seconds = self._meeting, time.monotonic() - self._begin
        me = f"rank {at.rank} on {socket.gethostname()}"
        rest = f"(since {seconds:.0f} s, at most {at.timeout_seconds:.0f} s)"
        if self._trouble is not None:
            who = "itself" if at.rank == 0 and not at.hosted_by_agent else at.host
            return f"{me} cannot reach {who} at {at.place}: {self._trouble} {rest}"
        missing = set(range(at.world)) - self._arrived
        if missing and at.local_rank == 0:
            came = f"{len(self._arrived)} of {at.world} ranks have come to {at.place}"
            return f"{me} waits for rank {ranges(missing)}: {came} {rest}"
        if missing:
            return f"{me} has come to {at.place} and waits for the other ranks {rest}"
        return f"{me} waits for the ranks to connect with each other: all {at.world} have come to {at.place} {rest}"

    def _speak(self) -> None:
        pause = _QUIET_SECONDS
        while not self._done.wait(pause):
            pause = _REMIND_SECONDS
            # of those that cannot reach rank 0 one per node says so; who is missing is said by rank 0
            if self._meeting.rank == 0 or (self._meeting.local_rank == 0 and self._trouble is not None):
                self._has_spoken = True
                _log.warning(self.report())

    def _probe(self) -> None:
        if self._done.wait(_QUIET_SECONDS / 2):
            return
        while not self._done.is_set():
            self._trouble = unreachable(self._meeting.address, self._meeting.port)
            if self._trouble is None:
                with contextlib.suppress(RuntimeError):  # the other end has gone again
                    self._follow()
            self._done.wait(_POLL_SECONDS)

    def _follow(self) -> None:
        """Say that this rank is there, and read who else is."""
        at = self._meeting
        store = own_store(at.address, at.port)
        store.append(_KEY, f"{at.rank} ")
        if at.local_rank != 0:  # rank 0 has so many files open, and does the answering
            del store
            self._done.wait()
            return
        while not self._done.wait(max(_POLL_SECONDS, at.world / 512)):
            self._arrived = {int(rank) for rank in store.get(_KEY).split()}


def own_store(address: str, port: int) -> Any:
    """A connection of its own to where all ranks meet.

    The default store's only one is held by whoever waits for a key in it, as NCCL's first collectives do. Keys are
    those of this attempt: torchrun's meeting point outlives it.

    Raises:
        RuntimeError: Nobody answers there.
    """
    seconds = timedelta(seconds=_REACH_SECONDS)
    client = dist.TCPStore(address, port, None, False, seconds, wait_for_workers=False)
    return dist.PrefixStore(f"lit_fsdp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", client)


def unreachable(address: str, port: int) -> str | None:
    """Why nothing answers there; ``None`` if something does."""
    try:
        socket.create_connection((address, port), timeout=_REACH_SECONDS).close()
    except socket.gaierror as error:
        return f"this name does not resolve here ({error.strerror or error})"
    except ConnectionRefusedError:
        return "nobody listens there (connection refused)"
    except OSError as error:
        return f"{error.strerror or error}"
    return None


def ranges(numbers: Collection[int]) -> str:
    """Numbers as people write them: ``0, 2-5``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def is_hosted_by_agent() -> bool:
    """Whether torchrun's agent is the meeting point, as torch decides it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
