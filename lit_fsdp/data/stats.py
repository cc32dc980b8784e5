"""What is about to be trained on, before step 1: the supervision proof as plain data.

Rows are counted as they were read and tokens as they lie in the cache; of a stream, its first rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, check_sources
from lit_fsdp.data.cache import check_dropped, nothing_supervised, sample_digest
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.order import apportion
from lit_fsdp.data.packing import Samples, plan_packs
from lit_fsdp.data.stream import SampleStream

_LOOKED_AT = 1000
_NUM_SHARES = 10
_MANY_DUPLICATES = 0.01
_LITTLE = 0.05
_LOSS_ON = {
    "all": "all assistant turns",
    "last": "the last assistant turn",
    "flagged": "assistant turns with train: true",
}


@dataclass(frozen=True)
class SampleNumbers:
    """Numbers of each sample of a split."""

    lengths: np.ndarray
    """Tokens, int64 (N,)."""
    supervised: np.ndarray
    """Supervised tokens, int64 (N,)."""
    digests: np.ndarray
    """Hash of the token ids, uint64 (N,)."""
    fills: np.ndarray | None = None
    """Share of each pack that is filled, (packs,); ``None`` without packing."""

    def describe(self) -> dict[str, Any]:
        """Counts, supervision and lengths as plain data.

        ``supervised_share_histogram`` counts samples without any supervised token, then those of up to 10, 20, … 100 %.
        """
        lengths, tokens, supervised = self.lengths, int(self.lengths.sum()), int(self.supervised.sum())
        # in whole numbers: 30 of 100 tokens belong to the bin that ends at 30 %, whatever 0.3 is in binary
        bins = -(-self.supervised * _NUM_SHARES // np.maximum(lengths, 1))
        seen = lengths if len(lengths) else np.zeros(1)
        values = {"min": seen.min(), "median": np.median(seen), "mean": seen.mean()}
        values |= {"p95": np.percentile(seen, 95), "max": seen.max()}
        return {
            "samples": len(lengths),
            "duplicates": len(lengths) - len(np.unique(self.digests)),
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / max(1, tokens),
            "supervised_share_histogram": np.bincount(bins, minlength=_NUM_SHARES + 1).tolist(),
            "lengths": {key: float(value) for key, value in values.items()},
        }


def sample_numbers(samples: Samples) -> SampleNumbers:
    """The numbers of a split that is tokenized."""
    fills = None if samples.capacity is None else samples.item_tokens() / samples.capacity
    return SampleNumbers(samples.lengths, samples.num_supervised, samples.rows.digests[samples.row_ids], fills)


def first_rows(config: DataConfig, encoder: RowEncoder) -> tuple[SampleNumbers, dict[str, Any]]:
    """The numbers and counts of the first rows of a streamed data.train: a window, but no more than 1,000.

    Raises:
        DataError: A row is bad, no token is supervised, or more rows than ``data.max_dropped_share`` are cut to
            nothing.
    """
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
    return SampleNumbers(lengths, supervised, digests, fills), {
        "seen": f"the first {len(encoded):,} rows of a stream",
        "format": _together(stream.formats),
        "rows_read": len(encoded),
        "dropped": dict(dropped),
        "truncated": sum(row.truncated for row in encoded),
        "split": 0 if stream.pairs else sum(len(row.samples) > 1 for row in encoded),
    }


def describe_data(
    samples: Mapping[str, Samples],
    config: DataConfig,
    encoder: RowEncoder,
    stream: tuple[SampleNumbers, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Everything about the prepared splits that a run should be judged by before step 1.

    Args:
        samples: By split, as :func:`lit_fsdp.data.packing.prepare_samples` returns them.
        config: The ``data`` section they were made with.
        encoder: What they were made by.
        stream: :func:`first_rows` of data.train, if it is a stream.

    Returns:
        Plain data for JSON: ``splits`` (per split counts, lengths, supervision, packs and ``sources``), ``template``,
        the settings that decide them, and ``warnings``: what stops nobody but should be known.
    """
    found = {"train": stream} if stream is not None else {}
    found |= {name: (sample_numbers(split), _counts(name, split, config)) for name, split in samples.items()}
    splits = {
        name: {**counts, **numbers.describe(), "packs": _packs(numbers, config)}
        for name, (numbers, counts) in found.items()
    }
    for name in ("val", "test"):
        if name in splits and "train" in splits:
            splits[name]["in_train"] = int(np.isin(found[name][0].digests, found["train"][0].digests).sum())
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


def _counts(name: str, samples: Samples, config: DataConfig) -> dict[str, Any]:
    """Of one split. Of rows that are taken out of data.train it is said there what became of all of them."""
    meta, draws = samples.rows.meta, _draws(samples)
    read = {key: meta[key] for key in ("rows_read", "dropped", "truncated", "split")}
    if name == "val" and config.val_split is not None:
        read = {"taken_out_of": "data.train", "rows_read": None, "dropped": {}, "truncated": None, "split": None}
    return {
        **read,
        "format": _together(entry["format"] for entry in meta["entries"]),
        "tokens_per_epoch": round(float(samples.lengths @ draws)),
        "supervised_tokens_per_epoch": round(float(samples.num_supervised @ draws)),
        "fingerprint": meta["fingerprint"],
        "cache": str(samples.rows.folder),
        "sources": _sources(name, samples, config),
    }


def _draws(samples: Samples) -> np.ndarray:
    """How often each row comes in one epoch, on average over epochs, float64 in the order of ``row_ids``."""
    per_item = np.ones(len(samples))
    if samples.weights:
        drawn = np.array(apportion(len(samples), samples.weights))
        per_item = np.repeat(drawn / np.array(samples.groups), samples.groups)
    return np.repeat(per_item, np.diff(samples.offsets))


def _together(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _packs(numbers: SampleNumbers, config: DataConfig) -> dict[str, Any] | None:
    if numbers.fills is None:
        return None
    return {"count": len(numbers.fills), "capacity": config.max_seq_length, "fill": float(numbers.fills.mean())}


def _sources(name: str, samples: Samples, config: DataConfig) -> list[dict[str, Any]]:
    """One entry per source of the recipe, with its rows in this split."""
    section = "train" if name == "val" and config.val_split is not None else name
    rows, ids = samples.rows, np.sort(samples.row_ids)
    found, start = [], 0
    for entry, made in zip(check_sources(section, getattr(config, section)), rows.meta["entries"], strict=True):
        mine = ids[np.searchsorted(ids, start) : np.searchsorted(ids, start + made["rows"])]
        start += made["rows"]
        numbers = SampleNumbers(rows.lengths[mine], rows.num_supervised[mine].astype(np.int64), rows.digests[mine])
        counts = {key: made[key] for key in ("format", "rows_read", "dropped", "truncated", "split")}
        found.append({"name": entry.source, "weight": entry.weight, **counts, **numbers.describe()})
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
