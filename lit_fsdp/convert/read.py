"""Files and single values of the input, refused with their path where they are not what they should be."""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

_TRUE, _FALSE = ("true", "t", "1", "yes", "y", "on"), ("false", "f", "0", "no", "n", "off")


def read_mapping(path: Path, field: str = "file") -> dict[str, Any]:
    """A YAML or JSON file as a mapping; ``-`` is standard input, and a pipe is read as a file is.

    Raises:
        ConfigError: It is missing, empty, unreadable, no YAML, or holds something else.
    """
    if str(path) != "-" and (path.is_dir() or not path.exists()):
        near = difflib.get_close_matches(path.name, _names(path.parent), n=3, cutoff=0.4)
        raise ConfigError(field, str(path), "an existing YAML or JSON file", f"try {', '.join(near) or 'another path'}")
    name = "standard input" if str(path) == "-" else str(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        content = _parsed(text.removeprefix("\ufeff"), path.suffix == ".json")
    except (ValueError, yaml.YAMLError, OSError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise ConfigError(field, f"{name}, which cannot be read ({where})", "YAML or JSON", "mend that place") from None
    if not isinstance(content, dict):
        kind = "nothing" if content is None else type(content).__name__
        raise ConfigError(field, f"{name} with {kind} in it", "a mapping of keys to values", "name the config file")
    if not content:
        raise ConfigError(field, f"{name} with no key in it", "a mapping of keys to values", "name the config file")
    return content


def _parsed(text: str, is_json: bool) -> Any:
    """JSON where it is JSON (it may hold tabs, and numbers as 1e-5, which YAML takes for text), else YAML."""
    try:
        return json.loads(text)
    except ValueError:
        if is_json:
            raise
    return yaml.safe_load(text)


def as_mapping(path: str, value: Any, folder: Path) -> dict[str, Any]:
    """A mapping given as such, as JSON text, or as the path of a JSON or YAML file.

    Words of JSON text that are numbers, true or false become those, as in Transformers.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            content = json.loads(value)
        except ValueError as error:
            raise ConfigError(path, f"{value!r} ({error})", "JSON", f"mend it, or write {path} as a mapping") from None
        return {key: _typed(inner) for key, inner in content.items()}
    if isinstance(value, str):
        return read_mapping(beside(value, folder), path)
    if not isinstance(value, dict):
        allowed = "a mapping, JSON text, or the path of a JSON file"
        raise ConfigError(path, repr(value), allowed, f"write {path}: file.json")
    return value


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _typed(inner) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if value.isdecimal():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdecimal() else value


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
    upper = {allowed.upper(): allowed for allowed in words}
    near = [upper[match] for match in difflib.get_close_matches(word, upper, n=1, cutoff=0.4)] or [words[0]]
    numbers = f", or 1 to {len(words)}" if numbered else ""
    raise ConfigError(key, repr(value), " | ".join(words) + numbers, f"write {key}: {near[0]}")


def as_names(key: str, value: Any) -> list[str]:
    """A list of names, also written as one text with commas or spaces."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        allowed = "a name, a list of names, or names with commas or spaces"
        raise ConfigError(key, repr(value), allowed, f"write {key}: [Name]")
    return list(dict.fromkeys(name for part in parts for name in re.split(r"[,\s]+", part) if name))


def drop_listed(conversion: Conversion, section: Section, reasons: dict[str, str]) -> None:
    """Drop the keys of ``reasons`` that are there; none of them changes what is trained."""
    for key, why in reasons.items():
        if taken := section.take(key):
            conversion.drop(taken[0], why)


def drop_unknown(conversion: Conversion, section: Section, known: tuple[str, ...], whose: str) -> None:
    """Everything that is left is unknown: it is said with the nearest known key, and counts as a difference."""
    for key, path, value in section.drain():
        if (value is None or value == {}) and key in known:
            continue  # said with everything else that is empty
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f"; the nearest is {near[0]}" if near else ""
        conversion.drop(path, f"{whose} has no such key{hint}", differs=True)
