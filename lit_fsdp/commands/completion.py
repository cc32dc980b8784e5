"""``--print_completion``: a script for shell completion of verbs, flags, recipe keys and their values."""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from lit_fsdp.commands.parsing import PARSERS
from lit_fsdp.config.command_line import OWN_CLASSES
from lit_fsdp.config.locations import PATHS, shipped_files
from lit_fsdp.config.parser import SECTIONS, lightning_keys
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.errors import require

_BELOW = {
    "recipes": ("ls", "show", "cp"),
    "data": ("inspect",),
    "model": ("prepare",),
    "slurm": ("render", "submit"),
    "ckpt": ("ls", "verify", "import"),
}
"""Verbs with subcommands."""


def completion_script(shell: str, verbs: Mapping[str, str], run: Callable[[list[str]], int]) -> str:
    """Write the script, for ``eval "$(lit-fsdp --print_completion bash)"``; torch is not imported.

    Args:
        shell: A shell that shtab supports.
        verbs: A short description of each verb.
        run: Runs a command line; the flags of a verb are known after ``--help`` has run.

    Raises:
        ConfigError: shtab is not installed or does not support the shell.
    """
    is_there = importlib.util.find_spec("shtab") is not None
    fix = "pip install 'lit-fsdp[completion]'"
    require(is_there, "--print_completion", "a script that needs shtab, which is not installed", "shtab", fix)
    import shtab

    known = shtab.SUPPORTED_SHELLS
    require(shell in known, "--print_completion", shell, ", ".join(known), "write --print_completion bash")
    keys = _recipe_flags(shtab.FILE)

    def parents(verb: str) -> list[argparse.ArgumentParser]:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            run([*verb.split(), "--help"])
        own = PARSERS[verb]
        for action in own._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif verb.startswith("recipes") and action.dest == "name":
                action.choices = [*shipped_files("recipes", ".yaml"), *shipped_files("configs")]
        return [own, keys] if "--config" in own.format_usage() else [own]

    top = argparse.ArgumentParser("lit-fsdp")
    top.add_argument("--version")
    top.add_argument("--print_completion", choices=known)
    first = top.add_subparsers()
    for verb, text in verbs.items():
        if verb in ("fit", "validate", "test", "predict"):
            first.add_parser(verb, help=text, parents=[keys])
        elif verb not in _BELOW:
            first.add_parser(verb, help=text, parents=parents(verb), add_help=False)
        else:
            second = first.add_parser(verb, help=text).add_subparsers()
            for name in _BELOW[verb]:
                second.add_parser(name, help=name, parents=parents(f"{verb} {name}"), add_help=False)
    return str(shtab.complete(top, shell))


def _recipe_flags(files: Any) -> argparse.ArgumentParser:
    """Flags of every verb that reads a recipe; file flags use ``files`` for completion."""
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("--print_config", "--verbose", "--debug"):
        parser.add_argument(name, action="store_true")
    sections = typing.get_type_hints(RunConfig)
    keys: dict[str, list[str]] = {"config": [], "seed_everything": [], "ckpt_path": [], "allow-imports": []}
    keys |= {f"trainer.{name}": [] for name in lightning_keys()}
    keys |= _keys(sections["strategy"], STRATEGY)
    for name in (*OWN_CLASSES, *SECTIONS):
        keys |= _keys(sections[name], name)
    paths = ["config", "ckpt_path", *(f"{section}.{name}" for section, names in PATHS.items() for name in names)]
    for key, words in keys.items():
        action = parser.add_argument(f"--{key}", choices=words or None)
        if key in paths:
            action.complete = files  # type: ignore[attr-defined]
    return parser


def _keys(cls: Any, path: str) -> dict[str, list[str]]:
    """The literal values of each field of a dataclass by full key, including nested dataclasses."""
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        found[f"{path}.{name}"] = list(_words(hint))
        for one in typing.get_args(hint) or (hint,):
            found |= _keys(one, f"{path}.{name}") if dataclasses.is_dataclass(one) else {}
    return found


def _words(hint: Any) -> Iterable[str]:
    if hint is bool:
        yield from ("true", "false")
    for one in typing.get_args(hint):
        yield from [str(one)] if typing.get_origin(hint) is Literal else _words(one)
