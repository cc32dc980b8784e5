"""The supervision proof of a stream, from the first rows of it: more of them are never there at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.encode import CUT, TOO_LONG, EncodedRow, RowEncoder
from lit_fsdp.data.files import Row
from lit_fsdp.data.packing import plan_packs
from lit_fsdp.data.row_numbers import describe_rows, expected_padding, sample_digest
from lit_fsdp.data.stream import SampleStream
from lit_fsdp.errors import DataError

_LOOKED_AT = 10_000


class WindowSeen:
    """The first ``data.shuffle_window`` rows of a streamed data.train, tokenised.

    Args:
        config: The ``data`` section.
        encoder: Makes samples of rows.

    Attributes:
        lengths: Tokens per sample, int64 (N,).
        learnt: Supervised tokens per sample, int64 (N,).
        digests: Hash per sample, uint64 (N,).
        fills: Share of each pack that is filled, (packs,); ``None`` without packing.

    Raises:
        DataError: A row is bad, no token is supervised, or more rows than ``data.max_dropped_share`` are cut to
            nothing.
    """

    def __init__(self, config: DataConfig, encoder: RowEncoder) -> None:
        self._config = config
        self._rows, self._encoded, self._formats = first_window(config, encoder)
        samples = [sample for row in self._encoded for sample in row.samples]
        self._dropped = Counter(row.dropped for row in self._encoded if row.dropped is not None)
        self.lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        self.learnt = np.array([np.count_nonzero(sample.supervised) for sample in samples], dtype=np.int64)
        self.digests = np.array([sample_digest(sample.input_ids) for sample in samples], dtype=np.uint64)
        self._check()
        self.fills = self._packed() if config.packing else None

    def _packed(self) -> np.ndarray:
        members, offsets = plan_packs(self.lengths, self._config.max_seq_length)
        return np.add.reduceat(self.lengths[members], offsets[:-1]) / self._config.max_seq_length

    def _check(self) -> None:
        read, cut = len(self._rows), self._dropped[CUT] + self._dropped[TOO_LONG]
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._dropped.items())
        if not self.learnt.any():
            raise DataError(
                f"data.train: no token of the first {read} rows of the stream is supervised; dropped {reasons or 0}\n"
                "  fix:     rows need an assistant turn within data.max_seq_length tokens"
            )
        if cut > self._config.max_dropped_share * read:
            raise DataError(
                f"data.train: of {cut} of the first {read} rows of the stream nothing is left within "
                f"data.max_seq_length {self._config.max_seq_length}\n"
                f"  allowed: data.max_dropped_share {self._config.max_dropped_share:g} of the rows\n"
                "  fix:     raise data.max_seq_length, set data.truncation: start, or raise data.max_dropped_share"
            )

    def describe(self) -> dict[str, Any]:
        """The same as of a split that is tokenised as a whole, but for what only the end of it could tell."""
        config, read = self._config, len(self._rows)
        counts: dict[str, Any] = {
            "rows_read": read,
            "dropped": dict(self._dropped),
            "truncated": sum(row.truncated for row in self._encoded),
            "split": sum(len(row.samples) > 1 for row in self._encoded),
        }
        numbers = describe_rows(self.lengths, self.learnt, self.digests)
        packs = None
        if self.fills is not None:
            count = len(self.fills)
            fill = numbers["tokens"] / (count * config.max_seq_length)
            packs = {"count": count, "capacity": config.max_seq_length, "fill": fill}
        forms = ", ".join(dict.fromkeys(self._formats))
        return {
            "seen": f"the first {read:,} rows of a stream",
            **counts,
            **numbers,
            "tokens_per_epoch": None,
            "supervised_tokens_per_epoch": None,
            "packs": packs,
            "padding_share_unpacked": expected_padding(self.lengths, config.micro_batch_size),
            "fingerprint": None,
            "cache": None,
            "sources": [{"name": "data.train", "weight": None, "format": forms, **counts, **numbers}],
        }


def first_window(config: DataConfig, encoder: RowEncoder) -> tuple[list[Row], list[EncodedRow], list[RowFormat]]:
    """The first rows of a streamed data.train and what becomes of each, to be looked at.

    As many as ``shuffle_window``, but no more than 10,000: nobody should wait long for step 1.

    Returns:
        Rows with their places in file order, what became of each, and the row format of each.

    Raises:
        DataError: A row is bad.
    """
    size = min(config.shuffle_window, _LOOKED_AT)
    stream = SampleStream(replace(config, shuffle_window=size), encoder, 0)
    window = next(stream.windows.read())
    formats = [stream.windows.formats[source] for source, _ in window.rows]
    return [row for _, row in window.rows], stream.encode(window), formats
