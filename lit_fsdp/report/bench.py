"""What the runs of ``lit-fsdp bench`` give, cell by cell: rates with their spread, scaling, memory, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_BAR, _LONGEST, _LETTER = 22, 430, 7
"""Height of a bar with its gap, length of the longest one, and width of a letter, in pixels."""


@dataclass(frozen=True)
class BenchCell:
    """One combination of varied values on a number of ranks, over its finished runs."""

    values: tuple[str, ...]
    ranks: int
    rates: tuple[float, ...]
    """Tokens per second over all ranks, of each run; none: it has failed."""
    peak_gib: float
    """Largest of all runs."""
    efficiency: float | None
    """Tokens per second and rank relative to the same values on the fewest ranks."""
    failed: str
    """Why the last run did; empty where it has finished."""

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
    found: list[BenchCell] = []
    names = dict.fromkeys((tuple(row[key] for key in keys), int(row["ranks"])) for row in rows)
    fewest: dict[tuple[str, ...], float] = {}
    for values, ranks in sorted(names, key=lambda name: name[1]):
        of_cell = [row for row in rows if (tuple(row[key] for key in keys), int(row["ranks"])) == (values, ranks)]
        finished = [row for row in of_cell if not row["failed"]]
        rates = tuple(float(row["tokens_per_second"]) for row in finished)
        each = statistics.median(rates) / ranks if rates else None
        found.append(
            BenchCell(
                values,
                ranks,
                rates,
                max((float(row["peak_memory_gib"]) for row in finished), default=0.0),
                each / fewest.setdefault(values, each) if each else None,
                of_cell[-1]["failed"],
            )
        )
    return sorted(found, key=lambda cell: list(names).index((cell.values, cell.ranks)))


def bench_picture(cells: Sequence[BenchCell]) -> str:
    """Draw tokens/s of the cells that finished as an SVG: bars of medians, with a line from the least to the most."""
    finished = [cell for cell in cells if cell.rates]
    most = max((max(cell.rates) for cell in finished), default=1.0)
    labels = [f"{', '.join(cell.values)}, ranks {cell.ranks}" for cell in finished]
    left = _LETTER * max(map(len, labels), default=0)
    parts = []
    for number, (cell, label) in enumerate(zip(finished, labels, strict=True)):
        top = 10 + _BAR * number
        median, low, high = (_LONGEST * rate / most for rate in (cell.rate, min(cell.rates), max(cell.rates)))
        parts += [
            f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{left}" y="{top}" width="{median:.1f}" height="16" fill="#3b6fb6"/>',
            f'<path d="M{left + low:.1f} {top + 8}H{left + high:.1f}" stroke="#e08a2c" stroke-width="3"/>',
            f'<text x="{left + _LONGEST + 8}" y="{top + 12}">{cell.rate:,.0f} tokens/s</text>',
        ]
    size = f'width="{left + _LONGEST + 130}" height="{20 + _BAR * len(finished)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])
