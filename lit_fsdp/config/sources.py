"""One source of rows, where a name alone does not say enough."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError

GENERATED = "generated:"
"""How the name of rows begins that are made on the spot."""
_MOST_GENERATED = 1_000_000
_ROWS = r"[\w.\-]+(\[-?\d*%?:-?\d*%?\](\([a-z0-9_]+\))?)?"
HUB_SLICE = re.compile(rf"[\w.\-/]+(:[\w.\-]+)*:{_ROWS}(\+{_ROWS})*")
"""A part of a data set as ``datasets`` writes it, imdb:train[:10%], which is no pattern of files."""
RowFormat = Literal["auto", "messages", "sharegpt", "instruction", "prompt_completion", "text", "tokens"]


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One entry of ``data.train`` (or val, test, predict) with its own share, format and columns."""

    source: str
    """File, glob, folder, datasets name (name:split) or generated:N."""
    weight: float | None = None
    """Share of the samples that come from here, relative to the other weights; either all sources have one or none."""
    format: RowFormat | None = None
    """Row format of this source; default: data.format."""
    columns: dict[str, str] | None = None
    """Our column: the source's column, e.g. {messages: chat}; default: data.columns."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError("source", "''", "a file, glob, folder, datasets name or generated:N", "name the rows")
        if self.weight is not None and not 0 < self.weight < float("inf"):
            raise ConfigError(
                "weight", self.weight, "a finite number > 0", "write weight: 1.0, or leave the source out"
            )
        check_columns("columns", self.columns)


COLUMNS = (
    *("messages", "conversations", "system", "tools", "instruction", "input", "output", "prompt", "completion", "text"),
    *("input_ids", "labels", "supervised", "loss_mask", "completion_mask", "assistant_masks", "attention_mask"),
)
"""Our columns, of all row formats: what ``columns`` may map."""


def check_columns(field: str, columns: dict[str, str] | None) -> None:
    """Raise ConfigError unless every key is one of our columns, and no two keys name one column of the source."""
    for ours, theirs in (columns or {}).items():
        if ours not in COLUMNS:
            near = next((name for name in COLUMNS if theirs == name), "messages")
            raise ConfigError(
                f"{field}.{ours}", theirs, f"one of our columns: {', '.join(COLUMNS)}", f"write {{{near}: {ours}}}"
            )
        if not isinstance(theirs, str) or not theirs:
            raise ConfigError(f"{field}.{ours}", repr(theirs), "the name of a column of the source", "name it")
    names = list((columns or {}).values())
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(field, f"{twice!r} for two of our columns", "each column of the source once", "drop one")


Sources = str | list[str | SourceConfig]
"""What ``data.train`` may hold."""


def check_sources(split: str, sources: Sources | None) -> list[SourceConfig]:
    """The entries of one split, names alone as entries of their own.

    Raises:
        ConfigError: Some entries have a weight and some have none, there is none at all, or one generates no number
            of rows.
    """
    if sources is None:
        return []
    entries = [sources] if isinstance(sources, str) else list(sources)
    if not entries or "" in entries:
        raise ConfigError(split, repr(sources), "at least one source, each with a name", f"write {split}: rows.jsonl")
    found = [SourceConfig(source=entry) if isinstance(entry, str) else entry for entry in entries]
    for i, entry in enumerate(found):
        if entry.source.startswith(GENERATED):
            _check_count(split if isinstance(sources, str) else f"{split}[{i}]", entry.source)
    without = [entry.source for entry in found if entry.weight is None]
    if without and len(without) < len(found):
        raise ConfigError(
            split,
            f"weights for {len(found) - len(without)} of {len(found)} sources",
            "a weight for every source of the mix, or for none (then every row counts once)",
            f"give {without[0]} a weight",
        )
    return found


def _check_count(field: str, name: str) -> None:
    count = name.removeprefix(GENERATED)
    if not (count.isascii() and count.isdigit() and len(count) < 10 and 0 < int(count) <= _MOST_GENERATED):
        raise ConfigError(field, name[:80], f"{GENERATED}N, N from 1 to {_MOST_GENERATED}", "write generated:64")
