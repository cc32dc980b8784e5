"""Which rank ended a run: every rank that fails leaves a word where all ranks met, and reads what the others left.

A collective only says that some peer is gone; with many ranks it does not even say so on the right one. Of those that
say nothing, the ones that still give signs of life (:mod:`lit_fsdp.parallel.signs_of_life`) only wait as well.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from lit_fsdp.parallel.signs_of_life import meeting_host, node_in, seconds_between, signs

_SECONDS = 3.0
_LOOKS = 50
"""At least so often, so that a machine that stood still for those seconds blames nobody."""
_KEY = "last_words/"
_SPOKEN = "last_words"
"""Ranks that have left a word, those that know what happened with an exclamation mark."""
_LOST_CONTACT = re.compile(
    "lost contact|gloo|NCCL|ProcessGroup|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|TCPStore"
)
_MAX_CHARS = 300


@dataclass
class _Heard:
    """What a rank has learnt from where all ranks met; replaced and never changed, as another thread may read it."""

    words: dict[int, str] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    """Ranks that have given a sign of life in the meantime."""

    def name(self, rank: int) -> str:
        return f"{rank} ({self.nodes[rank]})" if rank in self.nodes else str(rank)


def explain_failure(error: BaseException, store: Any) -> None:
    """Add a note to ``error`` that names the rank which ended this run, and its node; called on each rank that fails.

    Waits about 3 seconds for the others (longer with more than a thousand): a rank that says nothing and gives no
    sign of life was killed, is stopped or cut off. The meeting point is in rank 0's process (or in torchrun's on its
    node), so if it does not answer that rank is the one.

    Args:
        error: Of this rank.
        store: See :func:`lit_fsdp.parallel.arrivals.own_store`; ``None`` where the ranks never met.
    """
    if store is None or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    rank, is_lost = dist.get_rank(), bool(_LOST_CONTACT.search(f"{type(error).__name__}: {error}"))
    own = "" if is_lost else f"{type(error).__name__}: {error}"[:_MAX_CHARS]
    heard = _Heard()
    seconds = max(_SECONDS, 2.5 * seconds_between(dist.get_world_size()))
    meeting = threading.Thread(target=_meet, args=(store, own, seconds, heard), daemon=True, name="last-words")
    meeting.start()
    meeting.join(seconds + 2.0)
    me = f"rank {rank} ({socket.gethostname()})"
    if not is_lost:
        error.add_note(f"this was raised on {me}")
        return
    for line in _conclusions(rank, heard) or ["with which rank nobody knows"]:
        error.add_note(f"{me} lost contact: {line}")


def _conclusions(rank: int, heard: _Heard) -> list[str]:
    culprits = {other: text for other, text in sorted(heard.words.items()) if text}
    if culprits:
        return [f"rank {heard.name(other)} failed: {text}" for other, text in culprits.items()]
    silent = [other for other in range(dist.get_world_size()) if other not in heard.words and other != rank]
    if 0 in silent and not heard.words.keys() - {rank}:
        return [f"no word from rank 0 ({meeting_host()}): killed, stopped, hanging or cut off; see its own log"]
    gone = [other for other in silent if other not in heard.alive]
    if gone:
        where = ", ".join(heard.name(other) for other in gone)
        return [f"no word from rank {where}: killed, stopped, hanging or cut off; see its own log"]
    where = ", ".join(heard.name(other) for other in silent)
    return [f"rank {where} did not come, but is alive: hanging, or much slower than the others"] if silent else []


def _meet(store: Any, own: str, seconds: float, heard: _Heard) -> None:
    """Leave a word; those who do not know what happened read, rank 0 stays until it was read."""
    deadline = time.monotonic() + seconds
    rank, is_lost = dist.get_rank(), not own
    missing = set(range(dist.get_world_size()))
    try:
        store.set(f"{_KEY}{rank}", own)
        store.append(_SPOKEN, f"{rank} " if is_lost else f"{rank}! ")
        before = signs(store, missing) if is_lost else {}
        heard.nodes = {other: node_in(sign) for other, sign in before.items()}
        looks, is_over = 0, False
        while missing and not is_over and (is_lost or rank == 0):
            looks, is_over = looks + 1, looks >= _LOOKS and time.monotonic() >= deadline
            for entry in store.get(_SPOKEN).decode().split():
                other = int(entry.rstrip("!"))
                if other in missing:
                    word = store.get(f"{_KEY}{other}").decode() if entry.endswith("!") else ""
                    heard.words = {**heard.words, other: word}
                    missing.discard(other)
            time.sleep(0.02)
        after = signs(store, missing) if is_lost else {}
        heard.alive = {other for other, sign in after.items() if sign != before.get(other)}
    except RuntimeError:  # the meeting point is gone, and with it rank 0
        return
