"""Lengths, supervised shares, duplicates and expected padding of rows, from arrays with one number per row."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

NUM_SHARES = 10
"""Bins of the histogram of supervised shares: (0, 10 %], (10 %, 20 %], … (90 %, 100 %]."""


def length_summary(lengths: np.ndarray) -> dict[str, float]:
    """Smallest, median, mean, 95th percentile and largest length in tokens; all 0 for no rows."""
    if not len(lengths):
        return dict.fromkeys(("min", "median", "mean", "p95", "max"), 0.0)
    median, p95 = np.percentile(lengths, (50, 95))
    return {
        "min": int(lengths.min()),
        "median": float(median),
        "mean": float(lengths.mean()),
        "p95": float(p95),
        "max": int(lengths.max()),
    }


def share_histogram(lengths: np.ndarray, supervised: np.ndarray) -> list[int]:
    """Rows per supervised share: first those with none, then :data:`NUM_SHARES` bins, each with its upper border.

    Args:
        lengths: Tokens per row, int64 (N,), all > 0.
        supervised: Supervised tokens per row, int64 (N,).
    """
    # in whole numbers: 30 of 100 tokens belong to the bin that ends at 30 %, whatever 0.3 is in binary
    bins = -(-supervised * NUM_SHARES // lengths) if len(lengths) else np.zeros(0, dtype=np.int64)
    return np.bincount(bins, minlength=NUM_SHARES + 1).tolist()


def expected_padding(lengths: np.ndarray, batch_size: int, weights: np.ndarray | None = None) -> float:
    """Share of a padded batch that is padding: 1 - mean length / mean of the longest of a batch, over all orders.

    Args:
        lengths: Tokens per row, (N,).
        batch_size: Rows that are padded to the longest of them.
        weights: Chance of each row, (N,), where rows are drawn by weight; default: each row once per epoch.
    """
    if not len(lengths):
        return 0.0
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order].astype(np.float64)
    if weights is None:
        mean, below = ordered.mean(), _all_among_shortest(len(ordered), min(batch_size, len(ordered)))
    else:
        chances = weights[order] / weights.sum()
        mean, below = float(ordered @ chances), np.minimum(chances.cumsum(), 1.0) ** batch_size
    longest = float(ordered @ np.diff(below, prepend=0.0))
    return max(0.0, 1.0 - mean / longest)


def _all_among_shortest(count: int, drawn: int) -> np.ndarray:
    """For k = 1 … count the chance that all of ``drawn`` rows, drawn without return, are among the k shortest.

    It is C(k, drawn) / C(count, drawn), multiplied up from the largest k down: no factor is above 1.
    """
    k = np.arange(count, drawn, -1, dtype=np.float64)
    chances = np.concatenate([[1.0], np.cumprod((k - drawn) / k)])[::-1]  # k = drawn … count
    return np.concatenate([np.zeros(drawn - 1), chances])


def num_duplicates(digests: np.ndarray) -> int:
    """Rows that are there already: all but the first of each set of equal ones."""
    return len(digests) - len(np.unique(digests))


def num_shared(digests: np.ndarray, others: np.ndarray) -> int:
    """Rows of ``digests`` that are among ``others`` too."""
    return int(np.isin(digests, others).sum())


def sample_digest(input_ids: np.ndarray) -> int:
    """Hash of a sample's token ids, the same number as in ``digests`` of tokenised rows."""
    content = np.ascontiguousarray(input_ids, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def describe_rows(lengths: np.ndarray, learnt: np.ndarray, digests: np.ndarray) -> dict[str, Any]:
    """Counts, supervision and lengths of some rows, as plain data.

    Args:
        lengths: Tokens per row, int64 (N,).
        learnt: Supervised tokens per row, int64 (N,).
        digests: Hash per row, uint64 (N,).
    """
    tokens, supervised = int(lengths.sum()), int(learnt.sum())
    return {
        "samples": len(lengths),
        "duplicates": num_duplicates(digests),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "supervised_share": supervised / tokens if tokens else 0.0,
        "supervised_share_histogram": share_histogram(lengths, learnt),
        "lengths": length_summary(lengths),
    }
