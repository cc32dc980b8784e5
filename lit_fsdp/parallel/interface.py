"""Which network interface gloo talks over.

gloo takes the address that this host's name resolves to, and the loopback interface where that is none of its own, as
on hosts whose /etc/hosts says 127.0.1.1. The ranks of other nodes then cannot connect, and wait.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import logging
import os
import re
import socket

_log = logging.getLogger(__name__)
_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def choose_interface(address: str, port: int) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` to the interface that leads to rank 0 where gloo would take the loopback one.

    Nothing is done where the variable is set, where this host's name resolves to an address of its own, or where the
    way to rank 0 is the loopback interface itself; on rank 0's own node that to the last node of a SLURM step counts.

    Args:
        address: Of rank 0, as this node knows it.
        port: Any; nothing is sent.
    """
    if os.environ.get(_VARIABLE) or _name_is_usable():
        return
    own = _address_towards(address, port) or _address_towards(_last_node(), port)
    name = None if own is None else _interface_of(own)
    if name is None:
        return
    os.environ[_VARIABLE] = name
    _log.info(
        "%s=%s (%s, which leads to %s): the name %s resolves to no address that other nodes can reach",
        _VARIABLE,
        name,
        own,
        address,
        socket.gethostname(),
    )


def _name_is_usable() -> bool:
    """Whether the first address of this host's name that is its own is one that others can reach; gloo takes it."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, _, _, _, address in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((address[0], 0, *address[2:]))
        except OSError:
            continue
        return not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    return False


def _last_node() -> str:
    """The last node of this SLURM step; elsewhere this host."""
    last = re.split(r",(?![^\[]*\])", os.environ.get("SLURM_STEP_NODELIST", ""))[-1]
    return re.sub(r"\[(?:[^\]]*[,-])?(\d+)\]", r"\1", last) or "127.0.0.1"


def _address_towards(address: str, port: int) -> str | None:
    """This host's own address on the way there; ``None`` if there is no way, or it does not leave the host."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # of a datagram socket: looks for the route, sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if ipaddress.ip_address(own).is_loopback else own


def _interface_of(own: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", name.encode()[:15].ljust(40, b"\0"))
            try:
                fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # one without an IPv4 address
                continue
            if socket.inet_ntoa(request.tobytes()[20:24]) == own:
                return name
    return None
