"""Two hosts on one machine: network namespaces with addresses and host names of their own, joined by a cable."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.forks import server

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NAMES = ("hosta", "hostb")
"""Each host knows its own alone, as 127.0.1.1, as Debian writes it."""
_count = itertools.count()


class Hosts:
    """The namespaces, and what runs in them.

    Args:
        folder: For the output of the processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        number = next(_count)  # of an attempt before, something may be left
        self._spaces = [f"lf{os.getpid()}{side}{number}" for side in "ab"]
        self._ends = [f"v{os.getpid()}{side}{number}" for side in "ab"]
        self._running: list[subprocess.Popen[bytes]] = []

    def connect(self) -> None:
        for space in self._spaces:
            _ip("netns", "add", space)
        _ip("link", "add", self._ends[0], "type", "veth", "peer", "name", self._ends[1])
        for space, end, address in zip(self._spaces, self._ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", space)
            _ip("-n", space, "address", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                _ip("-n", space, "link", "set", device, "up")

    def set_cable(self, state: str) -> None:
        """``down`` or ``up``; nobody is told of packets that do not arrive."""
        for space, end in zip(self._spaces, self._ends, strict=True):
            _ip("-n", space, "link", "set", end, state)

    def start(self, host: int, name: str, *words: str, **env: str) -> subprocess.Popen[bytes]:
        """A process on a host, in a group of its own; its output goes to :meth:`output`."""
        known = self.folder / f"hosts-{host}"
        known.write_text(f"127.0.0.1 localhost\n127.0.1.1 {NAMES[host]}\n")
        # ip netns exec has made a mount namespace, so that nobody else sees this file
        inside = f'hostname {NAMES[host]} && mount --bind {known} /etc/hosts && exec "$@"'
        line = ["ip", "netns", "exec", self._spaces[host], "unshare", "--uts", "sh", "-c", inside, "sh", *words]
        own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        own["GLOO_SOCKET_IFNAME"] = self._ends[host]  # gloo would take the loopback interface
        with (self.folder / f"{name}-{host}").open("wb") as file:
            process = subprocess.Popen(
                line,
                stdout=file,
                stderr=file,
                env={**os.environ, **own, **env},
                cwd=self.folder,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def torchrun(self, name: str, meeting: str, processes: int, *words: str) -> list[subprocess.Popen[bytes]]:
        """``torchrun -m lit_fsdp ...`` on both hosts; ``meeting``: ``static`` or ``c10d``; ranks have their imports."""
        started = []
        for host, address in enumerate(ADDRESSES):
            line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(processes)]
            if meeting == "static":
                line += ["--node-rank", str(host), "--master-addr", ADDRESSES[0], "--master-port", "29500"]
            else:
                line += ["--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400"]
                # it would look for the address among those of the host's own name
                line += ["--local-addr", address, "--rdzv-conf", f"is_host={int(host == 0)}"]
            started.append(self.start(host, name, *line, "-m", "lit_fsdp", *words, PYTHON_EXEC=server().python))
        return started

    def ranks(self) -> list[int]:
        """Processes that train, on both hosts; torchrun's own are none of them."""
        found = []
        for space in self._spaces:
            for pid in subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(OSError):  # it has just ended
                    words = Path("/proc", pid, "cmdline").read_bytes()
                    if b"lit_fsdp\0fit" in words and b"torch.distributed.run" not in words:
                        found.append(int(pid))
        return found

    def end(self) -> None:
        """End whatever still runs."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()

    def output(self, name: str) -> list[str]:
        """What was said on each host so far."""
        return [(self.folder / f"{name}-{host}").read_text(errors="replace") for host in range(2)]

    def close(self) -> None:
        self.end()
        for space in self._spaces:
            for pid in subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split():
                with contextlib.suppress(ProcessLookupError):  # ranks, which torchrun puts into sessions of their own
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def ended(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Exit codes once all have ended; ``None`` for those that still run when the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    return [process.poll() for process in processes]


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Both, connected; skipped with the reason where that needs more rights or programs than there are."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("NO TEST OVER TWO HOSTS: needs root and the programs ip (iproute2) and unshare")
    hosts = Hosts(folder)
    try:
        hosts.connect()
        yield hosts
    finally:
        hosts.close()
