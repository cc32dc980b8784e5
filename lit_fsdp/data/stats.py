"""What is about to be trained on, before step 1, as plain data: counts, lengths, what is supervised, and warnings.

Rows are counted as they were read and tokens as they lie in the cache; of a stream, its first rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, check_sources
from lit_fsdp.data.cache import check_dropped, nothing_supervised, sample_digest
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.packing import Samples, plan_packs
from lit_fsdp.data.stream import SampleStream

_LOOKED_AT = 1000
_MANY_DUPLICATES = 0.01
_LITTLE = 0.05
_LOSS_ON = {
    "all": "all assistant turns",
    "last": "the last assistant turn",
    "flagged": "assistant turns with train: true",
}


@dataclass(frozen=True)
class SplitNumbers:
    """Numbers of each sample of a split."""

    lengths: np.ndarray
    """Tokens, int64 (N,)."""
    supervised: np.ndarray
    """Supervised tokens, int64 (N,)."""
    digests: np.ndarray
    """Hash of the token ids, uint64 (N,)."""
    fills: np.ndarray | None = None
    """Share of each pack that is filled, (packs,); ``None`` without packing."""
    counts: dict[str, Any] = field(default_factory=dict)
    """What became of the rows that were read, as plain data."""

    def describe(self) -> dict[str, Any]:
        """The counts, and supervision, lengths and packs, as plain data."""
        lengths, tokens, supervised = self.lengths, int(self.lengths.sum()), int(self.supervised.sum())
        seen = lengths if len(lengths) else np.zeros(1)
        values = {"min": seen.min(), "median": np.median(seen), "mean": seen.mean()}
        values |= {"p95": np.percentile(seen, 95), "max": seen.max()}
        fills = self.fills
        return {
            **self.counts,
            "samples": len(lengths),
            "duplicates": len(lengths) - len(np.unique(self.digests)),
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / max(1, tokens),
            "lengths": {key: float(value) for key, value in values.items()},
            "packs": None if fills is None else {"count": len(fills), "fill": float(fills.mean())},
        }


def split_numbers(
    samples: Mapping[str, Samples], config: DataConfig, encoder: RowEncoder | None = None
) -> dict[str, SplitNumbers]:
    """The numbers of the prepared splits.

    Args:
        samples: By split, as :func:`lit_fsdp.data.packing.prepare_samples` returns them.
        config: The ``data`` section they were made with.
        encoder: Makes samples of the first rows of a streamed data.train; ``None`` if it is no stream.

    Raises:
        DataError: The first rows of a stream are bad, have no supervised token, or are mostly cut to nothing.
    """
    found = {"train": _first_rows(config, encoder)} if encoder else {}
    for name, split in samples.items():
        fills = None if split.capacity is None else split.item_tokens() / split.capacity
        digests, counts = split.rows.digests[split.row_ids], _counts(name, split, config)
        found[name] = SplitNumbers(split.lengths, split.num_supervised, digests, fills, counts)
    return found


def describe_data(numbers: Mapping[str, SplitNumbers], config: DataConfig, encoder: RowEncoder) -> dict[str, Any]:
    """Everything that a run should be judged by before step 1, as plain data for JSON.

    Returns:
        ``splits`` (per split counts, lengths, supervision, packs and ``sources``), the settings that decide them, and
        ``warnings``: what stops nobody but should be known.
    """
    splits = {name: split.describe() for name, split in numbers.items()}
    for name in ("val", "test"):
        if name in splits and "train" in splits:
            splits[name]["in_train"] = int(np.isin(numbers[name].digests, numbers["train"].digests).sum())
    return {
        "packing": config.packing,
        "max_seq_length": config.max_seq_length,
        "global_batch_size": config.global_batch_size,
        "micro_batch_size": config.micro_batch_size,
        "truncation": config.truncation,
        "loss_on": "every token" if config.train_on_prompt else _LOSS_ON[config.supervise],
        "template": config.chat_template or ("the tokenizer's own" if encoder.chat_template else "no"),
        "splits": splits,
        "warnings": [line for name, split in splits.items() for line in _warnings(name, split)],
    }


def _first_rows(config: DataConfig, encoder: RowEncoder) -> SplitNumbers:
    """Of a streamed data.train: a window, but no more than 1,000 rows."""
    stream = SampleStream(replace(config, shuffle_window=min(config.shuffle_window, _LOOKED_AT)), encoder, 0)
    encoded = stream.encode(next(stream.windows()))
    dropped = Counter(row.dropped for row in encoded if row.dropped is not None)
    samples = [sample for row in encoded for sample in row.samples]
    name = f"data.train, the first {len(encoded)} rows of the stream"
    if not samples:
        raise nothing_supervised(name, dropped)
    check_dropped(name, dropped, len(encoded), config)
    lengths = np.array([len(sample.input_ids) for sample in samples])
    supervised = np.array([np.count_nonzero(sample.supervised) for sample in samples])
    digests = np.array([sample_digest(sample.input_ids) for sample in samples], dtype=np.uint64)
    fills = None
    if config.packing:
        members, offsets = plan_packs(lengths, config.max_seq_length)
        fills = np.add.reduceat(lengths[members], offsets[:-1]) / config.max_seq_length
    counts = {
        "seen": f"the first {len(encoded):,} rows of a stream",
        "format": _together(stream.formats),
        "rows_read": len(encoded),
        "dropped": dict(dropped),
        "truncated": sum(row.truncated and bool(row.samples) for row in encoded),
    }
    return SplitNumbers(lengths, supervised, digests, fills, counts)


def _counts(name: str, samples: Samples, config: DataConfig) -> dict[str, Any]:
    """Of one split. Of rows that are taken out of data.train it is said there what became of all of them."""
    meta = samples.rows.meta
    held_out = name == "val" and config.val_split is not None
    read: dict[str, Any] = {key: meta[key] for key in ("rows_read", "dropped", "truncated")}
    return {
        **({"seen": "taken out of data.train"} if held_out else read),
        "format": _together(entry["format"] for entry in meta["entries"]),
        "fingerprint": meta["fingerprint"],
        "cache": str(samples.rows.folder),
        "sources": _sources("train" if held_out else name, samples, config),
    }


def _together(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _sources(section: str, samples: Samples, config: DataConfig) -> list[dict[str, Any]]:
    """One entry per source of a section, with its rows in this split."""
    rows, ids = samples.rows, np.sort(samples.row_ids)
    found, start = [], 0
    for entry, made in zip(check_sources(section, getattr(config, section)), rows.meta["entries"], strict=True):
        mine = ids[np.searchsorted(ids, start) : np.searchsorted(ids, start + made["rows"])]
        start += made["rows"]
        counts = {key: made[key] for key in ("format", "rows_read", "dropped", "truncated")}
        numbers = SplitNumbers(rows.lengths[mine], rows.num_supervised[mine], rows.digests[mine], None, counts)
        found.append({"name": entry.source, "weight": entry.weight, **numbers.describe()})
    return found


def _warnings(name: str, split: Mapping[str, Any]) -> list[str]:
    lines, samples = [], split["samples"]
    if split.get("in_train"):
        lines.append(
            f"data.{name}: {split['in_train']:,} of {samples:,} samples are in data.train too, token for token"
        )
    if split["duplicates"] > _MANY_DUPLICATES * samples:
        lines.append(f"data.{name}: {split['duplicates']:,} of {samples:,} samples are copies of others")
    if 0 < split["supervised_share"] < _LITTLE:
        lines.append(f"data.{name}: only {split['supervised_share']:.1%} of the tokens are supervised")
    return lines
