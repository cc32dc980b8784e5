"""Which of two values counts when a recipe gives a thing in two ways; of the same key, jsonargparse keeps the last."""

import dataclasses
import re
from typing import Any

from jsonargparse import Namespace

from lit_fsdp.config.command_line import CommandLine, each_flag, short_form
from lit_fsdp.config.model import OptimConfig
from lit_fsdp.config.run import STRATEGY
from lit_fsdp.config.yaml_files import load_yaml
from lit_fsdp.errors import require

_MAIN = {"activation_checkpointing": "mode", "precision": "mode", "context_parallel": "degree", "wrap": "classes"}
"""Arguments of the strategy that are a word or a mapping, with the key that means the word."""


def keep_later(data: Namespace, line: CommandLine, *names: str) -> None:
    """Keep the last given of alternative ``data`` options ``names``; a flag overrides a file."""
    given = [_names(short_form(content.get("data"))[1]) for content in line.contents]
    for flag, value, _ in each_flag(line.short_words()):
        if flag.startswith("--data"):
            given.append(_names(load_yaml(value or "")) if flag == "--data" else _names([flag.removeprefix("--data.")]))
    last: set[str] = next((found for keys in reversed(given) if (found := keys.intersection(names))), set())
    for name in set(names) - last if len(last) == 1 and all(data[name] is not None for name in names) else ():
        data[name] = None


def keep_later_rate(optim: Namespace, line: CommandLine, name: str) -> None:
    """Of ``name`` and the optimizer's argument of that name, keep the one given later, as ``name``."""
    default = next(field.default for field in dataclasses.fields(OptimConfig) if field.name == name)
    in_args = list[bool]()
    for section in line.model_sections():
        given = section.get("optim")
        if not isinstance(given, dict):
            continue
        args: Any = given.get("init_args") or given.get("optimizer_args") or {}
        is_in_args = name in args
        if is_in_args and name in given:
            both = f"{given[name]} and, in the optimizer's arguments, {args[name]}"
            is_one = given[name] == default  # as recipes were saved
            require(is_one, f"model.optim.{name}", both, "one value", "remove one of them")
        in_args += [is_in_args] if is_in_args or name in given else []
    if in_args and isinstance(optim.optimizer_args, dict) and name in optim.optimizer_args:
        if in_args[-1]:
            optim[name] = optim.optimizer_args[name]
        optim.optimizer_args = {key: value for key, value in optim.optimizer_args.items() if key != name} or None


def _names(section: Any) -> set[str]:
    """The fields that a section, or its keys, give: ``val`` for ``val.easy`` and ``val+``."""
    return {re.split(r"[.+]", str(key))[0] for key in section or ()}


def check_words(line: CommandLine) -> None:
    """Refuse keys of a mapping over an earlier word, which jsonargparse replaces by the mapping's defaults."""
    given: list[tuple[str, Any]] = []
    for content in line.contents:
        trainer = content.get("trainer")
        args = short_form(trainer.get("strategy"))[1] if isinstance(trainer, dict) else None
        given += args.items() if isinstance(args, dict) else ()
    for flag, value, _ in each_flag(line.short_words()):
        name, _, key = flag.removeprefix(f"--{STRATEGY}.").partition(".")
        text = value or ""
        if flag == f"--{STRATEGY}" and isinstance(found := load_yaml(text), dict):
            given += found.items()
        elif flag.startswith(f"--{STRATEGY}.") and name in _MAIN:
            given.append((name, {key: text} if key else load_yaml(text)))
    last: dict[str, Any] = {}
    for name, part in given:
        main, before = _MAIN.get(name, ""), last.get(name)
        replaces = name == "wrap" and not {"max_root_share", "embedding_and_head"}.issuperset(part or ())
        if isinstance(part, dict) and main and main not in part and not replaces:
            is_default = before in (None, "none", "auto", "mixed", 1)
            field, keys = f"{STRATEGY}.{name}", ", ".join(part)
            fix = f"write {main} too: {field}.{main}: {before}"
            require(is_default, field, f"{keys} over {before}, which would be lost", "a word, or a mapping", fix)
        elif main:
            last[name] = None if isinstance(part, dict) else part
