"""A recipe being converted, with a report line for every key of the input, and the values of those keys."""

import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.config.run import STRATEGY
from lit_fsdp.config.yaml_files import load_yaml
from lit_fsdp.errors import ConfigError, require

_SECTIONS = ("seed_everything", "trainer", "model", "data", "checkpoint")
_BOOL = dict.fromkeys("true t yes y on 1".split(), True) | dict.fromkeys("false f no n off 0".split(), False)

Reader = Callable[[str, Any], Any] | Mapping[str, Any]
"""Function from key and value to the recipe's value, or a table of words; None keeps the recipe's default."""


def as_is(key: str, value: Any) -> Any:
    """Return the value, or the number or boolean of its text; the recipe check validates it later."""
    try:
        return number(key, value) if isinstance(value, str) else value
    except ConfigError:
        return _BOOL.get(value.strip().lower(), value)


def number(key: str, value: Any) -> float:
    """Parse a number, also from text (YAML reads ``5e-5`` as text); integral values become int."""
    try:
        found = float(value)
        return int(found) if found.is_integer() else found
    except (TypeError, ValueError):
        raise ConfigError(key, repr(value), "a number", f"write {key}: 1") from None


def names(key: str, value: Any) -> list[str]:
    """Split names, given as a list or as a string with commas or spaces."""
    parts = value if isinstance(value, list) else [value]
    return list(dict.fromkeys(name for part in parts for name in re.split(r"[,\s]+", str(part)) if name))


def choose(key: str, value: Any, words: Mapping[str, Any]) -> Any:
    """Look up a word, ignoring case; words in capitals also by their number, counted from 1."""
    lowered = {word.lower(): result for word, result in words.items()}
    word = "no" if value is False and "no" in lowered else str(value).strip().lower()  # YAML reads NO as false
    if word.isdigit() and 1 <= int(word) <= len(words) and next(iter(words)).isupper():
        return list(words.values())[int(word) - 1]
    near = difflib.get_close_matches(word, lowered, n=1)
    best = next((one for one in words if [one.lower()] == near), next(iter(words)))
    require(word in lowered, key, repr(value), " | ".join(words), f"write {key}: {best}")
    return lowered[word]


def shown(value: Any) -> str:
    """Format a value as YAML on one line."""
    line = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return line.removesuffix("\n...").strip()


def read_mapping(key: str, given: str, folder: Path = Path()) -> dict[str, Any]:
    """Read JSON text, a YAML or JSON file (relative to here, or else to ``folder``), or standard input (``-``)."""
    path = Path(given).expanduser()
    try:
        if given.startswith("{") or given == "-":
            text = given if given != "-" else sys.stdin.read()
        else:
            text = (path if path.exists() else folder / path).read_text(encoding="utf-8-sig")
        # JSON may contain tabs, which YAML rejects
        found = json.loads(text) if text.startswith("{") else load_yaml(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(key, f"{given} ({why})", "a readable YAML or JSON file", "check the path") from None
    require(isinstance(found, dict) and found, key, f"{given} without keys", "a mapping of keys", "use a config file")
    return dict(found)


@dataclass(frozen=True)
class Given:
    """One value of the input, or the library's default if ``key`` is empty."""

    key: str
    value: Any

    def read(self, reader: Reader) -> Any:
        """Convert the value to that of the recipe."""
        return choose(self.key, self.value, reader) if isinstance(reader, Mapping) else reader(self.key, self.value)

    @property
    def on(self) -> bool:
        """The value as a boolean."""
        return bool(self.read(_BOOL))


@dataclass(frozen=True)
class Fate:
    """Result of the conversion for one key of the input."""

    key: str
    text: str
    """kept as …, replaced by …, or dropped because …"""
    differs: bool = False
    """Whether it makes training differ from the original."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" + (" [trains differently]" if self.differs else "")


@dataclass
class Conversion:
    """A recipe being converted, and a report line for every key of the input."""

    recipe: dict[str, Any] = field(default_factory=dict)
    fates: list[Fate] = field(default_factory=list)
    to_give: list[str] = field(default_factory=list)
    """Missing information that the user has to add; written as comments of the recipe."""
    by: dict[str, str] = field(default_factory=dict)
    """The input key that set a path of the recipe; paths set by defaults are missing."""

    @property
    def differs(self) -> bool:
        """Whether the recipe trains differently from the original."""
        return any(fate.differs for fate in self.fates)

    def get(self, path: str) -> Any:
        """Return a value of the current recipe; a bare word is a field of the strategy."""
        section: Any = self.recipe
        for part in _full(path).split("."):
            section = section.get(part) if isinstance(section, dict) else None
        return section

    def put(self, path: str, value: Any, key: str = "") -> Any:
        """Set a missing value (with ``key``: also replace a default, but no other key); returns the resulting value."""
        path = _full(path)
        *parents, last = path.split(".")
        section = self.recipe
        for part in parents:
            section = section.setdefault(part, {})
        if by := key and self.by.get(path):
            given = f"{shown(value)}, but {by} is {shown(section[last])}"
            fix = f"drop {key}, or {by}"
            for default, other in ((by, value), (key, section[last])):  # a default cannot be dropped
                fix = f"write {default.partition(' ')[0]}: {shown(other)}" if "by default" in default else fix
            require(section[last] == value, key, given, f"one value for {path}", fix)
        if key or last not in section:
            section[last] = value
        if key:
            self.by[path] = key
        return section[last]

    def keep(self, given: Given, path: str, value: Any, note: str = "", differs: bool = False) -> None:
        """Set a value, and report it for its key."""
        words = f"kept as {path}: {shown(self.put(path, value, given.key))}"
        self.say(given, f"{words} ({note})" if note else words, differs)

    def drop(self, given: Given, why: str, differs: bool = False) -> None:
        """Report that a key has no counterpart, and why."""
        self.say(given, f"dropped because {why}", differs)

    def say(self, given: Given, words: str, differs: bool = False) -> None:
        """Add a line to the report, except for defaults."""
        if given.key:
            self.fates.append(Fate(given.key, words, differs))

    def replace(self, given: Given, old: str, words: str) -> None:
        """Report for a key, instead of its lines with ``old``."""
        self.fates = [fate for fate in self.fates if fate.key != given.key or old not in fate.text]
        self.say(given, words)

    def outrank(self, path: str, by: str) -> None:
        """Remove a value; the key that set it is reported as dropped because of the key ``by``."""
        *parents, last = _full(path).split(".")
        (self.get(".".join(parents)) or {}).pop(last, None)
        if key := self.by.pop(_full(path), ""):
            self.replace(Given(key, None), f"kept as {path}: ", f"dropped because {by} applies")

    def as_yaml(self, source: str) -> str:
        """Return the recipe as YAML, with comments about its source, missing settings and accepted differences."""
        differences = (f"Trains differently: {fate.key}: {fate.text}" for fate in self.fates if fate.differs)
        lines = (f"Converted from {source}.", *self.to_give, *differences)
        shown = ("".join(c if c.isprintable() else " " for c in line) for line in lines)
        head = "\n".join(f"# {' '.join(line.split())}" for line in shown)
        ordered = {name: self.recipe[name] for name in _SECTIONS if name in self.recipe}
        return f"{head}\n\n{yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=110)}"


def _full(path: str) -> str:
    return path if path.split(".")[0] in _SECTIONS else f"{STRATEGY}.{path}"
