"""What is about to be trained on, before step 1, as plain data: counts, lengths, and what is supervised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.cache import nothing_supervised
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.packing import Samples
from lit_fsdp.data.stream import SampleStream

_LOOKED_AT = 1000


def first_samples(config: DataConfig, encoder: RowEncoder) -> Samples:
    """Samples of the first rows of a streamed data.train: of a window, but of no more than 1,000 rows.

    Raises:
        DataError: They are bad, or have no supervised token.
    """
    stream = SampleStream(replace(config, shuffle_window=min(config.shuffle_window, _LOOKED_AT)), encoder, 0)
    _, rows = next(stream.windows())
    samples = stream.samples(rows)
    meta, seen = samples.rows.meta, f"the first {len(rows):,} rows of a stream"
    if not meta["rows"]:
        raise nothing_supervised(f"data.train, {seen}", meta["dropped"])
    meta["seen"] = seen
    return samples


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
    meta, lengths = split.rows.meta, split.lengths
    tokens, supervised = int(lengths.sum()), int(split.num_supervised.sum())
    quantiles = np.percentile(lengths, (0, 50, 95, 100)).tolist()
    return {
        "from": meta.get("seen", str(split.rows.folder)),
        **{name: meta[name] for name in ("sources", "rows_read", "dropped", "truncated")},
        "samples": len(lengths),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens,
        "lengths": dict(zip(("min", "median", "p95", "max"), quantiles, strict=True)),
        "packs": {"count": len(split), "fill": float(split.fills.mean())} if split.capacity else None,
    }
