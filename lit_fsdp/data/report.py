"""What is about to be trained on, before step 1: the supervision proof as plain data.

Nothing is estimated from a part: rows are counted as they were read, tokens as they lie in the cache, and the padding
that packing saves is the expected value over all orders, not a sample of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, check_sources
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.order import apportion
from lit_fsdp.data.row_numbers import describe_rows, expected_padding, num_shared
from lit_fsdp.data.samples import Samples
from lit_fsdp.data.window_report import WindowSeen

_MANY_DUPLICATES = 0.01
_LITTLE = 0.05
_LOSS_ON = {
    "all": "all assistant turns",
    "last": "the last assistant turn",
    "flagged": "assistant turns with train: true",
}


def describe_data(
    samples: Mapping[str, Samples], config: DataConfig, encoder: RowEncoder, window: WindowSeen | None = None
) -> dict[str, Any]:
    """Everything about the prepared splits that a run should be judged by before step 1.

    Args:
        samples: By split, as :func:`lit_fsdp.data.samples.prepare_samples` returns them.
        config: The ``data`` section they were made with.
        encoder: What they were made by.
        window: The first rows of data.train, if it is a stream.

    Returns:
        Plain data for JSON: ``splits`` (per split counts, lengths, supervision, packs and ``sources``), ``template``,
        the settings that decide them, and ``warnings``: what stops nobody but should be known.
    """
    digests = {name: np.asarray(split.rows.digests)[split.row_ids] for name, split in samples.items()}
    splits = {name: _describe(name, split, config) for name, split in samples.items()}
    if window is not None:
        digests, splits = {"train": window.digests, **digests}, {"train": window.describe(), **splits}
    for name in ("val", "test"):
        if name in splits and "train" in splits:
            splits[name]["in_train"] = num_shared(digests[name], digests["train"])
    return {
        "packing": config.packing,
        "max_seq_length": config.max_seq_length,
        "global_batch_size": config.global_batch_size,
        "micro_batch_size": config.micro_batch_size,
        "truncation": config.truncation,
        "loss_on": "every token" if config.train_on_prompt else _LOSS_ON[config.supervise],
        "template": _template(config, encoder),
        "splits": splits,
        "warnings": [line for name, split in splits.items() for line in _warnings(name, split)],
    }


def _describe(name: str, samples: Samples, config: DataConfig) -> dict[str, Any]:
    rows, ids = samples.rows, np.asarray(samples.row_ids)
    lengths = np.diff(np.asarray(rows.offsets))[ids]
    learnt = np.asarray(rows.learnt)[ids].astype(np.int64)
    sources = _sources(name, samples, config)
    draws = _draws(samples)
    batch = config.micro_batch_size if name == "train" else config.val_micro_batch_size or config.micro_batch_size
    return {
        **_read(name, samples, config),
        **describe_rows(lengths, learnt, np.asarray(rows.digests)[ids]),
        "tokens_per_epoch": round(float(lengths @ draws)),
        "supervised_tokens_per_epoch": round(float(learnt @ draws)),
        "packs": _packs(samples, int(lengths.sum())),
        "padding_share_unpacked": expected_padding(lengths, batch, draws if samples.weights else None),
        "fingerprint": samples.fingerprint,
        "cache": str(rows.folder),
        "sources": sources,
    }


def _read(name: str, samples: Samples, config: DataConfig) -> dict[str, Any]:
    """What became of the rows of the sources; of rows taken out of data.train it is said there."""
    if name == "val" and config.val_split is not None:
        return {"taken_out_of": "data.train", "rows_read": None, "dropped": {}, "truncated": None, "split": None}
    meta = samples.rows.meta
    return {key: meta[key] for key in ("rows_read", "dropped", "truncated", "split")}


def _draws(samples: Samples) -> np.ndarray:
    """How often each row comes in one epoch, on average over epochs, float64 in the order of ``row_ids``."""
    draws = np.ones(len(samples.row_ids))
    if samples.weights:
        per_group = apportion(len(samples), samples.weights)
        first_item = 0
        for num_items, drawn in zip(samples.groups, per_group, strict=True):
            start, end = samples.offsets[first_item], samples.offsets[first_item + num_items]
            draws[int(start) : int(end)] = drawn / num_items
            first_item += num_items
    return draws


def _packs(samples: Samples, tokens: int) -> dict[str, Any] | None:
    if samples.capacity is None:
        return None
    return {"count": len(samples), "capacity": samples.capacity, "fill": tokens / (len(samples) * samples.capacity)}


def _sources(name: str, samples: Samples, config: DataConfig) -> list[dict[str, Any]]:
    """One entry per source of the recipe, with its rows in this split."""
    section = "train" if name == "val" and config.val_split is not None else name
    rows, ids = samples.rows, np.sort(np.asarray(samples.row_ids))
    found, start = [], 0
    for entry, made in zip(check_sources(section, getattr(config, section)), rows.meta["entries"], strict=True):
        mine = ids[np.searchsorted(ids, start) : np.searchsorted(ids, start + made["rows"])]
        start += made["rows"]
        lengths = np.diff(np.asarray(rows.offsets))[mine]
        found.append(
            {
                "name": entry.source,
                "weight": entry.weight,
                **{key: made[key] for key in ("format", "rows_read", "dropped", "truncated", "split")},
                **describe_rows(
                    lengths, np.asarray(rows.learnt)[mine].astype(np.int64), np.asarray(rows.digests)[mine]
                ),
            }
        )
    return found


def _template(config: DataConfig, encoder: RowEncoder) -> dict[str, Any]:
    text = encoder.chat_template
    marks = None if text is None else bool(re.search(r"\{%-?\s*generation\s*-?%\}", text))
    return {"name": config.chat_template or ("the tokenizer's own" if text else "no"), "generation_marks": marks}


def _warnings(name: str, split: Mapping[str, Any]) -> list[str]:
    lines, samples = [], split["samples"]
    if split.get("in_train"):
        lines.append(
            f"data.{name}: {split['in_train']:,} of {samples:,} samples are in data.train too, token for token"
        )
    if split["duplicates"] > _MANY_DUPLICATES * samples:
        lines.append(f"data.{name}: {split['duplicates']:,} of {samples:,} samples are copies of others")
    dropped = Counter(split["dropped"])
    if dropped.total():
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        lines.append(f"data.{name}: {dropped.total():,} of {split['rows_read']:,} rows dropped: {reasons}")
    if 0 < split["supervised_share"] < _LITTLE:
        lines.append(f"data.{name}: only {split['supervised_share']:.1%} of the tokens are supervised")
    return lines
