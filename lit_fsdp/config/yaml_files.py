"""Recipe files: YAML in which 12:00:00 is text and 1e-4 is a number, and the loader that jsonargparse uses."""

import difflib
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from lit_fsdp.config.locations import shipped_file
from lit_fsdp.config.run import FACTORY
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.redaction import remember


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which 12:00:00 and 2024-01-01 are text, 1e-4 is a number, and a key occurs once per mapping."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse duplicate keys, of which PyYAML keeps the last; keys that are merged (<<) can be overridden."""
        start, end, seen = node.start_mark.index, node.end_mark.index, set[str]()
        for key, _ in node.value:
            name = key.value.removesuffix("+") if isinstance(key, yaml.ScalarNode) else ""  # + extends a list
            is_own = bool(name) and start <= key.start_mark.index < end
            if is_own and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name} occurs twice", key.start_mark)
            if is_own:
                seen.add(name)
        super().flatten_mapping(node)
        # PyYAML 6.0.4 (pyyaml#937) merges an overridden key of one letter, such as r, with its old value if both are
        # left in the node: delete these two lines when the minimum version has this fixed
        last = {key.value if isinstance(key, yaml.ScalarNode) else id(key): (key, value) for key, value in node.value}
        node.value = list(last.values())


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, one) for tag, one in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_SECTIONS = {
    *("trainer", "trainer.strategy", "trainer.strategy.init_args", "checkpoint", "resume", "samples", "slurm"),
    *("model", "model.init_args", "model.optim", "model.loss", "model.lora", "model.preference"),
    *("data", "data.init_args", "data.columns", "data.turns"),
}
"""Mappings of a recipe whose keys may be dotted."""
_MAY_BE_NULL = ("model.lora", "data.columns", "data.turns")
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"[-+]?((\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+|\d[\d_]*\.\d*|\.\d+|\.(inf|Inf|INF))$|\.nan$")
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_yaml(text: str) -> Any:
    """Parse YAML text."""
    if "\t" in text and _is_json(text):  # PyYAML does not accept tabs as indentation
        text = text.replace("\t", " ")
    values = yaml.load(text, _RecipeLoader)  # noqa: S506 (a SafeLoader)
    values = _nested(values) if isinstance(values, dict) else values
    trainer: Any = values.get("trainer") if isinstance(values, dict) else None
    if isinstance(trainer, dict) and trainer.get("strategy") == FACTORY:
        trainer["strategy"] = {"class_path": FACTORY}
    return values


def _is_json(text: str) -> bool:
    try:
        return json.loads(text) is not None
    except ValueError:
        return False


def _nested(values: dict[Any, Any], path: str = "") -> dict[Any, Any]:
    """Move dotted keys (``model.optim.lr: 1e-4``) into their sections; a section without keys is left out.

    jsonargparse 4.53 accepts such keys, but loses those that come before their section in the file
    (``findings/a-dotted-key-before-its-section-is-lost.sh``).
    """
    found: dict[Any, Any] = {}
    for key, value in values.items():
        name, dot, rest = str(key).partition(".")
        full = f"{path}{name}"
        if full not in _SECTIONS and not (path and dot):
            found[key] = merged(found[key], value, full) if key in found else value
            continue
        given = value
        for part in reversed([rest] if path else rest.split(".")) if dot else ():  # a top-level key is a whole path
            given = {part: given}
        given = _nested(given, f"{full}.") if isinstance(given, dict) else given
        if given is not None or full in _MAY_BE_NULL:
            found[name] = merged(found[name], given, full) if name in found else given
    return found


def merged(one: Any, other: Any, path: str) -> Any:
    """Merge two parts of a section; a key may occur in one of them only."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        raise ConfigError(path, "two values", "one value", "remove one of them")
    both = {key: merged(one[key], other[key], f"{path}.{key}") for key in one.keys() & other.keys()}
    return one | other | both


def use_loader(own_model: bool = True, change: Callable[[Any], Any] = lambda values: values) -> None:
    """Make jsonargparse parse YAML with :func:`load_yaml` and apply ``change`` to the result.

    With ``own_model``, ``class_path`` and ``init_args`` of ``model.optim`` name the optimizer.
    """

    def load(text: str) -> Any:
        values = change(load_yaml(text))
        model = values.get("model") if own_model and isinstance(values, dict) else None
        return {**values, "model": own_optim(model)} if isinstance(model, dict) else values

    jsonargparse.set_loader("yaml", load, exceptions=(yaml.YAMLError, ValueError))


def own_optim(model: dict[str, Any]) -> dict[str, Any]:
    """Rename ``class_path`` and ``init_args`` of a section's ``optim`` to ``optimizer`` and ``optimizer_args``."""
    optim, words = model.get("optim"), {"class_path": "optimizer", "init_args": "optimizer_args"}
    if not isinstance(optim, dict):
        return model
    for name, ours in words.items():
        require(
            name not in optim or ours not in optim, f"model.optim.{name}", f"with {ours}", "one of them", "remove one"
        )
    return model | {"optim": {words.get(k, k): v for k, v in optim.items()}}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a recipe file as a mapping and remember its secrets, so that no message shows them.

    Raises:
        ConfigError: The file is missing (the error lists similar names), is not YAML, or is not a mapping.
    """
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = difflib.get_close_matches(path.name, [p.name for p in folder.glob("*.y*ml")], n=3, cutoff=0.3)
        there = "".join(f", such as {folder / name}" for name in near[:1])
        _, ships = shipped_file(str(path), ".yaml")
        allowed = f"an existing YAML file{there}; or a name that lit-fsdp recipes ls prints"
        close = difflib.get_close_matches(path.name, near, n=1, cutoff=0.8)
        fix = f"write --config {folder / close[0]}" if close else "check the path"
        fix = f"write --config {min(ships, key=len)}" if ships else fix
        if (model := shipped_file(str(path), ".json")[0]) is not None:
            fix = f"write --model.name {model}"
        fix = f"write --config {path / 'recipe.yaml'}" if (path / "recipe.yaml").is_file() else fix
        raise ConfigError("--config", path, f"{allowed}: {', '.join(ships)}" if ships else allowed, fix)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        content = load_yaml(text)
    except ConfigError as error:
        raise ConfigError(error.field, f"{error.given} in {path}", error.allowed, error.fix) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # the error's text quotes the line, which may contain a secret
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", type(error).__name__)
        if "expected ':'" in why:  # the line of the key, not of what follows
            mark = getattr(error, "context_mark", None) or mark
        why = f"{why} in line {mark.line + 1}" if mark else why
        raise ConfigError("--config", f"{path}, which is not YAML ({why})", "YAML", "fix that line") from None
    kind = "a list" if isinstance(content, list) else "a text or number"
    what = f"{path}, which is {'empty' if content is None else kind}"
    require(isinstance(content, dict), "--config", what, "a mapping of sections")
    fix = "pass each file with --config; later ones win"
    require("config" not in content, "config", f"{content.get('config')} in {path}", "no files within a file", fix)
    remember(content)
    return typing.cast(dict[str, Any], content)
