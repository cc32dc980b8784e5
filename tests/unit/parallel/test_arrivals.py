"""What a rank waits for before the first collective is said in time, and in the error at the end."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel import arrivals
from lit_fsdp.parallel.arrivals import Meeting, own_store, ranges, unreachable, watched
from tests.ports import own_port


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_QUIET_SECONDS", 0.2)
    monkeypatch.setattr(arrivals, "_REMIND_SECONDS", 0.2)
    monkeypatch.setattr(arrivals, "_POLL_SECONDS", 0.02)


@pytest.fixture
def port() -> int:
    """One that nobody listens on."""
    return own_port()


@pytest.fixture
def store() -> Any:
    """Where rank 0 listens."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def meeting(rank: int, port: int, world: int = 4, address: str = "127.0.0.1", **more: Any) -> Meeting:
    return Meeting(rank, world, rank % 2, address, port, 60.0, **more)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nobody_listens(port: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lit_fsdp")

    def start() -> None:
        with watched(meeting(2, port)):
            until(lambda: caplog.records)
            raise RuntimeError("timed out")

    with pytest.raises(RuntimeError, match="timed out") as caught:
        start()
    said = caplog.records[0].getMessage()
    assert said.startswith(f"rank 2 on {socket.gethostname()} cannot reach rank 0 at 127.0.0.1:{port}: nobody listens")
    assert "at most 60 s" in said
    (note,) = caught.value.__notes__
    assert note.startswith(said.partition(" (since")[0])


def test_a_name_that_does_not_resolve(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", fails)
    assert unreachable("node77", port) == "this name does not resolve here (Name or service not known)"


def test_rank_0_names_those_who_are_missing(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lit_fsdp")
    with watched(meeting(3, store.port, 8)), watched(meeting(0, store.port, 8)):
        until(lambda: any("waits for rank 1-2, 4-7: 2 of 8 ranks have come" in r.getMessage() for r in caplog.records))
    said = [record.getMessage() for record in caplog.records]
    assert not any("rank 3" in line.partition(":")[0].partition(" waits")[0] for line in said)  # rank 0 alone says it
    assert said[-1].startswith("the ranks have met after")


def test_a_start_without_trouble_is_silent_and_opens_no_connection(
    store: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "_QUIET_SECONDS", 60.0)
    monkeypatch.setattr(arrivals, "unreachable", lambda *args: pytest.fail("asked"))
    with watched(meeting(0, store.port)):
        assert any(thread.name.startswith("arrivals") for thread in threading.enumerate())
    until(lambda: not any(thread.name.startswith("arrivals") for thread in threading.enumerate()))
    assert caplog.records == []


def test_only_one_rank_of_a_node_speaks(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with watched(meeting(3, port)):
        time.sleep(0.4)
    assert caplog.records == []


def test_under_torchrun_its_agent_is_who_does_not_answer(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with watched(meeting(0, port, hosted_by_agent=True)):
        until(lambda: caplog.records)
    assert "cannot reach torchrun's agent on the first node at" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"), ([4, 3], "3-4")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_a_connection_of_its_own_is_not_held_by_who_waits_in_another(store: Any) -> None:
    """A rank that waits for a key, as in NCCL's first collectives, still gives signs of life."""
    default = dist.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=60), wait_for_workers=False)

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            default.get("never")

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    own = own_store("127.0.0.1", store.port)
    own.set("sign", "3")
    assert own.get("sign") == b"3"
    assert waiting.is_alive()
    store.set("never", "")
    waiting.join()


def test_another_attempt_of_torchrun_does_not_see_the_keys_of_this_one(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_store("127.0.0.1", store.port).set("sign", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not own_store("127.0.0.1", store.port).check(["sign"])


@pytest.mark.parametrize("world", [1, 4])
def test_a_port_that_is_taken_is_said_with_the_way_out(world: int, store: Any) -> None:
    with pytest.raises(ConfigError) as caught, watched(meeting(0, store.port, world)):
        dist.TCPStore("127.0.0.1", store.port, world, True, wait_for_workers=False)
    assert (caught.value.field, caught.value.given.partition(",")[0]) == ("MASTER_PORT", str(store.port))
    assert "another MASTER_PORT" in caught.value.fix
    assert f":{store.port}" in caught.value.fix
    until(lambda: not any(thread.name.startswith("arrivals") for thread in threading.enumerate()))
