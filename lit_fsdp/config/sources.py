"""One source of rows, where a name alone does not say enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError

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


Sources = str | list[str | SourceConfig]
"""What ``data.train`` may hold."""


def check_sources(split: str, sources: Sources | None) -> list[SourceConfig]:
    """The entries of one split, names alone as entries of their own.

    Raises:
        ConfigError: Some entries have a weight and some have none, or there is none at all.
    """
    if sources is None:
        return []
    entries = [sources] if isinstance(sources, str) else list(sources)
    if not entries or "" in entries:
        raise ConfigError(split, repr(sources), "at least one source, each with a name", f"write {split}: rows.jsonl")
    found = [SourceConfig(source=entry) if isinstance(entry, str) else entry for entry in entries]
    without = [entry.source for entry in found if entry.weight is None]
    if without and len(without) < len(found):
        raise ConfigError(
            split,
            f"weights for {len(found) - len(without)} of {len(found)} sources",
            "a weight for every source of the mix, or for none (then every row counts once)",
            f"give {without[0]} a weight",
        )
    return found
