"""What is about to be trained on, before step 1: the supervision proof as plain data.

Rows are counted as they were read and tokens as they lie in the cache; of a stream, its first rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
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


@dataclass(frozen=True)
class FirstRows:
    """What became of the first rows of a stream; more of them are never there at once."""

    numbers: SampleNumbers
    counts: dict[str, Any]
    formats: list[str]


def first_rows(config: DataConfig, encoder: RowEncoder) -> FirstRows:
    """Look at the first rows of a streamed data.train: a window, but no more than 1,000.

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
    fills = None
    if config.packing:
        members, offsets = plan_packs(lengths, config.max_seq_length)
        fills = np.add.reduceat(lengths[members], offsets[:-1]) / config.max_seq_length
    numbers = SampleNumbers(
        lengths,
        np.array([np.count_nonzero(sample.supervised) for sample in samples]),
        np.array([sample_digest(sample.input_ids) for sample in samples], dtype=np.uint64),
        fills,
    )
    counts = {
        "rows_read": len(encoded),
        "dropped": dict(dropped),
        "truncated": sum(row.truncated for row in encoded),
        "split": sum(len(row.samples) > 1 for row in encoded),
    }
    return FirstRows(numbers, counts, list(dict.fromkeys(stream.formats)))


def describe_data(
    samples: Mapping[str, Samples], config: DataConfig, encoder: RowEncoder, stream: FirstRows | None = None
) -> dict[str, Any]:
    """Everything about the prepared splits that a run should be judged by before step 1.

    Args:
        samples: By split, as :func:`lit_fsdp.data.packing.prepare_samples` returns them.
        config: The ``data`` section they were made with.
        encoder: What they were made by.
        stream: The first rows of data.train, if it is a stream.

    Returns:
        Plain data for JSON: ``splits`` (per split counts, lengths, supervision, packs and ``sources``), ``template``,
        the settings that decide them, and ``warnings``: what stops nobody but should be known.
    """
    numbers = {name: sample_numbers(split) for name, split in samples.items()}
    splits = {name: _describe(name, split, numbers[name], config) for name, split in samples.items()}
    if stream is not None:
        numbers, splits = {"train": stream.numbers, **numbers}, {"train": _describe_stream(stream, config), **splits}
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
        "template": _template(config, encoder),
        "splits": splits,
        "warnings": [line for name, split in splits.items() for line in _warnings(name, split)],
    }


def _describe(name: str, samples: Samples, numbers: SampleNumbers, config: DataConfig) -> dict[str, Any]:
    """One split. Of rows that are taken out of data.train it is said there what became of all of them."""
    meta, draws = samples.rows.meta, _draws(samples)
    read = {key: meta[key] for key in ("rows_read", "dropped", "truncated", "split")}
    if name == "val" and config.val_split is not None:
        read = {"taken_out_of": "data.train", "rows_read": None, "dropped": {}, "truncated": None, "split": None}
    return {
        **read,
        **numbers.describe(),
        "tokens_per_epoch": round(float(numbers.lengths @ draws)),
        "supervised_tokens_per_epoch": round(float(numbers.supervised @ draws)),
        "packs": _packs(numbers, config),
        "padding_share_unpacked": _padding(numbers.lengths, name, config, draws),
        "fingerprint": meta["fingerprint"],
        "cache": str(samples.rows.folder),
        "sources": _sources(name, samples, config),
    }


def _describe_stream(stream: FirstRows, config: DataConfig) -> dict[str, Any]:
    numbers = stream.numbers.describe()
    form = ", ".join(stream.formats)
    return {
        "seen": f"the first {stream.counts['rows_read']:,} rows of a stream",
        **stream.counts,
        **numbers,
        "tokens_per_epoch": None,
        "supervised_tokens_per_epoch": None,
        "packs": _packs(stream.numbers, config),
        "padding_share_unpacked": _padding(stream.numbers.lengths, "train", config),
        "fingerprint": None,
        "cache": None,
        "sources": [{"name": "data.train", "weight": None, "format": form, **stream.counts, **numbers}],
    }


def _draws(samples: Samples) -> np.ndarray:
    """How often each row comes in one epoch, on average over epochs, float64 in the order of ``row_ids``."""
    per_item = np.ones(len(samples))
    if samples.weights:
        drawn = np.array(apportion(len(samples), samples.weights))
        per_item = np.repeat(drawn / np.array(samples.groups), samples.groups)
    return np.repeat(per_item, np.diff(samples.offsets))


def _packs(numbers: SampleNumbers, config: DataConfig) -> dict[str, Any] | None:
    if numbers.fills is None:
        return None
    return {"count": len(numbers.fills), "capacity": config.max_seq_length, "fill": float(numbers.fills.mean())}


def _padding(lengths: np.ndarray, name: str, config: DataConfig, draws: np.ndarray | None = None) -> float:
    """Share of padded micro-batches that is padding, in one random order; rows of a mix are drawn by their share."""
    size = config.micro_batch_size if name == "train" else config.val_micro_batch_size or config.micro_batch_size
    size = min(size, len(lengths))
    chances = None if draws is None or np.all(draws == 1) else draws / draws.sum()
    order = np.random.default_rng(0).choice(lengths, len(lengths), replace=chances is not None, p=chances)
    batches = order[: len(order) // size * size].reshape(-1, size)
    return 1.0 - float(batches.sum() / (batches.max(axis=1).sum() * size))


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
