"""Items of a split: single rows, or packs built by best-fit-decreasing.

Samples are placed from longest to shortest, each into the fullest pack in which it still fits.

Source: Johnson, Near-optimal bin packing algorithms, 1973; for packing training samples: arXiv:2404.10830.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, check_sources
from lit_fsdp.data.cache import TokenizedRows
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.order import apportion
from lit_fsdp.data.sources import content_hash
from lit_fsdp.errors import DataError, require
from lit_fsdp.host import is_first_process, say_once

_log = logging.getLogger(__name__)
_LOOKED_AT = 100
_BITS = 512
"""Bits per word of the bitmap of free space: a search reads one word, and one bit for each other word."""


@dataclass(frozen=True)
class Samples:
    """Items of a split: single rows, with ``pairs`` a chosen and a rejected row each, or packs of rows.

    Item i is ``row_ids[offsets[i] : offsets[i + 1]]``, both int64.
    """

    rows: TokenizedRows
    row_ids: np.ndarray
    offsets: np.ndarray
    groups: tuple[int, ...]
    """Number of items per source of a weighted mix or of named sets, in item order; otherwise a single group."""
    weights: tuple[float, ...] = ()
    """Weight of each group; empty: every item once per epoch."""
    capacity: int | None = None
    """Tokens per pack; ``None`` without packing."""
    pairs: bool = False
    sets: tuple[str, ...] = ()
    """Set name of each group; empty without named sets."""

    @cached_property
    def order_fingerprint(self) -> str:
        """Hash of sources, kept rows, packs and weights; a new tokenizer, template or path keeps the order."""
        parts = (self.rows.numbers, self.row_ids, self.offsets)
        digests = [hashlib.blake2b(part.astype("<i8").tobytes()).hexdigest() for part in parts]
        return content_hash([self.rows.meta["digests"], self.weights, digests])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of every row of ``row_ids``, int32."""
        return self.rows.lengths[self.row_ids]

    @property
    def num_supervised(self) -> np.ndarray:
        """Number of supervised tokens of every row of ``row_ids``, int32."""
        return self.rows.num_supervised[self.row_ids]

    @property
    def fills(self) -> np.ndarray:
        """Filled share of every pack; empty without packing."""
        return np.add.reduceat(self.lengths, self.offsets[:-1]) / self.capacity if self.capacity else np.zeros(0)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def members(self, item: int) -> np.ndarray:
        """Return the row ids of one item, ascending."""
        return self.row_ids[int(self.offsets[item]) : int(self.offsets[item + 1])]


def holds_pairs(formats: Sequence[str], name: str, config: DataConfig) -> bool:
    """Whether all formats are preference pairs (chosen and rejected), which cannot be packed."""
    pairs = "preference" in formats
    given = f"sources of formats {', '.join(formats)}"
    require(not pairs or set(formats) == {"preference"}, name, given, "preference for all of them, or for none")
    allowed = "false for chosen and rejected rows: the pairs of a micro-batch already form one row"
    fix = "set data.packing: false; to train on a column messages instead, set data.format: messages"
    require(not (pairs and config.packing), "data.packing", "true", allowed, fix)
    return pairs


def plan_items(rows: TokenizedRows, split: str, config: DataConfig) -> Samples:
    """Plan the items of a tokenized split; predict is never packed, because each row gets its own scores."""
    entries = check_sources(split, getattr(config, split)) if split != "train" or not config.streaming else []
    weights = tuple(entry.weight for entry in entries if entry.weight is not None)
    sets = tuple(entry.name for entry in entries if entry.name is not None)
    capacity = config.max_seq_length if config.packing and split != "predict" else None
    sources = rows.meta["sources"]
    pairs = holds_pairs([source["format"] for source in sources], f"data.{split}", config)
    kept = np.ones(len(rows), dtype=bool)
    if config.val_split is not None and split in ("train", "val"):
        kept = _held_out(rows, config.val_split) == (split == "val")
    # in a mix or a set, each pack has rows of one source
    borders = np.cumsum([0, *(source["rows"] for source in sources)]) if weights or sets else np.array([0, len(rows)])
    ids: list[np.ndarray] = []
    offsets, groups = [np.zeros(1, dtype=np.int64)], []
    for start, end in pairwise(borders.tolist()):
        members = start + np.flatnonzero(kept[start:end])
        order, bounds = np.arange(len(members)), np.arange(len(members) + 1)
        if capacity:
            order, bounds = plan_packs(rows.lengths[members], capacity)
        elif pairs:
            bounds = bounds[::2]
        offsets.append(bounds[1:] + sum(len(part) for part in ids))
        ids.append(members[order])
        groups.append(len(bounds) - 1)
    is_read = not weights or (all(groups) and all(apportion(sum(groups), weights)))
    given = f"weights {weights} for sources of {groups} samples"
    require(is_read, "data.train", given, "at least one sample of each source in every epoch")
    for name, size in zip(sets, groups, strict=False):
        if not size:
            raise DataError(f"data.{split}.{name}: one of its sources has no supervised token")
    return Samples(rows, np.concatenate(ids), np.concatenate(offsets), tuple(groups), weights, capacity, pairs, sets)


def _held_out(rows: TokenizedRows, val_split: float) -> np.ndarray:
    """Select validation rows, bool (N,), by content, so that duplicates are always in the same split."""
    _, firsts = np.unique(rows.numbers, return_index=True)  # the first piece of each split text
    if val_split < 1:
        chosen = rows.keys < np.uint64(val_split * 2**64)
        if chosen.all() or not chosen.any():
            chosen = rows.keys < rows.keys.max() if chosen.all() else rows.keys == rows.keys.min()
            taken = f"{int(chosen[firsts].sum())} of {len(firsts)} rows"
            if is_first_process() and len(firsts) > 1:
                say_once(f"data.val_split {val_split} takes {taken}: each split needs at least one row")
    else:
        lowest = np.sort(rows.keys[firsts])[: int(val_split)]
        chosen = rows.keys <= lowest[-1]
    if chosen.all() or not chosen.any():
        dropped = sum(rows.meta["dropped"].values())
        more = f", as {dropped} more were dropped" if dropped else ""
        raise DataError(
            f"data.val_split {val_split} takes {int(chosen[firsts].sum())} of {len(firsts)} rows{more}\n"
            "  allowed: a share or number that leaves rows for both training and validation\n"
            "  fix:     set data.val_split: null, or add different rows"
        )
    return np.asarray(chosen)


def plan_packs(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack N samples of 1 to ``capacity`` tokens by best-fit-decreasing; packs are sorted by their first sample.

    Returns the sample indices pack by pack, ascending within each pack (int64, (N,)), and the offsets of the packs
    (int64, (packs + 1,)).
    """
    pack_of = np.zeros(len(lengths), dtype=np.int64)
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = [0] * (capacity // _BITS + 1)  # bit r % _BITS of rooms[r // _BITS]: some pack has room r
    words = 0  # bit w: rooms[w] is not 0
    num_packs, sizes = 0, lengths.tolist()
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = sizes[sample]
        assert 1 <= length <= capacity
        room, pack = capacity, num_packs
        word, bit = divmod(length, _BITS)
        fitting = rooms[word] >> bit << bit
        if not fitting and (further := words >> (word + 1)):
            word += (further & -further).bit_length()
            fitting = rooms[word]
        if fitting:
            room = word * _BITS + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms[word] ^= 1 << room % _BITS
                words ^= (not rooms[word]) << word
        num_packs += pack == num_packs
        pack_of[sample] = pack
        word, bit = divmod(room - length, _BITS)
        by_room[room - length].append(pack)
        rooms[word] |= 1 << bit
        words |= 1 << word
    _, first, pack_of = np.unique(pack_of, return_index=True, return_inverse=True)
    pack_of = np.argsort(np.argsort(first))[pack_of]
    return np.argsort(pack_of, kind="stable"), np.concatenate([[0], np.bincount(pack_of).cumsum()])


def describe_data(samples: Mapping[str, Samples], config: DataConfig, encoder: RowEncoder) -> dict[str, Any]:
    """Summarize the data before step 1, as JSON: statistics of each split, and the settings that determine them.

    Logs warnings about a chat template with which the model would not begin or end its answers as in training, and
    about answers without text.
    """
    held_out = {"val"} if config.val_split is not None and "train" in samples else set()
    if is_first_process():
        _warn_of_template(samples, config, encoder)
        for name, split in samples.items():
            num_empty = split.rows.meta.get("answers_without_text")
            if num_empty and name not in held_out:
                _log.warning(
                    "data.%s: rows whose answers have no text besides special tokens: %d; remove them, because they "
                    "teach the model to end its turn at once, unless such a token is the answer",
                    *(name, num_empty),
                )
    names = ("packing", "max_seq_length", "global_batch_size", "micro_batch_size", "truncation")
    turns = f"assistant turns ({config.supervise}{', each a sample' if config.split_turns else ''})"
    return {
        **{name: getattr(config, name) for name in names},
        "loss_on": "every token" if config.train_on_prompt else turns,
        "template": config.chat_template or ("the tokenizer's own" if encoder.chat_template else "no"),
        "splits": {name: _described(split, name in held_out) for name, split in samples.items()},
    }


def _warn_of_template(samples: Mapping[str, Samples], config: DataConfig, encoder: RowEncoder) -> None:
    rendered = {name: split for name, split in samples.items() if _is_rendered(split)}
    if rendered and encoder.lacks_prompt:
        _log.warning(
            "the chat template ignores add_generation_prompt: at inference, prompts lack the header that precedes "
            "answers in training; write it where add_generation_prompt is set"
        )
    for name, split in rendered.items():
        if num_samples := _without_end(split, config, encoder):
            _log.warning(
                "data.%s: none of the first %d samples supervises a special token, so the model does not learn to end "
                "its answers; let the chat template end the assistant's turns with one, such as {{ eos_token }}, or "
                "set another data.chat_template",
                *(name, num_samples),
            )


def _is_rendered(split: Samples) -> bool:
    """Whether a chat template renders rows of a split."""
    meta = split.rows.meta
    is_plain = meta.get("plain_text") == meta["rows_read"]
    return not is_plain and not {source["format"] for source in meta["sources"]} & {"text", "tokens"}


def _without_end(split: Samples, config: DataConfig, encoder: RowEncoder) -> int:
    """Return how many samples were searched for a supervised special token if none has one, else 0."""
    ids = (*encoder.tokenizer.added_tokens_decoder, encoder.tokenizer.eos_token_id)
    ends = [one for one in ids if one is not None]
    whole = split.row_ids[split.lengths < config.max_seq_length]  # others may have lost their end
    rows = [split.rows.row(int(row)) for row in whole[:_LOOKED_AT]]
    return 0 if any(np.isin(ids[mask != 0], ends).any() for ids, mask in rows) else len(rows)


def _described(split: Samples, is_held_out: bool) -> dict[str, Any]:
    """Summarize a split; for held-out rows, whose file is also read for train, without the counts of that file."""
    meta, lengths = {} if is_held_out else split.rows.meta, split.lengths
    sources = split.rows.meta["sources"]
    if all("rows" in source for source in sources):  # as tokenized: of all splits, and two samples of each pair
        borders = np.cumsum([0, *(source["rows"] for source in sources)])
        num_rows = (np.histogram(split.row_ids, borders)[0] // (2 if split.pairs else 1)).tolist()
        sources = [{**source, "rows": count} for source, count in zip(sources, num_rows, strict=True)]
    tokens, supervised = int(lengths.sum()), int(split.num_supervised.sum())
    quantiles = np.percentile(lengths, (0, 50, 95, 100)).round().astype(int).tolist()
    return {
        "from": "data.val_split of train" if is_held_out else meta.get("seen", str(split.rows.folder)),
        "sources": [s | {"set": name} for s, name in zip(sources, split.sets, strict=True)] if split.sets else sources,
        **{name: meta.get(name) for name in ("rows_read", "dropped", "truncated", "unwritten")},
        "columns_not_read": ", ".join(meta.get("unread", ())) or None,
        **{name: meta.get(name) or None for name in ("plain_text", "answers_without_text")},  # not in older caches
        "pairs": len(split) if split.pairs else None,
        "samples": len(lengths),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens,
        "lengths": dict(zip(("min", "median", "p95", "max"), quantiles, strict=True)),
        "packs": {"count": len(split), "fill": float(split.fills.mean())} if split.capacity else None,
    }
