"""A rank and the others, from the first attempt to reach them to the end of the run.

A mixin in front of a Lightning strategy; it does not import Lightning.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.host import free_port
from lit_fsdp.parallel.arrivals import Meeting, is_hosted_by_agent, own_store, watched
from lit_fsdp.parallel.interface import choose_interface
from lit_fsdp.parallel.last_words import explain_failure
from lit_fsdp.parallel.signs_of_life import SignsOfLife

_FILES = 1024
"""Open files of a process that talks to nobody, amply."""


class ContactWithRanks:
    """Says what the start of the process group waits for, and keeps giving signs of life until the teardown."""

    config: StrategyConfig
    cluster_environment: Any
    num_nodes: int
    num_processes: int
    node_rank: int
    local_rank: int
    contact_store: Any = None
    """Where signs of life and last words are left."""
    _launcher: Any = None
    _signs: SignsOfLife | None = None

    def choose_port(self) -> None:
        """Before further processes are started here: where they meet, unless ``MASTER_PORT`` says it.

        Lightning's own choice may be given to an outgoing connection before rank 0 listens (:func:`free_port`).
        """
        if not self.cluster_environment.creates_processes_externally and "STANDALONE_PORT" not in os.environ:
            os.environ.setdefault("MASTER_PORT", str(free_port()))

    @contextmanager
    def meeting_others(self) -> Iterator[None]:
        """Around Lightning's start of the process group."""
        world = self.num_nodes * self.num_processes
        meeting = Meeting(
            rank=self.node_rank * self.num_processes + self.local_rank,
            world=world,
            local_rank=self.local_rank,
            address=self.cluster_environment.main_address,
            port=self.cluster_environment.main_port,
            timeout_seconds=self.config.timeout_seconds,
            hosted_by_agent=is_hosted_by_agent(),
        )
        if meeting.rank == 0:
            _allow_open_files(_FILES + 3 * world)  # two or three connections of each rank end here
        if self.num_nodes > 1:
            choose_interface(meeting.address, meeting.port)
        with watched(meeting):
            yield
        if world > 1:
            self.contact_store = own_store(meeting.address, meeting.port)
            self._signs = SignsOfLife(meeting.rank, world, self.contact_store, self.config.timeout_seconds)
            self._signs.start()

    def explain(self, exception: Exception) -> None:
        """Name the rank that ended the run (:func:`explain_failure`)."""
        if procs := getattr(self._launcher, "procs", None):
            # Lightning's observer of this list would kill this process meanwhile, for a child that has ended
            self._launcher.procs = list(procs)
            procs.clear()
        explain_failure(exception, self.contact_store)

    def on_exception(self, exception: BaseException) -> None:
        """Nothing more is asked of a store that may be out of reach."""
        if self._signs is not None:
            self._signs.stop(is_lost=True)
        super().on_exception(exception)  # type: ignore[misc]

    def teardown(self) -> None:
        """The others do not miss this rank from here on."""
        if self._signs is not None:
            self._signs.stop()
        super().teardown()  # type: ignore[misc]


def _allow_open_files(needed: int) -> None:
    """Raise this process's own limit, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
