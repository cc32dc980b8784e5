"""Rows of variable length to train on: the definitions of the Jargon File, as Debian packages them.

The package ``dict-jargon`` (public domain) is downloaded with ``apt-get`` and unpacked, not installed. Where that
cannot be done, rows of random words take its place, as long as definitions are, and results are named after them.
"""

from __future__ import annotations

import gzip
import random
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

_INSTALLED = Path("/usr/share/dictd")
_DIGITS = {digit: value for value, digit in enumerate(f"{string.ascii_uppercase}{string.ascii_lowercase}0123456789+/")}
_WORDS = "red green blue white black yellow box ball cup book lamp hat one two three four five six".split()
_MEDIAN_WORDS, _SPREAD = 60, 0.9  # of a log-normal, as the definitions have

Rows = list[dict[str, Any]]


def jargon_rows(folder: Path) -> tuple[Rows, str]:
    """Chat rows, one per definition and in the order of the dictionary, and the name of where they come from.

    Args:
        folder: Keeps what was downloaded.
    """
    source = _dictionary(folder)
    if source is None:
        print("dict-jargon cannot be had here (no apt-get, or no network): random words instead", file=sys.stderr)
        return _random_rows(), "random words"
    return [_row(word, text) for word, text in _definitions(source)], "dict-jargon"


def _dictionary(folder: Path) -> Path | None:
    """The folder that holds ``jargon.index`` and ``jargon.dict.dz``."""
    if (_INSTALLED / "jargon.index").is_file():
        return _INSTALLED
    unpacked = folder / "usr/share/dictd"
    tools = all(shutil.which(tool) for tool in ("apt-get", "dpkg-deb"))
    if (unpacked / "jargon.index").is_file() or not tools:
        return unpacked if unpacked.is_dir() else None
    folder.mkdir(parents=True, exist_ok=True)
    got = subprocess.run(["apt-get", "download", "dict-jargon"], cwd=folder, capture_output=True, check=False)
    packages = sorted(folder.glob("dict-jargon_*.deb"))
    if got.returncode or not packages:
        return None
    subprocess.run(["dpkg-deb", "-x", str(packages[-1]), str(folder)], check=True)
    return unpacked


def _definitions(source: Path) -> list[tuple[str, str]]:
    with gzip.open(source / "jargon.dict.dz") as file:
        content = file.read()
    found = {}
    for line in (source / "jargon.index").read_text(encoding="utf-8").splitlines():
        word, start, size = line.split("\t")
        if not word.startswith("00-database"):
            text = content[_number(start) : _number(start) + _number(size)].decode("utf-8", errors="replace")
            found[_number(start)] = (word, text)  # several words may share a definition
    return [found[start] for start in sorted(found)]


def _number(digits: str) -> int:
    """The index counts in base 64."""
    value = 0
    for digit in digits:
        value = value * 64 + _DIGITS[digit]
    return value


def _row(word: str, text: str) -> dict[str, Any]:
    first, _, rest = text.partition("\n")
    answer = re.sub(r"\s+", " ", rest if rest.strip() else first).strip()
    turns = [{"role": "user", "content": f"What does {word!r} mean?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def _random_rows(count: int = 2000) -> Rows:
    source = random.Random(0)
    rows = []
    for index in range(count):
        length = max(3, round(source.lognormvariate(0, _SPREAD) * _MEDIAN_WORDS))
        rows.append(_row(f"word {index}", "\n" + " ".join(source.choice(_WORDS) for _ in range(length))))
    return rows
