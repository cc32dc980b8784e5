"""Who ended a run, as the survivors learn it: from the words of others, from silence, from a meeting point gone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lit_fsdp.parallel import last_words

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5551")


class Gone:
    """A store whose host has died."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("failed to recv, got 0 bytes")


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``as_rank(rank, store)``: this process is that rank of three."""

    def be(rank: int, store: Any) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(last_words, "_SECONDS", 0.2)

    return be


@pytest.fixture
def store() -> Any:
    found = dist.HashStore()
    found.set_timeout(timedelta(seconds=1))
    return found


def explained(error: BaseException) -> list[str]:
    copy = type(error)(*error.args)
    last_words.explain_failure(copy)
    return getattr(copy, "__notes__", [])


def test_the_one_that_raised_says_so_and_the_others_repeat_it(as_rank: Any, store: Any) -> None:
    as_rank(1, store)
    assert explained(ValueError("no such row")) == ["this was raised on rank 1"]
    as_rank(2, store)
    assert explained(LOST) == ["rank 2 lost contact: rank 1 failed: ValueError: no such row"]


def test_silence_is_named(as_rank: Any, store: Any) -> None:
    as_rank(2, store)
    explained(LOST)
    as_rank(0, store)
    (note,) = explained(LOST)
    assert note.startswith("rank 0 lost contact: no word from rank 1: killed, stopped, or hanging")


def test_a_meeting_point_that_is_gone_means_rank_0(as_rank: Any) -> None:
    as_rank(1, Gone())
    (note,) = explained(LOST)
    assert note.startswith("rank 1 lost contact: no word from rank 0: ")


def test_one_process_has_nothing_to_explain() -> None:
    assert explained(LOST) == []
