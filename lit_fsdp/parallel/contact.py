"""A rank and the others, from the first attempt to reach them to the end of the run.

A mixin in front of a Lightning strategy; it does not import Lightning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lit_fsdp.config.sharding import StrategyConfig
from lit_fsdp.parallel.arrivals import Meeting, is_hosted_by_agent, watched
from lit_fsdp.parallel.interface import choose_interface
from lit_fsdp.parallel.signs_of_life import SignsOfLife


class ContactWithRanks:
    """Says what the start of the process group waits for, and keeps giving signs of life until the teardown."""

    config: StrategyConfig
    cluster_environment: Any
    num_nodes: int
    num_processes: int
    node_rank: int
    local_rank: int
    _signs: SignsOfLife | None = None

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
        if self.num_nodes > 1:
            choose_interface(meeting.address, meeting.port)
        with watched(meeting):
            yield
        if world > 1:
            store = dist.distributed_c10d._get_default_store()
            self._signs = SignsOfLife(meeting.rank, world, store, self.config.timeout_seconds)
            self._signs.start()

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
