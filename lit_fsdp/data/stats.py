"""What is about to be trained on, before step 1, as plain data: counts, lengths, and what is supervised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.cache import TokenizedRows, nothing_supervised, tokenized
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.packing import Samples, plan_items
from lit_fsdp.data.stream import SampleStream

_LOOKED_AT = 1000
_READ = ("sources", "rows_read", "dropped", "truncated")


def first_samples(config: DataConfig, encoder: RowEncoder) -> Samples:
    """Samples of the first rows of a streamed data.train: of a window, but of no more than 1,000 rows.

    Raises:
        DataError: They are bad, or have no supervised token.
    """
    stream = SampleStream(replace(config, shuffle_window=min(config.shuffle_window, _LOOKED_AT)), encoder, 0)
    _, rows = next(stream.windows())
    (counts, arrays), seen = tokenized(stream.encode(rows)), f"the first {len(rows):,} rows of a stream"
    if not counts["rows"]:
        raise nothing_supervised(f"data.train, {seen}", counts["dropped"])
    formats = zip(stream.sources, stream.formats, strict=True)
    sources = [{"name": source.name, "format": form} for source, form in formats]
    return plan_items(TokenizedRows(Path(), {**counts, "sources": sources, "seen": seen}, **arrays), "train", config)


def describe_data(samples: Mapping[str, Samples], config: DataConfig, encoder: RowEncoder) -> dict[str, Any]:
    """What a run should be judged by before step 1, as JSON: numbers of each split, and settings that decide them."""
    names = ("packing", "max_seq_length", "global_batch_size", "micro_batch_size", "truncation")
    return {
        **{name: getattr(config, name) for name in names},
        "loss_on": "every token" if config.train_on_prompt else f"assistant turns ({config.supervise})",
        "template": config.chat_template or ("the tokenizer's own" if encoder.chat_template else "no"),
        "splits": {name: _described(split) for name, split in samples.items()},
    }


def _described(split: Samples) -> dict[str, Any]:
    meta, lengths, supervised = split.rows.meta, split.lengths, int(split.num_supervised.sum())
    values = {"min": lengths.min(), "median": np.median(lengths), "mean": lengths.mean()}
    values |= {"p95": np.percentile(lengths, 95), "max": lengths.max()}
    seen = {"seen": meta["seen"]} if "seen" in meta else {"cache": str(split.rows.folder)}
    return {
        **seen,
        **{name: meta[name] for name in _READ},
        "samples": len(lengths),
        "tokens": int(lengths.sum()),
        "supervised_tokens": supervised,
        "supervised_share": supervised / int(lengths.sum()),
        "lengths": {name: float(value) for name, value in values.items()},
        "packs": {"count": len(split), "fill": float(split.fills.mean())} if split.capacity else None,
    }
