"""The pages that a reader follows: README.md and the manual, with their blocks, commands and links."""

from __future__ import annotations

import re
from html.parser import HTMLParser
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


class Page(HTMLParser):
    """A ``report.html`` as a reader finds it; one that is not well-formed is a failure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tables, self.curves, self.tags, self.ticks = text, {}, {}, set(), list[list[str]]()
        self._open: list[str] = []
        self._title, self._said = "", ""
        self._points: list[int] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag != "meta":
            self._open.append(tag)
        given = dict(attrs)
        assert not given.keys() & {"src", "href", "onload", "onclick"}
        if tag == "polyline":
            self._points.append(len(set(str(given["points"]).split())))
        if tag == "table":
            self.tables[self._title] = []
        if tag == "tr":
            self.tables[self._title].append([])
        if given.get("class") == "ticks":
            self.ticks.append([])
        self._said = "" if tag != "b" else self._said

    def handle_data(self, data: str) -> None:
        self._said += data

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag in ("h2", "h3"):
            self._title = self._said
        if tag in ("th", "td"):
            self.tables[self._title][-1].append(self._said)
        if tag == "small":
            self.ticks[-1].append(self._said)
        if tag == "span":  # of a legend, in the order of the curves
            self.curves[self._said.rpartition(" ")[0]] = self._points.pop(0)
