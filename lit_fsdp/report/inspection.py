"""Single samples of prepared data, with the rows they were made of: what is looked at is what is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.encode import EncodedRow, RowEncoder
from lit_fsdp.data.packing import Samples
from lit_fsdp.data.readers import Row
from lit_fsdp.data.sources import find_sources
from lit_fsdp.errors import ConfigError, DataError

_LOOKED_THROUGH = 200_000
_NO_LIMIT = 2**30


@dataclass(frozen=True)
class Shown:
    """One sample to look at, or a row that gave none."""

    location: str
    """File and row."""
    input_ids: np.ndarray
    """int32 (T,), as trained on; of a dropped row all it would have, or nothing if it cannot be encoded."""
    supervised: np.ndarray
    """Shape (T,), true where the token is supervised."""
    cut: str | None = None
    """What is missing from it and why, where it was truncated."""
    dropped: str | None = None
    """Why it is not trained on."""
    columns: dict[str, Any] | None = None
    """The row itself, where nothing came of it."""


@dataclass(frozen=True)
class Item:
    """One sample of a batch, or a pack of them."""

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
        self._whole_encoder = RowEncoder(tokenizer, replace(config, max_seq_length=_NO_LIMIT, truncation="end"))

    def _rows(self) -> Iterator[tuple[Row, RowFormat]]:
        streamed = self._config.streaming and self._section == "train"
        for source in find_sources(getattr(self._config, self._section), self._config, streamed):
            for chunk in source.chunks():
                for row in chunk.rows():
                    yield row, source.row_format

    def row(self, number: int) -> Item:
        """What becomes of one row, by the same encoder as in training: its samples, or why there is none.

        Raises:
            ConfigError: There are not so many.
        """
        last = -1
        for last, (row, form) in enumerate(self._rows()):
            if last == number:
                return Item(f"row {number}", self._outcome(row, form))
        raise ConfigError("--row", number, f"0 to {last}, as data.{self._section} has {last + 1} rows", "--row 0")

    def first_rows(self, most: int) -> list[Item]:
        """What becomes of the first rows, as far as they can be read."""
        found: list[Item] = []
        rows = self._rows()
        for number in range(most):
            try:
                row, form = next(rows)
            except (DataError, StopIteration):  # an error is said already: it is why we look at single rows
                break
            found.append(Item(f"row {number}", self._outcome(row, form)))
        return found

    def items(self, samples: Samples, first: int) -> list[Item]:
        """The first items of the split, in file order, as they lie in the cache."""
        chosen = [samples.members(item).tolist() for item in range(min(first, len(samples)))]
        numbers = {index: int(samples.rows.numbers[index]) for members in chosen for index in members}
        near = max((number for number in numbers.values() if number < _LOOKED_THROUGH), default=-1)
        wanted = set(numbers.values())
        found = {number: row for number, row in enumerate(islice(self._rows(), near + 1)) if number in wanted}
        items = []
        for item, members in enumerate(chosen):
            shown = [self._shown(samples, index, found.get(numbers[index])) for index in members]
            items.append(Item(_title(samples, item, members), shown, samples.capacity))
        return items

    def _shown(self, samples: Samples, index: int, read: tuple[Row, RowFormat] | None) -> Shown:
        """A sample as it lies in the cache, with its row where that is not too far into the sources to be looked up."""
        ids, supervised = samples.rows.row(index)
        (location, row), form = read or ((f"row {samples.rows.numbers[index]}", DataError()), "auto")
        if isinstance(row, DataError):
            return Shown(location, ids, supervised)
        truncated = self._encoder.encode([row], form, [location])[0].truncated
        return Shown(location, ids, supervised, self._cut(location, row, form, len(ids)) if truncated else None)

    def _outcome(self, read: Row, form: RowFormat) -> list[Shown]:
        location, row = read
        nothing = np.zeros(0, np.int32), np.zeros(0, bool)
        if isinstance(row, DataError):
            return [Shown(location, *nothing, dropped=f"refused: {row}")]
        try:
            encoded = self._encoder.encode([row], form, [location])[0]
        except DataError as error:
            reason = str(error).removeprefix(f"{location}: ")
            return [Shown(location, *nothing, dropped=f"refused: {reason}", columns=row)]
        if encoded.dropped is None:
            kept = sum(len(one.input_ids) for one in encoded.samples)
            cut = self._cut(location, row, form, kept) if encoded.truncated else None
            return [Shown(location, one.input_ids, one.supervised, cut) for one in encoded.samples]
        whole = self._whole(location, row, form).samples
        if not whole:
            return [Shown(location, *nothing, dropped=encoded.dropped, columns=row)]
        reason = f"{encoded.dropped} (data.max_seq_length {self._config.max_seq_length:,})"
        return [Shown(location, one.input_ids, one.supervised, dropped=reason) for one in whole]

    def _whole(self, location: str, row: dict[str, Any], form: RowFormat) -> EncodedRow:
        return self._whole_encoder.encode([row], form, [location])[0]

    def _cut(self, location: str, row: dict[str, Any], form: RowFormat, kept: int) -> str:
        total = sum(len(one.input_ids) for one in self._whole(location, row, form).samples)
        config = self._config
        side = "before" if config.truncation == "start" else "behind"
        return (
            f"cut: {total - kept:,} of {total:,} tokens {side} it lie beyond data.max_seq_length "
            f"{config.max_seq_length:,} (data.truncation: {config.truncation})"
        )


def _title(samples: Samples, item: int, members: Sequence[int]) -> str:
    if samples.capacity is None:
        return f"sample {item} of {len(samples):,}"
    used = int(samples.rows.lengths[members].sum())
    num = f"{len(members)} sample{'s' * (len(members) > 1)}"
    full = used / samples.capacity
    return f"pack {item} of {len(samples):,}: {num}, {used:,} of {samples.capacity:,} tokens ({full:.1%})"
