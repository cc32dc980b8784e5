"""The table of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_fsdp.checkpoint.find import Damaged, Found, best, moved_aside
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.staging import unfinished
from lit_fsdp.checkpoint.verify import Difference, find_differences
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError

_RECIPE = "recipe.yaml"
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Rule:
    """What decides which checkpoint is the best."""

    monitor: str
    """Name of the metric."""
    mode: Literal["min", "max"]
    """Whether a smaller (min) or a larger (max) value is better."""


@dataclass(frozen=True)
class Row:
    """One checkpoint of a run, complete or not."""

    entry: Found | Damaged
    """What its manifest and the sizes of its files say."""
    means: tuple[str, ...]
    """Which words stand for it: ``last``, ``best``."""
    differences: list[Difference] | None
    """What its hashes say; None if nobody asked."""

    @property
    def reason(self) -> str:
        """What is visibly wrong with it, without the path of its folder; empty if it is complete."""
        return self.entry.reason.replace(f"{self.entry.path}/", "") if isinstance(self.entry, Damaged) else ""

    def record(self) -> dict[str, Any]:
        """As JSON."""
        entry, found = self.entry, self.entry if isinstance(self.entry, Found) else None
        return {
            "step": None if entry.step < 0 else entry.step,
            "path": str(entry.path),
            "created": found and found.created,
            "bytes": found and found.num_bytes,
            "metrics": entry.metrics,
            "complete": found is not None,
            "reason": self.reason or None,
            "verified": None if self.differences is None else not self.differences,
            "differences": None if self.differences is None else {d.file: d.problem for d in self.differences},
            "means": list(self.means),
        }


def list_run(entries: Sequence[Found | Damaged], rule: Rule, verify: bool) -> list[Row]:
    """One row per checkpoint, in the order given; with ``verify`` every file is hashed."""
    complete = [entry for entry in entries if isinstance(entry, Found)]
    top = best(complete, rule.monitor, rule.mode)
    rows = []
    for entry in entries:
        words = (("last", complete and entry is complete[-1]), ("best", top is not None and entry is top))
        means = tuple(word for word, holds in words if holds)
        rows.append(Row(entry, means, find_differences(entry.path) if verify else None))
    return rows


def rule_of_run(folder: Path, entries: Sequence[Found | Damaged]) -> Rule:
    """``checkpoint.monitor`` and ``mode`` of the newest checkpoint's recipe, else of the run folder's, else defaults.

    Args:
        folder: The run's folder of checkpoints.
        entries: What lies there, oldest first.
    """
    recipes = [folder.parent / _RECIPE]
    complete = [entry for entry in entries if isinstance(entry, Found)]
    if complete and _RECIPE in read_manifest(complete[-1].path).files:
        recipes.insert(0, complete[-1].path / _RECIPE)
    for recipe in recipes:
        try:
            section = CheckpointConfig(**yaml.safe_load(recipe.read_text(encoding="utf-8"))["checkpoint"])
        except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError, CheckpointError):
            continue  # somebody else's file, or a section with keys of another version
        return Rule(str(section.monitor), section.mode)
    return Rule(CheckpointConfig.monitor, CheckpointConfig.mode)


def notes(folder: Path, rows: Sequence[Row]) -> list[str]:
    """What the table of ``folder`` does not show, one line each."""
    lines = []
    if not any(isinstance(row.entry, Found) for row in rows):
        lines.append(f"{folder}: no complete checkpoint" if rows else f"{folder}: no checkpoints yet")
    last = next((row.entry.step for row in rows if "last" in row.means), -1)
    for row in rows:
        if row.reason and row.entry.step > last >= 0:
            lines.append(f"{row.entry.path.name} is newer than the newest complete one, but damaged")
    for hidden in unfinished(folder):
        what = "a save" if hidden.kind == "tmp" else "a removal"
        state = "going on" if hidden.is_live else "that did not end; the next save clears it away"
        lines.append(f"{hidden.path.name}: {what} {state}")
    lines.extend(f"{path.name}: moved aside by a run that went on from an older step" for path in moved_aside(folder))
    return lines


def table(rows: Sequence[Row], monitor: str) -> str:
    """The rows as columns of text."""
    lines = [["step", "time (UTC)", "size", monitor, "complete", "verified", ""]]
    for row in rows:
        found = row.entry if isinstance(row.entry, Found) else None
        value = (row.entry.metrics or {}).get(monitor)
        lines.append(
            [
                str(row.entry.step) if row.entry.step >= 0 else row.entry.path.name,
                found.created.replace("T", " ").removesuffix("+00:00") if found else "-",
                size_words(found.num_bytes) if found else "-",
                "-" if value is None else f"{value:.6g}",
                "yes" if found else "no",
                _verified(row.differences),
                row.reason or ", ".join(row.means),
            ]
        )
    columns = [_column(cells, to_the_right=i in (0, 2, 3)) for i, cells in enumerate(zip(*lines, strict=True))]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def size_words(num_bytes: int) -> str:
    """``1.5 MiB`` for 1572864."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} bytes" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def _column(cells: Sequence[str], to_the_right: bool) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) if to_the_right else cell.ljust(width) for cell in cells]


def _verified(differences: Sequence[Difference] | None) -> str:
    if differences is None:
        return "-"
    more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
    return f"no: {differences[0].file}{more}" if differences else "yes"
