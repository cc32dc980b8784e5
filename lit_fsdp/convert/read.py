"""Files and single values of the input, refused with their path where they are not what they should be."""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

_TRUE, _FALSE = ("true", "t", "1", "yes", "y", "on"), ("false", "f", "0", "no", "n", "off")


def read_mapping(path: Path, field: str = "file") -> dict[str, Any]:
    """A YAML or JSON file as a mapping.

    Raises:
        ConfigError: It is missing, empty, unreadable, no YAML, or holds something else.
    """
    if not path.is_file():
        near = difflib.get_close_matches(path.name, _names(path.parent), n=3, cutoff=0.4)
        raise ConfigError(field, str(path), "an existing YAML or JSON file", f"try {', '.join(near) or 'another path'}")
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, OSError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(field, f"{path}, which cannot be read ({where})", "YAML or JSON", "mend that place") from None
    if not isinstance(content, dict):
        kind = "nothing" if content is None else type(content).__name__
        raise ConfigError(field, f"{path} with {kind} in it", "a mapping of keys to values", "name the config file")
    if not content:
        raise ConfigError(field, f"{path} with no key in it", "a mapping of keys to values", "name the config file")
    return content


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []


def beside(name: str, folder: Path) -> Path:
    """A file named in a configuration: from here if it is there, else from the configuration's folder."""
    path = Path(name).expanduser()
    return path if path.is_file() else folder / path


def as_bool(key: str, value: Any) -> bool:
    """True or false, also written as a word or as 0 and 1."""
    word = str(value).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ConfigError(key, repr(value), "true | false", f"write {key}: true")


def as_number(key: str, value: Any, least: float = 0) -> float:
    """A finite number of at least ``least``, also written as text (``5e-5``)."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < least:
        raise ConfigError(key, repr(value), f"a number >= {least:g}", f"write {key}: {max(least, 1):g}")
    return number


def as_count(key: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``."""
    number = as_number(key, value, least)
    if number != int(number):
        raise ConfigError(key, repr(value), f"a whole number >= {least}", f"write {key}: {int(number)}")
    return int(number)


def as_choice(key: str, value: Any, words: tuple[str, ...], numbered: bool = False) -> str:
    """One of ``words``, in any case; with ``numbered`` also its place, counted from 1."""
    word = str(value).strip().upper()
    if numbered and not isinstance(value, bool) and word.isdigit() and 1 <= int(word) <= len(words):
        return words[int(word) - 1]
    for allowed in words:
        if allowed.upper() == word:
            return allowed
    near = difflib.get_close_matches(word, [w.upper() for w in words], n=1, cutoff=0.4) or [words[0]]
    numbers = f", or 1 to {len(words)}" if numbered else ""
    raise ConfigError(key, repr(value), " | ".join(words) + numbers, f"write {key}: {near[0]}")


def as_names(key: str, value: Any) -> list[str]:
    """A list of names, also written as one text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(key, repr(value), "a name, a list of names, or names with commas", f"write {key}: [Name]")
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def drop_listed(conversion: Conversion, section: Section, reasons: dict[str, str]) -> None:
    """Drop the keys of ``reasons`` that are there; none of them changes what is trained."""
    for key, why in reasons.items():
        if taken := section.take(key):
            conversion.drop(taken[0], why)


def drop_unknown(conversion: Conversion, section: Section, known: tuple[str, ...], whose: str) -> None:
    """Everything that is left is unknown: it is said with the nearest known key, and counts as a difference."""
    for key, path, value in section.drain():
        if value is None and key in known:
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f"; the nearest is {near[0]}" if near else ""
        conversion.drop(path, f"{whose} has no such key{hint}", differs=True)
