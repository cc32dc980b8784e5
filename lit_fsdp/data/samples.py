"""What orders and loaders see of tokenised rows: the rows of one split, alone or packed, each item with its members."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, check_sources
from lit_fsdp.data.cache import prepare_rows
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.order import check_shares
from lit_fsdp.data.packing import plan_packs
from lit_fsdp.data.rows import TokenisedRows, damage, make_arrays, open_arrays, open_rows, spot_check
from lit_fsdp.errors import DataError

_VERSION = 2
_ARRAYS = {"row_ids": np.dtype("<i8"), "offsets": np.dtype("<i8")}


@dataclass(frozen=True)
class Samples:
    """Items of a split; sent to another process as the names of two folders.

    An item is a row, or with packing the rows of one pack.
    """

    rows: TokenisedRows
    folder: Path
    """Of the plan: which rows, and which of them together."""
    meta: dict[str, Any]
    """Counts of this split: items, rows, tokens, supervised_tokens, longest, capacity of a pack or null."""
    row_ids: np.ndarray
    """Rows, item after item; int64."""
    offsets: np.ndarray
    """Where each item begins in ``row_ids``; int64, shape (items + 1,)."""

    @property
    def fingerprint(self) -> str:
        """Of everything that tokens, split and packs depend on."""
        return str(self.meta["fingerprint"])

    @property
    def order_fingerprint(self) -> str:
        """Of what the order depends on: sources and kept rows, the split, the packs and the weights."""
        return str(self.meta["order_fingerprint"])

    @property
    def groups(self) -> tuple[int, ...]:
        """Items per source of a weighted mix, in the order of the items; else all of them as one group."""
        return tuple(self.meta["groups"])

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weight of each group; ``None``: every item once per epoch."""
        return None if self.meta["weights"] is None else tuple(self.meta["weights"])

    @property
    def capacity(self) -> int | None:
        """Tokens per pack; ``None`` without packing, where every item is one row."""
        found: int | None = self.meta["capacity"]
        return found

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return open_samples, (self.rows.folder, self.folder)

    def members(self, item: int) -> np.ndarray:
        """Row ids of one item, int64, ascending."""
        return self.row_ids[int(self.offsets[item]) : int(self.offsets[item + 1])]

    def item_tokens(self) -> np.ndarray:
        """Tokens of every item, int64 of shape (items,)."""
        lengths = np.diff(self.rows.offsets)[self.row_ids]
        return np.add.reduceat(lengths, self.offsets[:-1])


def prepare_samples(config: DataConfig, splits: Sequence[str], encoder: RowEncoder) -> dict[str, Samples]:
    """Tokenise and plan the named splits that the recipe has, or take them from the cache.

    ``data.val_split`` takes the validation rows out of data.train. Packs are planned per split; predict has none, as
    each of its rows gets scores of its own. Any number of processes may call it at the same time; one works.

    Args:
        config: The ``data`` section.
        splits: Of ``train``, ``val``, ``test``, ``predict``.
        encoder: What makes samples of rows.

    Raises:
        DataError: A source or row is bad, a split has nothing to learn, or data.val_split leaves a side empty.
        ConfigError: A weight so small that its source would never be read.
    """
    found: dict[str, Samples] = {}
    read: dict[str, TokenisedRows] = {}
    for split in splits:
        source = "train" if split == "val" and config.val_split is not None else split
        entries = check_sources(source, getattr(config, source))
        if entries:
            if source not in read:
                read[source] = prepare_rows(getattr(config, source), config, encoder)
            found[split] = _plan(read[source], split, config, [entry.weight for entry in entries])
    return found


def open_samples(rows_folder: Path, folder: Path) -> Samples:
    """Map what :func:`prepare_samples` has written.

    Raises:
        DataError: A folder is damaged.
    """
    meta, arrays = open_arrays(folder, _ARRAYS, "plan of samples")
    if [len(arrays["row_ids"]), len(arrays["offsets"])] != [meta["rows"], meta["items"] + 1]:
        raise damage(folder, "files of another length", "plan of samples")
    return Samples(open_rows(rows_folder), folder, meta, **arrays)


def _plan(rows: TokenisedRows, split: str, config: DataConfig, weights: Sequence[float | None]) -> Samples:
    capacity = config.max_seq_length if config.packing and split != "predict" else None
    side = split if config.val_split is not None and split in ("train", "val") else None
    shares = [weight for weight in weights if weight is not None] if split == "train" else []
    settings = {
        "version": _VERSION,
        "rows": rows.fingerprint,
        "capacity": capacity,
        "side": [side, config.val_split] if side else None,
        "weights": shares or None,
    }
    fingerprint = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()
    folder = rows.folder.parent.parent / "samples" / fingerprint

    def make(partial: Path) -> None:
        kept = _side(rows, side, config.val_split)
        row_ids, offsets, groups = _items(rows, kept, capacity, len(shares))
        for name, array in {"row_ids": row_ids, "offsets": offsets}.items():
            (partial / f"{name}.bin").write_bytes(array.astype(_ARRAYS[name]).tobytes())
        meta = {
            "fingerprint": fingerprint,
            "order_fingerprint": _order_fingerprint(rows, row_ids, offsets, shares),
            "groups": groups,
            "weights": shares or None,
            "capacity": capacity,
            **_counts(rows, row_ids, offsets),
            "spot_check": {name: spot_check(partial / f"{name}.bin") for name in _ARRAYS},
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")

    make_arrays(folder, make, f"{'packing' if capacity else 'listing'} data.{split}")
    samples = open_samples(rows.folder, folder)
    check_shares(len(samples), shares)
    return samples


def _side(rows: TokenisedRows, side: str | None, val_split: float | None) -> np.ndarray:
    """Row ids of one side of data.val_split, or all; by content, so that duplicates are on one side in every run."""
    if side is None or val_split is None:
        return np.arange(len(rows))
    keys = np.asarray(rows.keys)
    _, firsts = np.unique(rows.numbers, return_index=True)  # of the pieces of each text that was split
    if val_split < 1:
        chosen = keys < np.uint64(val_split * 2**64)
    else:
        lowest = np.sort(keys[firsts])[: int(val_split)]
        chosen = keys <= lowest[-1]
    if chosen.all() or not chosen.any():
        raise DataError(
            f"data.val_split {val_split} takes {int(chosen[firsts].sum())} of {len(firsts)} rows\n"
            "  allowed: a share or number that leaves rows for training and for validation\n"
            f"  fix:     set data.val_split: {max(1, len(firsts) // 10)}"
        )
    return np.flatnonzero(chosen if side == "val" else ~chosen)


def _items(
    rows: TokenisedRows, kept: np.ndarray, capacity: int | None, num_groups: int
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Row ids, offsets and items per group of the kept rows; a pack of a weighted mix has rows of one source."""
    lengths = np.diff(rows.offsets)
    ids: list[np.ndarray] = []
    offsets, groups = [np.zeros(1, dtype=np.int64)], []
    for members in _groups(rows, kept, num_groups):
        order, bounds = plan_packs(lengths[members], capacity) if capacity else _one_each(len(members))
        offsets.append(bounds[1:] + sum(len(part) for part in ids))
        ids.append(members[order])
        groups.append(len(bounds) - 1)
    return np.concatenate(ids), np.concatenate(offsets), groups


def _one_each(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count), np.arange(count + 1)


def _groups(rows: TokenisedRows, kept: np.ndarray, num_groups: int) -> list[np.ndarray]:
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


def _order_fingerprint(rows: TokenisedRows, row_ids: np.ndarray, offsets: np.ndarray, shares: list[float]) -> str:
    plain = len(row_ids) == len(rows) == len(offsets) - 1 and not shares
    if plain:  # every row an item, in file order
        return rows.order_fingerprint
    digest = hashlib.blake2b(json.dumps([rows.order_fingerprint, shares]).encode(), digest_size=16)
    digest.update(row_ids.astype("<i8").tobytes())
    digest.update(offsets.astype("<i8").tobytes())
    return digest.hexdigest()


def _counts(rows: TokenisedRows, row_ids: np.ndarray, offsets: np.ndarray) -> dict[str, int]:
    lengths = np.diff(rows.offsets)[row_ids]
    return {
        "items": len(offsets) - 1,
        "rows": len(row_ids),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(np.asarray(rows.learnt)[row_ids].sum(dtype=np.int64)),
        "longest": int(lengths.max()),
    }
