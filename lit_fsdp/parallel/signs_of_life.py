"""Every rank says now and then that it is alive, where all ranks met; rank 0 says which one has fallen silent.

A collective waits for a rank that was stopped, or whose node is cut off, until ``timeout_seconds`` are over, and then
says that something took too long. On GPUs NCCL's watchdog ends the process at that point, and no Python runs. So it is
said before, by a thread that takes no part in collectives.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from lit_fsdp.parallel.arrivals import ranges

_log = logging.getLogger(__name__)
_KEY = "alive/"
_PATIENCE_SECONDS = 20.0
_GRACE_SECONDS = 5.0
_ENDED = "ended"


def seconds_between(world: int) -> float:
    """Pause between two signs of one rank: 1 s, longer with more than 512 ranks, all of which write to one process."""
    return max(1.0, world / 512)


class SignsOfLife:
    """A thread of this rank, from :meth:`start` to :meth:`stop`.

    Args:
        rank: This one.
        world: All.
        store: Where all ranks met.
        timeout_seconds: How long the others wait for a silent rank, for the message.
    """

    def __init__(self, rank: int, world: int, store: Any, timeout_seconds: float) -> None:
        self.rank, self.world, self._store, self._timeout = rank, world, store, timeout_seconds
        self._node = socket.gethostname()
        self._pause = seconds_between(world)
        self._patience = max(min(_PATIENCE_SECONDS, timeout_seconds / 2), 5 * self._pause)
        self._stopped = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._silent: set[int] = set()

    def start(self) -> None:
        """Give the first sign now."""
        self._give(0)
        threading.Thread(target=self._run, name="signs-of-life", daemon=True).start()

    def stop(self, is_lost: bool = False) -> None:
        """End for good; the others do not miss this rank.

        Args:
            is_lost: Whether the run failed: the store may not answer any more, and is not asked.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        if is_lost:
            return
        try:
            self._give(_ENDED)
        except RuntimeError:  # rank 0 has ended before
            return

    def _give(self, what: int | str) -> None:
        self._store.set(f"{_KEY}{self.rank}", f"{self._node} {what}")

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(self._pause):
            count += 1
            try:
                self._give(count)
                if self.rank == 0:
                    self.look()
            except RuntimeError as error:
                if not self._stopped.wait(_GRACE_SECONDS):  # it does not simply come to its end
                    where = "its own store" if self.rank == 0 else f"rank 0 at {meeting_host()}"
                    text = str(error).splitlines()[0][:200]
                    _log.error("rank %d on %s: %s does not answer any more: %s", self.rank, self._node, where, text)
                return

    def look(self) -> None:
        """On rank 0: notice who has been silent for too long, and who is back."""
        now = time.monotonic()
        for rank, sign in signs(self._store, range(self.world)).items():
            if self._seen.get(rank, ("", now))[0] != sign:
                self._seen[rank] = sign, now
                if rank in self._silent:
                    self._silent.discard(rank)
                    _log.warning("rank %d on %s is back", rank, node_in(sign))
        missed = [
            rank
            for rank, (sign, since) in self._seen.items()
            if now - since > self._patience and rank not in self._silent and not sign.endswith(_ENDED)
        ]
        nodes: dict[str, list[int]] = {}
        for rank in missed:
            nodes.setdefault(node_in(self._seen[rank][0]), []).append(rank)
        for node, silent in nodes.items():
            _log.warning(
                "rank %s on %s has given no sign of life for %.0f s: killed, stopped, or its node cannot be reached; "
                "the others wait for it, at most %.0f s (timeout_seconds)",
                ranges(silent),
                node,
                now - max(self._seen[rank][1] for rank in silent),
                self._timeout,
            )
        self._silent.update(missed)


def signs(store: Any, ranks: Iterable[int]) -> dict[int, str]:
    """The last sign of each of those ranks that has given one: its node and a word that changes."""
    keys = {rank: f"{_KEY}{rank}" for rank in ranks}
    if not keys:
        return {}
    if not store.check(list(keys.values())):  # a get would wait for what is missing
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    values = store.multi_get(list(keys.values())) if keys else []
    return {rank: value.decode() for rank, value in zip(keys, values, strict=True)}


def node_in(sign: str) -> str:
    """The node that gave a sign."""
    return sign.partition(" ")[0]


def meeting_host() -> str:
    """Where rank 0 (or torchrun's first agent) is."""
    return os.environ.get("MASTER_ADDR", "its node")
