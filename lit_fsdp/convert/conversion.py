"""A recipe in the making, with a line for every key of the input, and the values of those keys."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.errors import ConfigError, require

STRATEGY = "trainer.strategy.init_args"
_SECTIONS = ("seed_everything", "trainer", "model", "data", "checkpoint")
_BOOL = dict.fromkeys("true t yes y on 1".split(), True) | dict.fromkeys("false f no n off 0".split(), False)

Reader = Callable[[str, Any], Any] | Mapping[str, Any]
"""The recipe's value of a key and its value, or a table of words; a result of null leaves the recipe's default."""


def as_is(key: str, value: Any) -> Any:
    """Return the value, or the number or truth that its text stands for; the check of the recipe judges it."""
    try:
        return number(key, value) if isinstance(value, str) else value
    except ConfigError:
        return _BOOL.get(value.strip().lower(), value)


def number(key: str, value: Any) -> float:
    """Parse a number, also written as text (``5e-5``, which YAML takes for text); an integer where it is one."""
    try:
        found = float(value)
        return int(found) if found.is_integer() else found
    except (TypeError, ValueError):
        raise ConfigError(key, repr(value), "a number", f"write {key}: 1") from None


def names(key: str, value: Any) -> list[str]:
    """Split names, given as a list or as one text with commas or spaces."""
    parts = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(name for part in parts for name in re.split(r"[,\s]+", str(part)) if name))


def choose(key: str, value: Any, words: Mapping[str, Any]) -> Any:
    """Look a word up in any case; words in capitals also by their number, counted from 1."""
    lowered = {word.lower(): result for word, result in words.items()}
    word = "no" if value is False and "no" in lowered else str(value).strip().lower()  # YAML reads NO as false
    if word.isdigit() and 1 <= int(word) <= len(words) and next(iter(words)).isupper():
        return list(words.values())[int(word) - 1]
    require(word in lowered, key, repr(value), " | ".join(words), f"write {key}: {next(iter(words))}")
    return lowered[word]


def shown(value: Any) -> str:
    """Format a value as YAML on one line."""
    line = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return line.removesuffix("\n...").strip()


def read_mapping(key: str, given: str, folder: Path = Path()) -> dict[str, Any]:
    """Read JSON text, a YAML or JSON file (from here, or else from ``folder``), or standard input (``-``)."""
    path = Path(given).expanduser()
    try:
        if given.startswith("{") or given == "-":
            text = given if given != "-" else sys.stdin.read()
        else:
            text = (path if path.exists() else folder / path).read_text(encoding="utf-8-sig")
        # JSON may hold tabs, which YAML refuses
        found = json.loads(text) if text.startswith("{") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(key, f"{given} ({why})", "YAML or JSON that can be read", "check the path") from None
    require(isinstance(found, dict) and found, key, f"{given} without keys", "a mapping of keys", "name a config file")
    return dict(found)


@dataclass(frozen=True)
class Given:
    """One value of the input; the library's default where ``key`` is empty."""

    key: str
    value: Any

    def read(self, reader: Reader) -> Any:
        """The value as the recipe has it."""
        return choose(self.key, self.value, reader) if isinstance(reader, Mapping) else reader(self.key, self.value)

    @property
    def on(self) -> bool:
        """The value as a switch."""
        return bool(self.read(_BOOL))


@dataclass(frozen=True)
class Fate:
    """What became of one key of the input."""

    key: str
    text: str
    """kept as …, replaced by …, or dropped because …"""
    differs: bool = False
    """Whether training differs from the original because of it."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" + (" [trains differently]" if self.differs else "")


@dataclass
class Conversion:
    """A recipe in the making, and a line for every key of the input."""

    recipe: dict[str, Any] = field(default_factory=dict)
    fates: list[Fate] = field(default_factory=list)
    to_give: list[str] = field(default_factory=list)
    """What the input does not know and the user has to add; becomes comments of the recipe."""
    by: dict[str, str] = field(default_factory=dict)
    """The key that decided a path of the recipe; none where a default did."""

    @property
    def differs(self) -> bool:
        """Whether the recipe trains otherwise than the original."""
        return any(fate.differs for fate in self.fates)

    def get(self, path: str) -> Any:
        """Return a value of the recipe so far; a bare word is a field of the strategy."""
        section: Any = self.recipe
        for part in _full(path).split("."):
            section = section.get(part) if isinstance(section, dict) else None
        return section

    def put(self, path: str, value: Any, key: str = "") -> Any:
        """Set a value where none is, with ``key`` also over a default but not over another key; returns what holds."""
        path = _full(path)
        *parents, last = path.split(".")
        section = self.recipe
        for part in parents:
            section = section.setdefault(part, {})
        if by := key and self.by.get(path):
            given = f"{shown(value)}, beside {by} {shown(section[last])}"
            require(section[last] == value, key, given, f"one value for {path}", f"drop {key}, or {by}")
        if key or last not in section:
            section[last] = value
        if key:
            self.by[path] = key
        return section[last]

    def keep(self, given: Given, path: str, value: Any, note: str = "", differs: bool = False) -> None:
        """Put a value and say so of its key."""
        words = f"kept as {path}: {shown(self.put(path, value, given.key))}"
        self.say(given, f"{words} ({note})" if note else words, differs)

    def drop(self, given: Given, why: str, differs: bool = False) -> None:
        """Say that a key has no counterpart, and why."""
        self.say(given, f"dropped because {why}", differs)

    def say(self, given: Given, words: str, differs: bool = False) -> None:
        """Add a line to the report, unless it would be about a default."""
        if given.key:
            self.fates.append(Fate(given.key, words, differs))

    def as_yaml(self, source: str) -> str:
        """Write the recipe as YAML with a head that says where it is from and what is missing."""
        head = "\n".join(f"# {line}" for line in (f"Converted from {source}.", *self.to_give))
        ordered = {name: self.recipe[name] for name in _SECTIONS if name in self.recipe}
        return f"{head}\n\n{yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=110)}"


def _full(path: str) -> str:
    return path if path.split(".")[0] in _SECTIONS else f"{STRATEGY}.{path}"
