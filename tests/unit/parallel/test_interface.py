"""gloo gets an interface that leads to the other nodes where it would take the loopback one, and only there."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from lit_fsdp.parallel import interface
from lit_fsdp.parallel.interface import choose_interface


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``host(name_resolves_to, own)``: this host's name resolves to that, and its way to rank 0 begins at ``own``."""

    def be(address: str | None, own: str | None) -> None:
        def resolve(*args: Any, **kwargs: Any) -> list[Any]:
            if address is None:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        monkeypatch.setattr(interface, "_address_towards", lambda address, port: own)
        monkeypatch.setattr(interface, "_interface_of", lambda own: "eth7")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    yield be
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


@pytest.mark.parametrize("address", ["127.0.1.1", "192.0.2.1", None])  # the second is none of this host's own
def test_a_name_that_leads_nowhere(host: Any, address: str | None) -> None:
    host(address, "10.1.2.3")
    choose_interface("10.1.2.1", 29500)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_what_is_set_stays(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host("127.0.1.1", "10.1.2.3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    choose_interface("10.1.2.1", 29500)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_on_one_host_the_loopback_interface_is_right(host: Any) -> None:
    host("127.0.1.1", None)
    choose_interface("127.0.0.1", 29500)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_ways_of_this_host() -> None:
    assert interface._address_towards("127.0.0.1", 29500) is None
    assert interface._interface_of("127.0.0.1") == "lo"
    assert interface._interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    ("nodes", "last"),
    [
        ("gpu[01-16]", "gpu16"),
        ("gpu[1-3,7]", "gpu7"),
        ("login,gpu[1-3],cpu5", "cpu5"),
        ("a[1,3],b[2-4]-ib", "b4-ib"),
        ("node2", "node2"),
        ("", "127.0.0.1"),
    ],
)
def test_the_last_node_of_a_step(monkeypatch: pytest.MonkeyPatch, nodes: str, last: str) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
    assert interface._last_node() == last


def test_the_first_node_looks_towards_the_last(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name is rank 0's address, and leads to itself."""
    host("127.0.1.1", None)
    ways = {"node1": None, "node4": "10.1.2.3"}
    monkeypatch.setattr(interface, "_address_towards", lambda address, port: ways[address])
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-4]")
    choose_interface("node1", 29500)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
