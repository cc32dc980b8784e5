"""torchrun over two hosts: where ranks meet, what a cut cable does, and the way back.

The hosts are network namespaces on one machine with addresses and names of their own, joined by a cable.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.dist.forks import server
from tests.runs import losses, whole_steps

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


pytestmark = pytest.mark.timeout(600)
TIMEOUT = 10  # of a collective, in seconds


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two, with a folder that both of them see."""
    with two_hosts(tmp_path) as found:
        yield found


def recipe(folder: Path, steps: int, devices: int = 1, nodes: int = 2, engine: str = "fsdp2") -> list[str]:
    """Words that train a miniature, the same global batches on any number of ranks."""
    strategy = {"engine": engine, "precision": "fp32", "timeout_seconds": TIMEOUT}
    values = {
        "trainer": {
            **{"accelerator": "cpu", "devices": devices, "num_nodes": nodes, "max_steps": steps},
            **{"log_every_n_steps": 1, "default_root_dir": str(folder / "run")},
            "strategy": {"class_path": "lit_fsdp.fsdp_strategy", "init_args": strategy},
        },
        "model": {
            "name": str(ROOT / "configs/model/SmolLM2-135M-Instruct.json"),
            "miniature": True,
            "optim": {"schedule": "constant"},  # the same for any number of steps
        },
        "data": {"train": "generated:64", "max_seq_length": 64, "global_batch_size": 4},
        "checkpoint": {"every_steps": 2},
    }
    path = folder / f"{engine}-{devices}x{nodes}-{steps}.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["fit", "--config", str(path)]


def alone(folder: Path, steps: int) -> dict[int, float]:
    """Losses of the same recipe in one process."""
    folder.mkdir()
    words, env = recipe(folder, steps, nodes=1), {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([server().python, "-m", "lit_fsdp", *words], check=True, cwd=folder, env=env, capture_output=True)
    return losses(folder / "run")


def cut_in_the_middle(hosts: Hosts, folder: Path, processes: int, meeting: str) -> list[str]:
    """What both hosts say when the cable is cut after a few steps."""
    started = hosts.torchrun("cut", meeting, processes, *recipe(folder, 4000, processes))
    deadline = time.monotonic() + 240
    while max(losses(folder / "run"), default=0) < 5:
        assert time.monotonic() < deadline, hosts.output("cut")
        assert ended(started, 0.05) == [None, None], hosts.output("cut")
    hosts.set_cable("down")
    cut = time.monotonic()
    while not all("lost contact" in said for said in hosts.output("cut")):
        assert time.monotonic() - cut < TIMEOUT + 90, hosts.output("cut")
        time.sleep(0.2)
    deadline = time.monotonic() + 150
    while hosts.ranks():
        assert time.monotonic() < deadline, hosts.output("cut")
        time.sleep(0.2)
    assert 0 not in ended(started, 0)
    hosts.end()  # agents of torchrun wait for their own meeting point for minutes
    return hosts.output("cut")


@pytest.mark.parametrize(
    ("meeting", "processes"), [("c10d", 1), pytest.param("static", 2, marks=pytest.mark.long("a minute of timeouts"))]
)
def test_a_cut_cable_ends_the_run_and_over_the_mended_one_it_goes_on_to_the_same_losses(
    hosts: Hosts, tmp_path: Path, meeting: str, processes: int
) -> None:
    said = cut_in_the_middle(hosts, tmp_path, processes, meeting)
    assert "rank 0 (hosta) lost contact: " in said[0]
    assert re.search(r"rank \d \(hostb\) lost contact: ", said[1])
    newest = whole_steps(tmp_path / "run", may_hide=True)[-1]
    assert newest >= 4
    hosts.set_cable("up")
    steps = newest + 4
    started = hosts.torchrun("again", meeting, processes, *recipe(tmp_path, steps, processes), "--ckpt_path", "last")
    assert ended(started, 400) == [0, 0], hosts.output("again")
    found, wanted = losses(tmp_path / "run"), alone(tmp_path / "alone", steps)
    assert sorted(found) == list(range(steps))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long("waits until its time is over")
def test_a_rank_that_does_not_come_is_waited_for_with_a_word(hosts: Hosts, tmp_path: Path) -> None:
    words = recipe(tmp_path, 4)
    by_hand = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "NODE_RANK": "0"}
    process = hosts.start(0, "missing", sys.executable, "-m", "lit_fsdp", *words, **by_hand)
    (tmp_path / "missing-1").touch()
    assert ended([process], 120) == [1], hosts.output("missing")
    said = hosts.output("missing")[0]
    assert f"hosta still waits for all 2 ranks to meet at 10.77.0.1:29511, at most {TIMEOUT} s" in said
