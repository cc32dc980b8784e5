"""Ranks that save or load together; a failure on one rank raises an error on all ranks."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from lit_fsdp.errors import CheckpointError, ConfigError, DataError

T = TypeVar("T")
MEETING_SECONDS = 120.0
"""Timeout for hosts to connect."""


class Ranks:
    """This process within ``group``, by default all ranks; a single rank without a process group."""

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
        """Run ``step`` and return the results of all ranks, by rank; all ranks must reach a collective ``step``.

        Raises:
            CheckpointError: On every rank if ``step`` failed on any rank; names ``what``, the ranks and their errors.
        """
        own: BaseException | None = None
        mine: Any = None
        try:
            mine = step()
        except BaseException as error:  # also Ctrl-C: other ranks must not wait for this one
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
        """Run ``step`` and return the result of this rank, once all ranks have succeeded; see :meth:`run`."""
        kept: list[T] = []
        self.run(what, lambda: kept.append(step()))
        return kept[0]

    def first(self, what: str, step: Callable[[], T]) -> T:
        """Run ``step`` only on rank 0, and return its result, or raise its project error, on every rank."""

        def attempt() -> T | Exception:
            try:
                return step()
            except (CheckpointError, ConfigError, DataError) as error:
                return error

        # result only on rank 0: for :meth:`run`, every rank would allocate as much as rank 0
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
        """Build the error for failed ranks, with one line per rank; an interrupt is returned unchanged."""
        if own is not None and (not isinstance(own, Exception) or (self.size == 1 and type(own) is CheckpointError)):
            return own
        return CheckpointError(f"{what} failed:\n" + "\n".join(f"  rank {r}: {failed[r]}" for r in sorted(failed)))

    def lost(self, what: str, error: RuntimeError) -> CheckpointError:
        """Build the error for a collective that another rank did not finish."""
        text = str(error).partition(". ")[0]  # gloo appends advice for its developers
        return CheckpointError(f"{what}: rank {self.rank} lost contact with another rank: {text}")


def meet_on_hosts(seconds: float) -> tuple[dist.ProcessGroup | None, str]:
    """Create a gloo group of all ranks, which does not block devices; or return None and the reason; collective.

    Collectives of the group time out after ``seconds``. Gloo connects through host names or ``GLOO_SOCKET_IFNAME``; a
    rank may fail immediately while others wait for it.
    """
    group: Any = None  # torch's annotation includes an int for ranks outside the group

    def attempt() -> str:
        nonlocal group
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=min(seconds, MEETING_SECONDS)))
            dist.barrier(group=group)  # connections may be created only here
            _set_pg_timeout(timedelta(seconds=seconds), group)
        except RuntimeError as error:
            return reason(error)
        return ""

    everyone = Ranks().run("connecting the hosts", attempt)
    why = next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text), "")
    if why and group is not None:
        dist.destroy_process_group(group)
    return None if why else group, why


def reason(failure: BaseException) -> str:
    """Format an exception in one line: its text, with its type unless it is a CheckpointError."""
    return str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
