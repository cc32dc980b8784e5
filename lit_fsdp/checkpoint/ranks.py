"""The processes that save or load together, and how a failure on one becomes an error on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from lit_fsdp.errors import CheckpointError, ConfigError, DataError

T = TypeVar("T")
MEETING_SECONDS = 120.0
"""How long hosts are waited for that do not meet."""


class Ranks:
    """This process among those of ``group``, by default of all ranks; alone when there is no process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self._together else 0
        self.size = dist.get_world_size(group) if self._together else 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def run(self, what: str, step: Callable[[], T]) -> list[T]:
        """The results of ``step`` of all ranks, by rank; one that is collective must be reached by all.

        Raises:
            CheckpointError: On every rank when ``step`` failed on any; names ``what``, the ranks and what failed.
        """
        own: BaseException | None = None
        mine: Any = None
        try:
            mine = step()
        except BaseException as error:  # also Ctrl-C: the others must not wait for this rank
            own = error
        everyone: list[Any] = [(None if own is None else reason(own), mine)]
        if self._together:
            everyone *= self.size
            try:
                dist.all_gather_object(everyone, everyone[0], group=self.group)
            except RuntimeError as error:
                raise self.lost(what, error) from error
        failed = {rank: text for rank, (text, _) in enumerate(everyone) if text is not None}
        if failed:
            raise self.error(what, failed, own) from own
        return [value for _, value in everyone]

    def own(self, what: str, step: Callable[[], T]) -> T:
        """The result of ``step`` of this rank alone, once it has succeeded on all; see :meth:`run`."""
        kept: list[T] = []
        self.run(what, lambda: kept.append(step()))
        return kept[0]

    def first(self, what: str, step: Callable[[], T]) -> T:
        """The result of ``step`` on rank 0, which alone runs it, on every rank; or its error if it is one of ours."""

        def attempt() -> T | Exception:
            try:
                return step()
            except (CheckpointError, ConfigError, DataError) as error:
                return error

        # alone, as in what :meth:`run` gathers the other ranks have as much room as rank 0 takes
        found: list[Any] = [self.own(what, lambda: attempt() if self.is_first else None)]
        if self._together:
            try:
                dist.broadcast_object_list(found, group=self.group, group_src=0)
            except RuntimeError as error:
                raise self.lost(what, error) from error
        if isinstance(found[0], Exception):
            raise found[0]
        result: T = found[0]
        return result

    def error(self, what: str, failed: Mapping[int, str], own: BaseException | None) -> BaseException:
        """What to raise here when some ranks have failed, with a line of each; an interrupt stays what it is."""
        if own is not None and (not isinstance(own, Exception) or (self.size == 1 and type(own) is CheckpointError)):
            return own
        return CheckpointError(f"{what} failed:\n" + "\n".join(f"  rank {r}: {failed[r]}" for r in sorted(failed)))

    def lost(self, what: str, error: RuntimeError) -> CheckpointError:
        """The error of a collective that another rank did not finish."""
        text = str(error).partition(". ")[0]  # gloo adds advice for its own developers
        return CheckpointError(f"{what}: rank {self.rank} lost contact with another rank: {text}")


def meet_on_hosts(seconds: float) -> tuple[dist.ProcessGroup | None, str]:
    """A group of all ranks by gloo, for which no device waits; or on all of them none, and why not; collective.

    Its collectives wait ``seconds`` for a rank. Gloo goes over what host names stand for, or ``GLOO_SOCKET_IFNAME``,
    where a rank may fail at once while others wait for it.
    """
    group: Any = None  # torch's annotation also has a number, for ranks outside of it

    def attempt() -> str:
        nonlocal group
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=min(seconds, MEETING_SECONDS)))
            dist.barrier(group=group)  # connections may be made as late as that
            _set_pg_timeout(timedelta(seconds=seconds), group)
        except RuntimeError as error:
            return reason(error)
        return ""

    everyone = Ranks().run("meeting on the hosts", attempt)
    why = next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text), "")
    if why and group is not None:
        dist.destroy_process_group(group)
    return None if why else group, why


def reason(failure: BaseException) -> str:
    """One line for an exception: its text, with its type unless it is one of ours."""
    return str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
