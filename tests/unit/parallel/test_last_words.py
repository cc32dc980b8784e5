"""Who ended a run, as the survivors learn it: from the words of others, from silence, from a meeting point gone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lit_fsdp.parallel import last_words
from lit_fsdp.parallel.signs_of_life import SignsOfLife

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
        monkeypatch.setattr(last_words, "_LOOKS", 10)
        monkeypatch.setattr(last_words, "seconds_between", lambda world: 0.0)
        monkeypatch.setattr("socket.gethostname", lambda: f"node{rank // 2}")

    return be


@pytest.fixture
def store() -> Any:
    found = dist.HashStore()
    found.set_timeout(timedelta(seconds=1))
    return found


def explained(error: BaseException) -> list[str]:
    copy = type(error)(*error.args)
    last_words.explain_failure(copy, dist.distributed_c10d._get_default_store())
    return getattr(copy, "__notes__", [])


def test_the_one_that_raised_says_so_and_the_others_repeat_it(as_rank: Any, store: Any) -> None:
    as_rank(1, store)
    assert explained(ValueError("no such row")) == ["this was raised on rank 1 (node0)"]
    as_rank(2, store)
    assert explained(LOST) == ["rank 2 (node1) lost contact: rank 1 failed: ValueError: no such row"]


def test_silence_is_named_with_its_node(as_rank: Any, store: Any) -> None:
    for rank in (0, 2):
        as_rank(rank, store)
        SignsOfLife(rank, 3, store, 60.0)._give(0)
    as_rank(1, store)
    explained(LOST)
    as_rank(0, store)
    (note,) = explained(LOST)
    assert note.startswith("rank 0 (node0) lost contact: no word from rank 2 (node1): killed, stopped, hanging or cut")


def test_one_that_still_gives_signs_of_life_is_not_the_one(
    as_rank: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(1, store)
    for rank in (1, 2):
        SignsOfLife(rank, 3, store, 60.0)._give(0)
    as_rank(0, store)
    pause = last_words.time.sleep
    signs = iter(range(1, 1000))

    def wait(seconds: float) -> None:
        SignsOfLife(1, 3, store, 60.0)._give(next(signs))
        pause(seconds)

    monkeypatch.setattr(last_words.time, "sleep", wait)
    (note,) = explained(LOST)
    assert "no word from rank 2 (node0)" in note
    assert "rank 1" not in note


def test_a_meeting_point_that_is_gone_means_rank_0(as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(1, Gone())
    monkeypatch.setenv("MASTER_ADDR", "node7")
    (note,) = explained(LOST)
    assert note.startswith("rank 1 (node0) lost contact: no word from rank 0 (node7): ")


def test_one_process_has_nothing_to_explain(store: Any) -> None:
    last_words.explain_failure(LOST, store)
    last_words.explain_failure(LOST, None)
    assert not hasattr(LOST, "__notes__")


def test_a_machine_that_stood_still_has_looked_before_it_blames(as_rank: Any, store: Any, monkeypatch: Any) -> None:
    """However long it lasted until the first look."""
    as_rank(1, store)
    explained(ValueError("no such row"))
    as_rank(2, store)
    monkeypatch.setattr(last_words, "_SECONDS", -100.0)
    monkeypatch.setattr(last_words, "seconds_between", lambda world: -100.0)
    monkeypatch.setattr(last_words.threading.Thread, "join", _whole(last_words.threading.Thread.join))
    assert explained(LOST) == ["rank 2 (node1) lost contact: rank 1 failed: ValueError: no such row"]


def _whole(join: Any) -> Any:
    return lambda thread, timeout=None: join(thread, 60)
