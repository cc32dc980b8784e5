"""Rows of variable length to train on: the definitions of the Jargon File, as Debian packages them.

The package ``dict-jargon`` (public domain) is downloaded with ``apt-get`` and unpacked, not installed.
"""

from __future__ import annotations

import functools
import gzip
import re
import string
import subprocess
from pathlib import Path
from typing import Any

_INSTALLED = Path("/usr/share/dictd")
_DIGITS = {digit: value for value, digit in enumerate(f"{string.ascii_uppercase}{string.ascii_lowercase}0123456789+/")}


def jargon_rows(folder: Path) -> list[dict[str, Any]]:
    """Chat rows, one per definition and in the order of the dictionary; ``folder`` keeps what was downloaded."""
    return [_row(word, text) for word, text in _definitions(_dictionary(folder))]


def _dictionary(folder: Path) -> Path:
    """The folder that holds ``jargon.index`` and ``jargon.dict.dz``."""
    if (_INSTALLED / "jargon.index").is_file():
        return _INSTALLED
    unpacked = folder / "usr/share/dictd"
    if not (unpacked / "jargon.index").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "dict-jargon"], cwd=folder, check=True)
        subprocess.run(["dpkg-deb", "-x", str(next(folder.glob("dict-jargon_*.deb"))), str(folder)], check=True)
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
    return functools.reduce(lambda value, digit: value * 64 + _DIGITS[digit], digits, 0)


def _row(word: str, text: str) -> dict[str, Any]:
    first, _, rest = text.partition("\n")
    answer = re.sub(r"\s+", " ", rest if rest.strip() else first).strip()
    turns = [{"role": "user", "content": f"What does {word!r} mean?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns}
