"""What the runs of ``lit-fsdp bench`` give, cell by cell: rates with their spread, scaling, memory, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_BAR, _LONGEST, _LETTER = 22, 430, 7
"""Height of a bar with its gap, length of the longest one, and width of a letter, in pixels."""


@dataclass
class BenchCell:
    """One combination of varied values on a number of ranks, over its finished runs."""

    values: tuple[str, ...]
    ranks: int
    rates: list[float]
    """Tokens per second over all ranks, of each run; none: it has failed."""
    peak_gib: float
    """Largest of all runs."""
    failed: str
    """Why the last run did; empty where it has finished."""
    efficiency: float = 1.0
    """Tokens per second and rank relative to the same values on the fewest ranks."""

    @property
    def rate(self) -> float:
        """Median of the runs."""
        return statistics.median(self.rates)


def bench_cells(rows: Sequence[Mapping[str, str]], keys: Sequence[str]) -> list[BenchCell]:
    """Sum up the rows of a ``bench.csv``, in the order in which its cells first occur.

    Args:
        rows: With a column per varied key, ``ranks``, ``tokens_per_second``, ``peak_memory_gib`` and ``failed``.
        keys: What was varied.
    """
    cells: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in (*keys, "ranks")), []).append(row)
    found = []
    for (*values, ranks), runs in cells.items():
        finished = [row for row in runs if not row["failed"]]
        rates = [float(row["tokens_per_second"]) for row in finished]
        peak = max((float(row["peak_memory_gib"]) for row in finished), default=0.0)
        found.append(BenchCell(tuple(values), int(ranks), rates, peak, runs[-1]["failed"]))
    with_rates = [cell for cell in found if cell.rates]
    for cell in with_rates:
        fewest = min((one for one in with_rates if one.values == cell.values), key=lambda one: one.ranks)
        cell.efficiency = cell.rate / cell.ranks / (fewest.rate / fewest.ranks)
    return found


def bench_picture(cells: Sequence[BenchCell]) -> str:
    """Draw tokens/s of the cells that finished as an SVG: bars of medians, with a line from the least to the most."""
    bars = [(f"{', '.join(cell.values)}, ranks {cell.ranks}", cell) for cell in cells if cell.rates]
    most = max((max(cell.rates) for _, cell in bars), default=1.0)
    left = _LETTER * max((len(label) for label, _ in bars), default=0)
    parts = []
    for number, (label, cell) in enumerate(bars):
        top = 10 + _BAR * number
        median, low, high = (_LONGEST * rate / most for rate in (cell.rate, min(cell.rates), max(cell.rates)))
        parts += [
            f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left}" y="{top}" width="{median:.1f}" height="16" fill="#3b6fb6"/>',
            f'<path d="M{left + low:.1f} {top + 8}H{left + high:.1f}" stroke="#e08a2c" stroke-width="3"/>',
            f'<text x="{left + _LONGEST + 8}" y="{top + 12}">{cell.rate:,.0f} tokens/s</text>',
        ]
    size = f'width="{left + _LONGEST + 130}" height="{20 + _BAR * len(bars)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])
