"""Whether the samples of a pack see each other: other tokens in some of them, and what changes in the rest.

Shapes: B packs, T tokens of each, N sequences of all packs (samples and padding), R rounds, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb

import torch


def num_rounds(num_sequences: int) -> int:
    """Fewest rounds in which, for every ordered pair of sequences, the first is changed once while the second is not.

    Source: Sperner, Ein Satz über Untermengen einer endlichen Menge, 1928: at most C(R, R // 2) sets of rounds hold
    none of each other.
    """
    rounds = 0
    while comb(rounds, rounds // 2) < num_sequences:
        rounds += 1
    return rounds


def changed_in(num_sequences: int, rounds: int) -> torch.Tensor:
    """Which sequences are changed in which round, bool (R, N); ``rounds`` >= :func:`num_rounds`."""
    changed = torch.zeros(rounds, num_sequences, dtype=torch.bool)
    for sequence, members in zip(range(num_sequences), combinations(range(rounds), rounds // 2), strict=False):
        changed[list(members), sequence] = True
    return changed


def sequence_numbers(positions_BT: torch.Tensor) -> torch.Tensor:
    """The sequence each token belongs to, int64 (B, T), counted over all packs; positions restart with a sequence."""
    begins_BT = torch.ones_like(positions_BT, dtype=torch.bool)
    begins_BT[:, 1:] = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    return begins_BT.flatten().cumsum(0).reshape(positions_BT.shape) - 1


def other_ids(ids_BT: torch.Tensor) -> torch.Tensor:
    """Another id for every token, of those that the batch holds anyway; (B, T).

    Not the next one: ids that follow each other may be tokens just added, whose embeddings are all the same.
    """
    known = ids_BT.unique()
    if len(known) == 1:
        return torch.where(ids_BT > 0, ids_BT - 1, ids_BT + 1)
    return known[(torch.searchsorted(known, ids_BT) + len(known) // 2) % len(known)]


def moved(positions_BT: torch.Tensor) -> torch.Tensor:
    """For every place the place whose token is put there when the first sequence of a pack goes behind the others.

    int64 (B, T), an index into T; the last sequence, which may be padding, stays where it is if there are three.
    """
    order = torch.arange(positions_BT.shape[1], device=positions_BT.device).repeat(len(positions_BT), 1)
    for b, numbers in enumerate(sequence_numbers(positions_BT)):
        first, last = (numbers == numbers[0]).sum(), (numbers == numbers[-1]).sum()
        end = len(numbers) - (last if numbers[-1] - numbers[0] >= 2 else 0)
        order[b, :end] = order[b, :end].roll(-int(first))
    return order


@dataclass
class Worst:
    """The largest change of what should not have changed, so far."""

    difference: float = 0.0
    """‖Δ‖ / ‖h‖ of the last hidden states of one sequence; exactly 0 if all are bit-equal."""
    sequence: int = -1
    blind: int = -1
    """A sequence that was changed and whose states did not, so that nothing would have been noticed; else -1."""

    def compare(
        self, before_BTD: torch.Tensor, after_BTD: torch.Tensor, numbers_BT: torch.Tensor, changed_N: torch.Tensor
    ) -> None:
        """Note the sequences that differ though they were not changed, and those that were and do not differ."""
        change_N = torch.zeros(len(changed_N), dtype=torch.float64, device=before_BTD.device)
        size_N = change_N.clone()
        for before_TD, after_TD, numbers_T in zip(before_BTD, after_BTD, numbers_BT, strict=True):  # bounds the copies
            before = before_TD.double()
            change_N.index_add_(0, numbers_T, (after_TD.double() - before).square().sum(dim=1))
            size_N.index_add_(0, numbers_T, before.square().sum(dim=1))
        relative_N = (change_N / size_N.clamp(min=1e-300)).sqrt().nan_to_num(nan=float("inf"))
        changed_N = changed_N.to(relative_N.device)
        kept_N = relative_N.masked_fill(changed_N, 0.0)
        if float(kept_N.max()) > self.difference:
            self.difference, self.sequence = float(kept_N.max()), int(kept_N.argmax())
        still_N = changed_N & (relative_N == 0)
        if still_N.any():
            self.blind = int(still_N.nonzero()[0])
