"""The processes that save or load together, and how a failure on one becomes an error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lit_fsdp.errors import CheckpointError

T = TypeVar("T")


class RankFailures(Exception):
    """What went wrong, by rank, where a collective has told every rank already."""

    def __init__(self, by_rank: dict[int, str]) -> None:
        self.by_rank = by_rank
        super().__init__(by_rank)


class Ranks:
    """This process among those of ``group``; alone when there is no process group.

    Args:
        group: Default: all ranks, if ``torch.distributed`` is initialized.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.together else 0
        self.size = dist.get_world_size(group) if self.together else 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def run(self, what: str, step: Callable[[], T]) -> list[T]:
        """The results of ``step`` of all ranks, by rank.

        Args:
            what: Begins the error: what was being done, and where.
            step: Runs on every rank. If it is collective itself, all ranks must reach the collective.

        Raises:
            CheckpointError: On every rank when ``step`` failed on any; names the ranks and what failed.
        """
        failure: BaseException | None = None
        result: T | None = None
        try:
            result = step()
        except BaseException as error:  # also Ctrl-C: the others must not wait for this rank
            failure = error
        failed: dict[int, str] = {}
        results: list[Any] = []
        for failures, value in self._exchange((_described(failure, self.rank), result), what):
            failed.update(failures)
            results.append(value)
        if not failed:
            return results
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if self.size == 1 and isinstance(failure, CheckpointError):
            raise failure
        text = "\n".join(f"  rank {rank}: {reason}" for rank, reason in sorted(failed.items()))
        raise CheckpointError(f"{what} failed:\n{text}") from failure

    def first(self, what: str, step: Callable[[], T]) -> T:
        """The result of ``step`` on rank 0, which alone runs it, on every rank.

        Raises:
            CheckpointError: On every rank when ``step`` failed.
        """
        results = self.run(what, lambda: step() if self.is_first else None)
        return results[0]  # type: ignore[return-value]

    def add(self, values: list[float], what: str) -> list[float]:
        """Sums over all ranks, through the CPU; ``what`` begins the error when another rank is lost."""
        if not self.together:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        try:
            dist.all_reduce(total, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(f"{what}: {self._lost(error)}") from error
        return total.tolist()

    def _lost(self, error: RuntimeError) -> str:
        text = str(error).partition(". ")[0]  # gloo adds advice for its own developers
        return f"rank {self.rank} lost contact with another rank: {text}"

    def _exchange(self, mine: tuple[dict[int, str], Any], what: str) -> list[tuple[dict[int, str], Any]]:
        if not self.together:
            return [mine]
        everyone: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(everyone, mine, group=self.group)
        except RuntimeError as error:
            lost = self._lost(error)
            text = lost.partition("another rank: ")[2]
            own = "".join(f"\n  rank {rank}: {reason}" for rank, reason in mine[0].items() if text not in reason)
            raise CheckpointError(f"{what}: {lost}{own}") from error
        return everyone


def _described(failure: BaseException | None, rank: int) -> dict[int, str]:
    if failure is None:
        return {}
    if isinstance(failure, RankFailures):
        return failure.by_rank
    return {rank: reason(failure)}


def reason(failure: BaseException) -> str:
    """One line for an exception: its text, with its type unless it is one of ours."""
    return str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
