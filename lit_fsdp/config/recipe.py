"""A recipe from files and flags: YAML merged in order, later wins, flags last.

Only the standard library and PyYAML: the command line reads recipes before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.config.places import expanded, shipped_name
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.config.typed import is_text, unknown_key
from lit_fsdp.errors import ConfigError
from lit_fsdp.redaction import HIDDEN, hidden_keys, remember, remember_lines

OWN_SECTIONS = ("model", "data", "checkpoint", "resume", "slurm", "seed_everything", "ckpt_path")
_CLASSES = ("callbacks", "callbacks+", "logger", "logger+", "plugins", "plugins+", "profiler")
# The last three: a date that does not exist, an unhashable key, and brackets or aliases without end.
_NO_YAML = (yaml.YAMLError, ValueError, TypeError, RecursionError)
_PATHS: dict[str, tuple[str, ...]] = {
    "trainer": (),
    "model": ("name", "tokenizer"),
    "data": ("train", "val", "test", "predict", "chat_template", "cache_dir"),
    "slurm": ("container", "container_mounts", "env_file"),
}
"""By section, the keys whose text names files; under ``trainer`` any may."""
_SWITCHES = ("-h", "--help", "--print_config")


@dataclass
class Recipe:
    """What the command line says, before anything is checked."""

    values: dict[str, Any]
    """All files and the flags of our own sections, merged."""
    files: list[Path]
    flags: list[str] = field(default_factory=list)
    """Flags that Lightning's parser reads itself (``--trainer.…`` and switches), as they were given."""
    replaced: list[str] = field(default_factory=list)
    """One line per value that a later file replaced by another."""

    @property
    def only_shows(self) -> bool:
        """Whether this call prints help or the configuration and runs nothing."""
        return any(flag.split("=")[0] in _SWITCHES for flag in self.flags)


def read_recipe(argv: Sequence[str], also: Sequence[str] = ()) -> Recipe:
    """Files (``--config``, merged in their order) and flags (last, wherever they stand), with ``~`` and ``${VAR}`` of
    paths expanded.

    Args:
        argv: Words of the command line.
        also: Flags that the verb has taken out already, for the error about one that does not exist.

    Raises:
        ConfigError: A file that is missing or no YAML mapping, a flag without value, a word that is no flag, a
            variable that is not set, or a secret that was hidden when the recipe was written.
    """
    values: dict[str, Any] = {}
    recipe = Recipe(values, [])
    flags: list[tuple[str, str]] = []
    for name, value in _tokens(argv):
        remember(value, name)
        if name in ("--config", "-c"):
            path = Path(expanded(value or "", name))
            content = read_yaml(path)
            remember(content)
            before = _leaves(values)
            merge(values, content)
            after = _leaves(content)
            recipe.replaced += [
                f"{key}: {before[key]!r} → {new!r} ({path})"
                for key, new in after.items()
                if key in before and before[key] != new
            ]
            recipe.files.append(path)
        elif name in _SWITCHES:
            recipe.flags.append(name if value is None else f"{name}={value}")
        else:
            section = name.removeprefix("--").split(".")[0]
            if section not in ("trainer", *OWN_SECTIONS):
                known = ("config", "print_config", "trainer", *OWN_SECTIONS, *also)
                raise unknown_key(section, value, section, known)
            if value is None:
                raise ConfigError(name.lstrip("-"), "a flag without a value", "--key value", f"write {name} VALUE")
            flags.append((name, value))
    for name, value in flags:
        key = name.removeprefix("--")
        if _is_plain(key) and key.endswith("+"):
            key = key.removesuffix("+")
            merge(values, _nested(key, _appended(values, key, _scalar(value, key))))
        elif _is_plain(key):
            merge(values, _nested(key, _scalar(value, key)))
        else:
            recipe.flags.append(f"{name}={_expanded_flag(value, key)}")
    _expand_paths(values)
    if not recipe.only_shows:
        _refuse_hidden(values, recipe.flags)
    return recipe


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file as a mapping with text keys.

    Raises:
        ConfigError: The file is missing (near names are given), is no YAML, or holds no mapping.
    """
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = difflib.get_close_matches(path.name, [p.name for p in folder.glob("*.y*ml")], n=3, cutoff=0.3)
        there = ", ".join(str(folder / name) for name in near) or f"no such YAML file in {folder.resolve().name}/"
        ships = shipped_name(path)
        fix = f"lit-fsdp recipes cp {ships} {path}" if ships else "check the path"
        raise ConfigError("--config", str(path), f"an existing YAML file: {there}", fix)
    try:
        content = _loaded(path.read_text(encoding="utf-8"))
    except _NO_YAML as error:
        remember_lines(path.read_text(encoding="utf-8", errors="replace"))  # the error quotes the file
        where = " ".join(str(error).split())
        raise ConfigError("--config", f"{path}, which is no YAML ({where})", "YAML", "mend that line") from None
    if not isinstance(content, dict):
        raise ConfigError("--config", f"{path} with {type(content).__name__}", "a mapping of sections", "see recipes/")
    return content


def merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Merge ``new`` into ``into`` in place: mappings key by key, everything else is replaced.

    A word (``precision: mixed``) and a mapping (``{mode: mixed}``) replace each other; another ``class_path`` drops
    the arguments of the one before.
    """
    for key, value in new.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            if "class_path" in value and value["class_path"] != old.get("class_path", value["class_path"]):
                old.pop("init_args", None)
            merge(old, value)
        else:
            into[key] = _copied(value)


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line per value, with its full key, that differs between two recipes; a key that is not there is null."""
    old, new = _leaves(before), _leaves(after)
    return [f"{key}: {old.get(key)!r} → {new.get(key)!r}" for key in {**old, **new} if old.get(key) != new.get(key)]


def _refuse_hidden(values: Mapping[str, Any], flags: Sequence[str]) -> None:
    given = {flag.removeprefix("--").partition("=")[0] for flag in flags}
    for key in hidden_keys(values):
        if key not in given:
            raise ConfigError(
                key,
                f"{HIDDEN}, which stands for a secret that was not written down",
                "the value itself",
                f"give it again: --{key} VALUE, or one more --config file that holds it",
            )


def _expand_paths(values: dict[str, Any]) -> None:
    for section, keys in _PATHS.items():
        there = values.get(section)
        if isinstance(there, dict):
            there.update({key: _expanded(there[key], f"{section}.{key}") for key in keys or there if key in there})
    if "ckpt_path" in values:
        values["ckpt_path"] = _expanded(values["ckpt_path"], "ckpt_path")


def _expanded(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _expanded(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item, f"{key}[{i}]") for i, item in enumerate(value)]
    return expanded(value, key) if isinstance(value, str) else value


def _expanded_flag(text: str, key: str) -> str:
    try:
        before = _loaded(text)
    except _NO_YAML:
        return text  # Lightning's parser says what is wrong
    after = _expanded(before, key)
    return text if after == before else after if isinstance(after, str) else json.dumps(after)


def _is_plain(key: str) -> bool:
    """Whether a flag is a value at a path, rather than a piece of a class that Lightning's parser puts together."""
    section, _, rest = key.partition(".")
    return section != "trainer" or rest.split(".")[0] == "strategy" or ("." not in rest and rest not in _CLASSES)


def _tokens(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            raise ConfigError("command line", word, "--key value", f"write --{word} VALUE, or --config {word}")
        name, equals, value = word.partition("=")
        if equals:
            yield name, value
        elif name in _SWITCHES or not words or (words[0].startswith("--") and not _is_number(words[0])):
            yield name, None
        else:
            yield name, words.pop(0)


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()


def _scalar(text: str, key: str) -> Any:
    section, _, rest = key.partition(".")
    is_plain = section == "slurm" and is_text(SlurmConfig, rest)  # an account may be 007, an address {node}-ib0
    try:
        value = _loaded(text)
    except _NO_YAML:
        if is_plain:
            return text
        raise ConfigError(key, text, "a YAML value", "quote it") from None
    return text if is_plain and not isinstance(value, (str, type(None))) else value


def _loaded(text: str) -> Any:
    """YAML as data of its own; copied because an alias inside itself would go round for ever later on."""
    return _copied(yaml.safe_load(text))


def _appended(there: Any, key: str, item: Any) -> list[Any]:
    """The list that stands at ``key``, or the value that does, and one item or several more."""
    for part in key.split("."):
        there = there.get(part) if isinstance(there, dict) else None
    before, more = (given if isinstance(given, list) else [given] for given in (there, item))
    return more if there is None else before + more


def _nested(key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {head: _nested(rest, value) if rest else value}


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _leaves(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        found.update(_leaves(value, where) if isinstance(value, Mapping) else {where: value})
    return found
