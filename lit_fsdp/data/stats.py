"""What is about to be trained on, before step 1, as plain data: counts, lengths, and what is supervised.

Rows are counted as they were read and tokens as they lie in the cache; of a stream, its first rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.batches import Sample
from lit_fsdp.data.cache import counts_of, nothing_supervised
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.packing import Samples, plan_packs
from lit_fsdp.data.stream import SampleStream

_LOOKED_AT = 1000
_COUNTS = ("rows_read", "dropped", "truncated")


@dataclass(frozen=True)
class SplitNumbers:
    """Numbers of each sample of a split."""

    lengths: np.ndarray
    """Tokens, int64 (N,)."""
    supervised: np.ndarray
    """Supervised tokens, int64 (N,)."""
    fills: np.ndarray | None
    """Share of each pack that is filled, (packs,); ``None`` without packing."""
    sample: Callable[[int], Sample]
    """Token ids and supervision of one of them."""
    counts: dict[str, Any]
    """What became of the rows that were read, and of which sources they are, as plain data."""

    def describe(self) -> dict[str, Any]:
        """The counts, and supervision, lengths and packs, as plain data."""
        lengths, tokens, supervised = self.lengths, int(self.lengths.sum()), int(self.supervised.sum())
        values = {"min": lengths.min(), "median": np.median(lengths), "mean": lengths.mean()}
        values |= {"p95": np.percentile(lengths, 95), "max": lengths.max()}
        return {
            **self.counts,
            "samples": len(lengths),
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / tokens,
            "lengths": {key: float(value) for key, value in values.items()},
            "packs": self.fills is not None and {"count": len(self.fills), "fill": float(self.fills.mean())},
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
        DataError: The first rows of a stream are bad, or have no supervised token.
    """
    found = {"train": _first_rows(config, encoder)} if encoder else {}
    for name, split in samples.items():
        rows, ids = split.rows, split.row_ids
        counts = {"cache": str(rows.folder), **{key: rows.meta[key] for key in ("fingerprint", "sources", *_COUNTS)}}
        lengths, supervised = rows.lengths[ids], rows.num_supervised[ids].astype(np.int64)
        fills = np.add.reduceat(lengths, split.offsets[:-1]) / split.capacity if split.capacity else None
        found[name] = SplitNumbers(lengths, supervised, fills, partial(_sample, split), counts)
    return found


def _sample(split: Samples, index: int) -> Sample:
    return split.rows.row(int(split.row_ids[index]))


def describe_data(numbers: Mapping[str, SplitNumbers], config: DataConfig, encoder: RowEncoder) -> dict[str, Any]:
    """What a run should be judged by before step 1, as JSON: per split numbers, and the settings that decide them."""
    names = ("packing", "max_seq_length", "global_batch_size", "micro_batch_size", "truncation")
    return {
        **{name: getattr(config, name) for name in names},
        "loss_on": "every token" if config.train_on_prompt else f"assistant turns ({config.supervise})",
        "template": config.chat_template or ("the tokenizer's own" if encoder.chat_template else "no"),
        "splits": {name: split.describe() for name, split in numbers.items()},
    }


def _first_rows(config: DataConfig, encoder: RowEncoder) -> SplitNumbers:
    """Of a streamed data.train: a window, but no more than 1,000 rows."""
    stream = SampleStream(replace(config, shuffle_window=min(config.shuffle_window, _LOOKED_AT)), encoder, 0)
    _, rows = next(stream.windows())
    encoded = stream.encode(rows)
    seen = f"the first {len(rows):,} rows of a stream"
    counts = counts_of(encoded)
    samples = [(sample.input_ids, sample.supervised) for row in encoded for sample in row.samples]
    if not samples:
        raise nothing_supervised(f"data.train, {seen}", counts["dropped"])
    lengths = np.array([len(ids) for ids, _ in samples])
    supervised = np.array([np.count_nonzero(mask) for _, mask in samples])
    fills = None
    if config.packing:
        members, offsets = plan_packs(lengths, config.max_seq_length)
        fills = np.add.reduceat(lengths[members], offsets[:-1]) / config.max_seq_length
    formats = zip(stream.sources, stream.formats, strict=True)
    sources = [{"name": source.name, "format": form} for source, form in formats]
    read = {"seen": seen, "sources": sources, **{key: counts[key] for key in _COUNTS}}
    return SplitNumbers(lengths, supervised, fills, samples.__getitem__, read)
