"""Doctors that srun or torchrun started on several nodes exchange what they found, by plain TCP and JSON.

Nothing of torch: they meet also where torch is missing, differs or cannot connect. Rank 0 listens; the others send one
line each and get the lines of all. A rank that does not come in time is ``None``; nobody waits longer than that.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lit_fsdp.errors import ConfigError

_RETRY_SECONDS = 0.2
_REACH_SECONDS = 5.0
_MARGIN_SECONDS = 10.0
_BYTES = 1 << 16
_MAX_LINE = 1 << 24
Message = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """This process among those that were started."""

    rank: int
    world: int
    local_rank: int
    nodes: int
    address: str
    """Where rank 0 listens."""
    port: int
    launch: str
    """Tells this start from others that run at the same time."""


def started_as(environment: Mapping[str, str]) -> Place | None:
    """Which one of several processes this is, or ``None`` where it is the only one.

    Raises:
        ConfigError: srun started it but does not say on which nodes.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        world, local = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
        port = 20000 + (int(environment["MASTER_PORT"]) + 4817) % 10000  # its own is the agent's
        launch = f"torchrun-{environment['TORCHELASTIC_RUN_ID']}"
        rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
        found = Place(rank, world, local_rank, world // local, environment["MASTER_ADDR"], port, launch)
        return found if world > 1 else None
    if "SLURM_STEP_ID" not in environment or int(environment.get("SLURM_STEP_NUM_TASKS") or 1) == 1:
        return None
    job, step = environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_SRUN_COMM_HOST", "")
    first = first_node(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "") or address
    if not first:
        raise ConfigError("SLURM_STEP_NODELIST", "not set", "the nodes of the step", "srun lit-fsdp doctor --nodes N")
    return Place(
        rank=int(environment["SLURM_PROCID"]),
        world=int(environment["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        nodes=int(environment.get("SLURM_STEP_NUM_NODES") or 1),
        address=first,
        port=20000 + (int(job) * 7 + int(step) * 13 + 4817) % 10000,
        launch=f"srun-{job}.{step}",
    )


def first_node(nodes: str) -> str:
    """The first name in SLURM's short form: ``a[03-05,7],b1`` → ``a03``."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    number = rest.replace("-", ",").replace("]", ",").split(",")[0]
    return f"{head}{number}"


class Meeting:
    """Rounds in which every rank gives one message and gets those of all; enter it on every rank.

    Args:
        place: This process.
        seconds: That rank 0 waits for the others in the first round.

    Raises:
        ConnectionError: Rank 0 cannot be reached, or is gone.
        OSError: Rank 0's port is taken.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.seconds = place, seconds
        self._server: socket.socket | None = None
        self._peers: dict[int, _Line] = {}
        self._up: _Line | None = None
        self._expected = set(range(1, place.world))

    def __enter__(self) -> Meeting:
        if self.place.rank == 0:
            self._server = socket.create_server(("", self.place.port), backlog=2 * self.place.world + 64)
        else:
            self._up = _Line(self._connect())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for line in (*self._peers.values(), *([self._up] if self._up else [])):
            line.close()
        if self._server is not None:
            self._server.close()

    def exchange(self, mine: Message, seconds: float) -> list[Message | None]:
        """The messages of all ranks, in their order.

        Args:
            mine: Anything JSON can hold.
            seconds: That rank 0 waits; it answers with ``None`` for those who did not send in time.
        """
        if self._up is not None:
            self._up.send({"rank": self.place.rank, "launch": self.place.launch, "message": mine})
            answer = self._up.receive(time.monotonic() + seconds + self.seconds + _MARGIN_SECONDS)
            if answer is None:
                raise ConnectionError(f"rank 0 at {self.place.address}:{self.place.port} does not answer any more")
            return answer["all"]
        found: dict[int, Message] = {0: {**mine, "address": self.place.address}}
        self._collect(found, time.monotonic() + seconds)
        self._expected = set(self._peers)  # who did not come is not waited for again, and is told so
        if self._server is not None:
            self._server.close()
            self._server = None
        everyone = [found.get(rank) for rank in range(self.place.world)]
        for line in self._peers.values():
            with contextlib.suppress(OSError):  # one that is gone; its place is None in the next round
                line.send({"all": everyone})
        return everyone

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self.seconds
        while True:
            try:
                return socket.create_connection((self.place.address, self.place.port), timeout=_REACH_SECONDS)
            except OSError as error:
                if time.monotonic() > deadline:
                    where = f"{self.place.address}:{self.place.port}"
                    raise ConnectionError(f"rank 0 at {where} cannot be reached: {error.strerror or error}") from error
            time.sleep(_RETRY_SECONDS)

    def _collect(self, found: dict[int, Message], deadline: float) -> None:
        """Read until every rank has sent one line, is gone, or the time is over."""
        strangers: list[_Line] = []
        while self._expected - set(found) and time.monotonic() < deadline:
            with selectors.DefaultSelector() as selector:
                if self._server is not None:
                    selector.register(self._server, selectors.EVENT_READ, None)
                waiting = [line for rank, line in self._peers.items() if rank not in found]
                for line in (*waiting, *strangers):
                    selector.register(line.socket, selectors.EVENT_READ, line)
                ready = selector.select(min(1.0, max(0.0, deadline - time.monotonic())))
            for key, _ in ready:
                if key.data is None:
                    assert self._server is not None
                    accepted, address = self._server.accept()
                    strangers.append(_Line(accepted, str(address[0])))
                else:
                    self._read(key.data, strangers, found)
        for line in strangers:
            line.close()

    def _read(self, line: _Line, strangers: list[_Line], found: dict[int, Message]) -> None:
        is_open, text = line.read_some()
        sender = next((rank for rank, peer in self._peers.items() if peer is line), None)
        if text is not None:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not one of us
                hello = json.loads(text)
                rank = int(hello["rank"])
                if hello["launch"] == self.place.launch and 0 < rank < self.place.world:
                    found[rank] = {**hello["message"], "address": line.address}
                    if sender is None:
                        strangers.remove(line)
                        self._peers[rank] = line
                    return
        if not is_open or text is not None:
            line.close()
            if sender is None:
                strangers.remove(line)
            else:
                self._expected.discard(sender)
                del self._peers[sender]


class _Line:
    """A connection that carries one JSON object per line."""

    def __init__(self, connected: socket.socket, address: str = "") -> None:
        self.socket, self.address = connected, address
        self._buffer = b""

    def send(self, value: Message) -> None:
        self.socket.settimeout(_REACH_SECONDS)
        self.socket.sendall(json.dumps(value).encode() + b"\n")

    def read_some(self) -> tuple[bool, bytes | None]:
        """(whether it is still open, one whole line if there is one)."""
        try:
            data = self.socket.recv(_BYTES)
        except OSError:
            return False, None
        self._buffer += data
        head, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return bool(data) and len(self._buffer) < _MAX_LINE, None
        self._buffer = rest
        return True, head

    def receive(self, deadline: float) -> Message | None:
        """The next object; ``None`` if the other end is gone or silent."""
        while (left := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left)
            is_open, text = self.read_some()
            if text is not None:
                return json.loads(text)
            if not is_open:
                return None
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()


@contextlib.contextmanager
def listening() -> Any:
    """A port that others can try to reach while this lasts; connections wait in its queue and are never answered."""
    with socket.create_server(("", 0), backlog=1024) as server:
        yield int(server.getsockname()[1])


def unreachable(targets: Mapping[str, tuple[str, int]], seconds: float = _REACH_SECONDS) -> dict[str, str]:
    """Why each of those nodes cannot be reached that cannot.

    Args:
        targets: Address and port by node.
        seconds: Per connection.
    """

    def attempt(target: tuple[str, int]) -> str | None:
        try:
            socket.create_connection(target, timeout=seconds).close()
        except OSError as error:
            return str(error.strerror or error)
        return None

    with ThreadPoolExecutor(32) as pool:
        results = dict(zip(targets, pool.map(attempt, targets.values()), strict=True))
    return {node: why for node, why in results.items() if why is not None}
