"""The pages that a reader follows: README.md and the manual, with their blocks, commands and links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS = "# needs: "
"""How the first line of a block begins whose commands need hardware, a network or many minutes."""
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"\| `((?:lit-fsdp|python recipes/)[^`]*)` \|")


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    return [text for language, text in _FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def script(page: Path) -> str:
    """The commands of a page that can be run anywhere: its blocks that need nothing."""
    return "".join(block for block in blocks(page, "sh") if not block.startswith(NEEDS))


def cells(page: Path) -> list[str]:
    """Commands that are a cell of a table."""
    return _CELL.findall(page.read_text(encoding="utf-8"))
