"""Which rank ended a run: every rank that fails leaves a word where all ranks met, and reads what the others left.

A collective only says that some peer is gone; with many ranks it does not even say so on the right one.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import torch.distributed as dist

_SECONDS = 3.0
_KEY = "lit_fsdp/last_words/"
_LOST_CONTACT = re.compile(
    "lost contact|gloo|NCCL|ProcessGroup|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|TCPStore"
)
_MAX_CHARS = 300


def explain_failure(error: BaseException) -> None:
    """Add a note to ``error`` that names the rank which ended this run; called on each rank that fails.

    Waits at most 3 seconds for the others: a rank that says nothing was killed, is stopped or hangs. The meeting point
    is in rank 0's process, so if it does not answer that rank is the one.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    rank, is_lost = dist.get_rank(), bool(_LOST_CONTACT.search(f"{type(error).__name__}: {error}"))
    own = "" if is_lost else f"{type(error).__name__}: {error}"[:_MAX_CHARS]
    words: dict[int, str] = {}
    meeting = threading.Thread(target=_meet, args=(rank, own, is_lost, words), daemon=True, name="last-words")
    meeting.start()
    meeting.join(_SECONDS + 0.5)
    if not is_lost:
        error.add_note(f"this was raised on rank {rank}")
        return
    culprits = {other: text for other, text in sorted(words.items()) if text}
    silent = [other for other in range(dist.get_world_size()) if other not in words and other != rank]
    lines = [f"rank {other} failed: {text}" for other, text in culprits.items()]
    if not culprits and silent:
        where = "0" if 0 in silent and not words.keys() - {rank} else ", ".join(map(str, silent))
        lines.append(f"no word from rank {where}: killed, stopped, or hanging; see its own log")
    for line in lines:
        error.add_note(f"rank {rank} lost contact: {line}")


def _meet(rank: int, own: str, is_lost: bool, words: dict[int, str]) -> None:
    """Leave a word; those who do not know what happened read, rank 0 stays until it was read."""
    deadline = time.monotonic() + _SECONDS
    missing = set(range(dist.get_world_size()))
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(f"{_KEY}{rank}", own)
        while missing and time.monotonic() < deadline and (is_lost or rank == 0):
            for other in [other for other in missing if store.check([f"{_KEY}{other}"])]:
                words[other] = store.get(f"{_KEY}{other}").decode()
                missing.discard(other)
            time.sleep(0.02)
    except RuntimeError:  # the meeting point is gone, and with it rank 0
        return
