"""Rank 0 notices who falls silent, who comes back and who has ended."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lit_fsdp.parallel import signs_of_life
from lit_fsdp.parallel.signs_of_life import SignsOfLife, signs

WORLD = 4


@pytest.fixture
def store() -> Any:
    found = dist.HashStore()
    found.set_timeout(timedelta(seconds=1))
    return found


@pytest.fixture
def ranks(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[SignsOfLife]:
    """Four on two nodes; nothing runs by itself."""
    found = []
    for rank in range(WORLD):
        monkeypatch.setattr("socket.gethostname", lambda rank=rank: f"node{rank // 2 + 1}")
        found.append(SignsOfLife(rank, WORLD, store, 1800.0))
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(signs_of_life.time, "monotonic", lambda: now[0])
    return now


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_silent_rank_is_named_once_and_said_to_be_back(
    ranks: list[SignsOfLife], clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lit_fsdp")
    for count in range(30):
        for rank in (0, 1, 2):
            ranks[rank]._give(count)
        if count < 2:
            ranks[3]._give(count)
        ranks[0].look()
        clock[0] += 1.0
    (line,) = said(caplog)
    assert line.startswith("rank 3 on node2 has given no sign of life for 21 s: killed, stopped, or its node cannot be")
    assert "at most 1800 s (timeout_seconds)" in line
    ranks[3]._give(2)
    ranks[0].look()
    assert said(caplog) == ["rank 3 on node2 is back"]


def test_one_that_has_ended_is_not_missed(
    ranks: list[SignsOfLife], clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    for rank in ranks:
        rank._give(0)
    for rank in ranks[1:]:
        rank.stop()
    ranks[0].look()
    clock[0] += 300.0
    ranks[0]._give(1)
    ranks[0].look()
    assert said(caplog) == []


def test_ranks_that_have_given_none_yet_are_left_out(ranks: list[SignsOfLife], store: Any) -> None:
    assert signs(store, range(WORLD)) == {}
    ranks[2]._give(7)
    assert signs(store, range(WORLD)) == {2: "node2 7"}


def test_a_store_that_is_gone_is_said_unless_this_rank_ends_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    monkeypatch.setattr(signs_of_life, "_GRACE_SECONDS", 0.0)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    rank = SignsOfLife(3, WORLD, Gone(), 1800.0)
    rank._pause = 0.0
    rank._run()
    (line,) = said(caplog)
    assert line.endswith("rank 0 at node1 does not answer any more: Broken pipe")
    rank.stop()  # raises nothing
    rank._run()
    assert said(caplog) == []


def test_more_ranks_write_less_often() -> None:
    assert signs_of_life.seconds_between(4) == 1.0
    assert signs_of_life.seconds_between(4096) == 8.0


def test_a_node_is_one_line(ranks: list[SignsOfLife], clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lit_fsdp")
    for rank in ranks:
        rank._give(0)
    for count in range(30):
        for rank in (0, 1):
            ranks[rank]._give(count)
        ranks[0].look()
        clock[0] += 1.0
    (line,) = said(caplog)
    assert line.startswith("rank 2-3 on node2 has given no sign of life for")
