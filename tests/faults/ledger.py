"""How many of each kind of injection were survived: printed as a table at the end, also when something failed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Trials by injection."""

    tried: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)
    notes: dict[str, list[str]] = field(default_factory=dict)

    @contextlib.contextmanager
    def trial(self, row: str, count: int = 1) -> Iterator[None]:
        """``count`` trials that passed if the block ends without an error."""
        self.tried[row] += count
        yield
        self.passed[row] += count

    def note(self, row: str, text: str) -> None:
        """Say something about a row, e.g. why it was not tried."""
        self.tried[row] += 0
        self.notes.setdefault(row, []).append(text)

    def table(self) -> list[str]:
        """Lines of a Markdown table."""
        lines = ["| injection | passed / tried | |", "|---|---|---|"]
        for row in self.tried:
            lines.append(f"| {row} | {self.passed[row]} / {self.tried[row]} | {'; '.join(self.notes.get(row, []))} |")
        return lines
