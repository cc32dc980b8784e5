"""Items of a split: its rows alone, or packs of them by best-fit-decreasing, exact, in time that grows with the rows.

Samples are placed from the longest to the shortest, each into the pack with the least room that still takes it. Packs
are kept by the room they have left, and samples of one length are placed together: as the fullest pack that takes one
is still the fullest after it has taken it, a pack takes as many of a length as fit before the next one is looked at.

Source: Johnson, Near-optimal bin packing algorithms, 1973; for packing of training samples arXiv:2404.10830.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from lit_fsdp.config.data import DataConfig, check_sources
from lit_fsdp.data.cache import TokenizedRows, prepare_rows
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.order import check_shares
from lit_fsdp.errors import DataError, require


@dataclass(frozen=True)
class Samples:
    """Items of a split: a row each, with ``pairs`` the chosen row and the rejected one, or the rows of a pack.

    Item i is ``row_ids[offsets[i] : offsets[i + 1]]``, both int64.
    """

    rows: TokenizedRows
    row_ids: np.ndarray
    offsets: np.ndarray
    groups: tuple[int, ...]
    """Items per source of a weighted mix, in the order of the items; else all of them as one group."""
    weights: tuple[float, ...] | None = None
    """Weight of each group; ``None``: every item once per epoch."""
    capacity: int | None = None
    """Tokens per pack; ``None`` without packing."""
    pairs: bool = False

    @cached_property
    def order_fingerprint(self) -> str:
        """Of sources, kept rows, packs and weights: another tokenizer, template or path leaves the order as it was."""
        digest = hashlib.blake2b(json.dumps([self.rows.meta["digests"], self.weights]).encode(), digest_size=16)
        for part in (self.rows.numbers, self.row_ids, self.offsets):
            digest.update(part.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every row of ``row_ids``, int64."""
        return self.rows.lengths[self.row_ids]

    @property
    def num_supervised(self) -> np.ndarray:
        """Supervised tokens of every row of ``row_ids``, int64."""
        return self.rows.num_supervised[self.row_ids].astype(np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def members(self, item: int) -> np.ndarray:
        """Row ids of one item, ascending."""
        return self.row_ids[int(self.offsets[item]) : int(self.offsets[item + 1])]

    def item_tokens(self) -> np.ndarray:
        """Tokens of every item, int64 of shape (items,)."""
        return np.add.reduceat(self.lengths, self.offsets[:-1])


def prepare_samples(config: DataConfig, splits: Sequence[str], encoder: RowEncoder) -> dict[str, Samples]:
    """Tokenize the named splits that the recipe has, or take them from the cache, and plan their items in memory.

    ``data.val_split`` takes the validation rows out of data.train. Packs are planned per split; predict has none, as
    each of its rows gets scores of its own. Any number of processes may call it at the same time; one tokenizes.

    Raises:
        DataError: A source or row is bad, a split has no supervised token, or data.val_split leaves a side empty.
        ConfigError: A weight so small that its source would never be read.
    """
    found: dict[str, Samples] = {}
    read: dict[str, TokenizedRows] = {}
    for split in splits:
        source = "train" if split == "val" and config.val_split is not None else split
        entries = check_sources(source, getattr(config, source))
        if entries:
            if source not in read:
                read[source] = prepare_rows(getattr(config, source), config, encoder)
            weights = [entry.weight for entry in entries if entry.weight is not None] if split == "train" else []
            found[split] = _plan(read[source], split, config, tuple(weights))
            check_shares(len(found[split]), weights)
    return found


def holds_pairs(formats: Sequence[str], name: str, config: DataConfig) -> bool:
    """Whether sources of these row formats are pairs of a chosen and a rejected completion.

    Raises:
        ConfigError: Some are and some are not, or they should be packed.
    """
    pairs = "preference" in formats
    given = f"sources of formats {', '.join(formats)}"
    require(not pairs or set(formats) == {"preference"}, name, given, "preference for all of them, or for none")
    allowed = "false for rows of chosen and rejected: a sample is a pair, padded to the longer of the two"
    require(not (pairs and config.packing), "data.packing", "true", allowed, "set data.packing: false")
    return pairs


def _plan(rows: TokenizedRows, split: str, config: DataConfig, weights: tuple[float, ...]) -> Samples:
    capacity = config.max_seq_length if config.packing and split != "predict" else None
    kept = np.arange(len(rows))
    pairs = holds_pairs([entry["format"] for entry in rows.meta["entries"]], f"data.{split}", config)
    if config.val_split is not None and split in ("train", "val"):
        chosen = _held_out(rows, config.val_split)
        kept = np.flatnonzero(chosen if split == "val" else ~chosen)
    ids: list[np.ndarray] = []
    offsets, groups = [np.zeros(1, dtype=np.int64)], []
    for members in _groups(rows, kept, len(weights)):
        order, bounds = np.arange(len(members)), np.arange(len(members) + 1)
        if capacity:
            order, bounds = plan_packs(rows.lengths[members], capacity)
        elif pairs:
            bounds = bounds[::2]
        offsets.append(bounds[1:] + sum(len(part) for part in ids))
        ids.append(members[order])
        groups.append(len(bounds) - 1)
    return Samples(rows, np.concatenate(ids), np.concatenate(offsets), tuple(groups), weights or None, capacity, pairs)


def _held_out(rows: TokenizedRows, val_split: float) -> np.ndarray:
    """Which rows validation takes, bool (N,): by content, so that copies are on one side in every run."""
    _, firsts = np.unique(rows.numbers, return_index=True)  # of the pieces of each text that was split
    if val_split < 1:
        chosen = rows.keys < np.uint64(val_split * 2**64)
    else:
        lowest = np.sort(rows.keys[firsts])[: int(val_split)]
        chosen = rows.keys <= lowest[-1]
    if chosen.all() or not chosen.any():
        raise DataError(
            f"data.val_split {val_split} takes {int(chosen[firsts].sum())} of {len(firsts)} rows\n"
            "  allowed: a share or number that leaves rows for training and for validation\n"
            f"  fix:     set data.val_split: {max(1, len(firsts) // 10)}"
        )
    return np.asarray(chosen)


def _groups(rows: TokenizedRows, kept: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """The kept rows of each source of a weighted mix, as a pack has rows of one source; else all of them."""
    if not num_groups:
        return [kept]
    borders = np.cumsum([0, *(entry["rows"] for entry in rows.meta["entries"])])
    parts = [kept[(kept >= a) & (kept < b)] for a, b in pairwise(borders.tolist())]
    for entry, part in enumerate(parts):
        if not len(part):
            raise DataError(
                f"source {entry + 1} of the {num_groups} in data.train has a weight but no row left to train on\n"
                "  fix:     leave it out, or take fewer rows with data.val_split"
            )
    return parts


def plan_packs(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs of N samples, each of 1 to ``capacity`` tokens, by best-fit-decreasing.

    Returns:
        ``members`` (int64, shape (N,)): every sample once, pack after pack, ascending in each pack. ``offsets``
        (int64, shape (packs + 1,)): where each pack begins in it. Packs are in the order of their first samples.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    assert lengths.min() >= 1
    assert lengths.max() <= capacity
    found = np.empty(len(lengths), dtype=np.int64)
    found[np.argsort(-lengths, kind="stable")] = _best_fit(np.bincount(lengths), capacity)
    _, first, pack = np.unique(found, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    pack = place[pack]
    return np.argsort(pack, kind="stable"), np.concatenate([[0], np.bincount(pack).cumsum()])


def _best_fit(counts: np.ndarray, capacity: int) -> np.ndarray:
    """The pack of each sample, the longest samples first; ``counts``: samples per length."""
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 1 << capacity  # bit r: some pack has room r; a new pack is always at hand
    placed: list[int] = []
    num_packs = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1
            packs, each = by_room[room], room // length
            if room == capacity and not packs:
                new = -(-left // each)
                packs.extend(range(num_packs + new - 1, num_packs - 1, -1))
                num_packs += new
            full = min(len(packs), left // each)
            each = each if full else left  # the last one takes fewer than it could
            full = full or 1
            taken = packs[-full:]
            del packs[-full:]
            placed += taken * each
            left -= full * each
            by_room[room - each * length] += taken
            rooms |= 1 << (room - each * length)
            if not packs and room != capacity:
                rooms ^= 1 << room
    return np.array(placed, dtype=np.int64)
