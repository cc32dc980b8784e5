"""Single samples of prepared data, with the rows they were made of: what is looked at is what is trained on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.encode import CUT, RowEncoder
from lit_fsdp.data.samples import Samples
from lit_fsdp.data.sources import find_sources
from lit_fsdp.errors import ConfigError, DataError

_LOOKED_THROUGH = 200_000
_NO_LIMIT = 2**30


@dataclass(frozen=True)
class SourceRow:
    """A row as it was read."""

    number: int
    """Counted over all sources of the split, from 0."""
    place: str
    """File and line."""
    columns: dict[str, Any]
    form: RowFormat


@dataclass(frozen=True)
class Shown:
    """One sample to look at, or a row that gave none."""

    place: str
    input_ids: np.ndarray
    """int32 (T,), as trained on; of a dropped row all it would have, or nothing if it cannot be encoded."""
    supervised: np.ndarray
    """Shape (T,), true where the token is learnt."""
    cut: str | None = None
    """What is missing from it and why, where it was truncated."""
    cut_at_start: bool = False
    cut_after: int | None = None
    """Of a row that is shown whole: tokens that lie within ``data.max_seq_length``."""
    dropped: str | None = None
    """Why it is not trained on."""
    columns: dict[str, Any] | None = None
    """The row itself, where nothing came of it."""


@dataclass(frozen=True)
class Item:
    """What one place of a batch holds: a sample, or a pack of them."""

    title: str
    samples: list[Shown]
    capacity: int | None = None
    """Tokens of the pack."""


class Inspector:
    """Finds samples and rows of one split.

    Args:
        tokenizer: Of the recipe.
        config: The ``data`` section.
        split: ``train``, ``val``, ``test`` or ``predict``.
    """

    def __init__(self, tokenizer: Any, config: DataConfig, split: str) -> None:
        self._config = config
        self._section = "train" if split == "val" and config.val_split is not None else split
        self._encoder = RowEncoder(tokenizer, config)
        without_limit = replace(config, max_seq_length=_NO_LIMIT, truncation="end")
        self._whole_encoder = RowEncoder(tokenizer, without_limit)

    def rows(self) -> Iterator[SourceRow]:
        """Every row of the split's sources in order.

        Raises:
            DataError: A source cannot be read.
        """
        number = 0
        streamed = self._config.streaming and self._section == "train"
        for source in find_sources(getattr(self._config, self._section), self._config, streamed):
            for chunk in source.chunks():
                for place, columns in chunk.rows():
                    yield SourceRow(number, place, columns, source.row_format)
                    number += 1

    def row(self, number: int) -> SourceRow:
        """One row.

        Raises:
            ConfigError: There are not so many.
        """
        last = -1
        for row in self.rows():
            last = row.number
            if last == number:
                return row
        raise ConfigError("--row", number, f"0 to {last}, as data.{self._section} has {last + 1} rows", "--row 0")

    def items(self, samples: Samples, first: int) -> list[Item]:
        """The first items of the split, in file order."""
        chosen = [samples.members(item).tolist() for item in range(min(first, len(samples)))]
        numbers = {i: int(samples.rows.numbers[i]) for members in chosen for i in members}
        found = self._find(set(numbers.values()))
        return [
            Item(
                _title(samples, item, members),
                [self._shown(samples, i, numbers[i], found.get(numbers[i])) for i in members],
                samples.capacity,
            )
            for item, members in enumerate(chosen)
        ]

    def _find(self, numbers: Collection[int]) -> dict[int, SourceRow]:
        """Rows by number; those far inside large sources are left out, as everything before them must be read."""
        near = [number for number in numbers if number < _LOOKED_THROUGH]
        if not near:
            return {}
        return {row.number: row for row in islice(self.rows(), max(near) + 1) if row.number in numbers}

    def _shown(self, samples: Samples, index: int, number: int, row: SourceRow | None) -> Shown:
        ids, supervised = samples.rows.row(index)
        if row is None:
            return Shown(f"row {number}", ids, supervised)
        if len(ids) < self._config.max_seq_length - 1 or not self._encode(row).truncated:
            return Shown(row.place, ids, supervised)
        at_start = self._config.truncation == "start"
        return Shown(row.place, ids, supervised, self._cut_words(row, len(ids)), at_start)

    def _cut_words(self, row: SourceRow, kept: int) -> str:
        total = sum(
            len(one.input_ids) for one in self._whole_encoder.encode([row.columns], row.form, [row.place])[0].samples
        )
        return (
            f"cut here: {total - kept:,} of {total:,} tokens lie beyond data.max_seq_length "
            f"{self._config.max_seq_length:,} (data.truncation: {self._config.truncation})"
        )

    def _encode(self, row: SourceRow) -> Any:
        return self._encoder.encode([row.columns], row.form, [row.place])[0]

    def outcome(self, row: SourceRow) -> Item:
        """What becomes of a row, by the same encoder as in training: its samples, or why there is none."""
        title = f"row {row.number}"
        try:
            encoded = self._encode(row)
        except DataError as error:
            reason = str(error).removeprefix(f"{row.place}: ")
            return Item(title, [_nothing(row, f"refused: {reason}")])
        if encoded.dropped is None:
            cut = self._cut_words(row, len(encoded.samples[0].input_ids)) if encoded.truncated else None
            at_start = self._config.truncation == "start"
            shown = [Shown(row.place, one.input_ids, one.supervised, cut, at_start) for one in encoded.samples]
            return Item(title, shown)
        try:
            whole = self._whole_encoder.encode([row.columns], row.form, [row.place])[0].samples
        except DataError:
            whole = []
        if not whole:
            return Item(title, [_nothing(row, encoded.dropped)])
        cut_at_end = encoded.dropped == CUT and self._config.truncation == "end"
        limit = self._config.max_seq_length if cut_at_end else None
        more: dict[str, Any] = {"cut_after": limit, "dropped": encoded.dropped}
        return Item(title, [Shown(row.place, one.input_ids, one.supervised, **more) for one in whole])

    def first_outcomes(self, count: int) -> list[Item]:
        """What becomes of the first rows, as far as they can be read."""
        found: list[Item] = []
        try:
            for row in islice(self.rows(), count):
                found.append(self.outcome(row))
        except DataError:  # said already: it is why we look at single rows
            return found
        return found


def _nothing(row: SourceRow, why: str) -> Shown:
    return Shown(row.place, np.zeros(0, np.int32), np.zeros(0, bool), dropped=why, columns=row.columns)


def _title(samples: Samples, item: int, members: Sequence[int]) -> str:
    if samples.capacity is None:
        return f"sample {item} of {len(samples):,}"
    used = int(np.diff(np.asarray(samples.rows.offsets))[members].sum())
    count = f"{len(members)} sample{'s' * (len(members) > 1)}"
    full = used / samples.capacity
    return f"pack {item} of {len(samples):,}: {count}, {used:,} of {samples.capacity:,} tokens ({full:.1%})"
