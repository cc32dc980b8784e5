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
