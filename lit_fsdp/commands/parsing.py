"""Flags of the verbs that have their own: never abbreviated, and a mistake names the nearest right one."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lit_fsdp.config.places import expanded
from lit_fsdp.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    """Raises whatever is wrong; ``exit_on_error=False`` alone still exits on a missing or surplus argument."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """With ``~`` and ``${VAR}`` of paths expanded."""
        options, rest = super().parse_known_args(args, namespace)
        for name, value in vars(options).items():
            if isinstance(value, (str, Path)) and name not in ("prompt", "system"):
                setattr(options, name, type(value)(expanded(str(value), name)))
        return options, rest

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def verb_parser(verb: str, text: str) -> argparse.ArgumentParser:
    """A parser for one verb that raises :class:`argparse.ArgumentError` instead of exiting."""
    return _Parser(
        f"lit-fsdp {verb}", description=text, allow_abbrev=False, exit_on_error=False, epilog="Exit codes: 0, 1, 2."
    )


def options_and_recipe(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Any, list[str]]:
    """The flags of a verb, and the words left, which are a recipe's; None where help was asked for and given."""
    parser.usage = f"{parser.prog} --config RECIPE.yaml [--config FRAGMENT.yaml ...] [--key value ...] [options]"
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return None, []
    try:
        return parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(parser.prog, str(error), f"see {parser.prog} --help") from None


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Names of a verb's own flags, for the error about one that does not exist."""
    return [action.dest for action in parser._actions if action.dest != "help"]


def run_one_of(name: str, verbs: Mapping[str, Callable[[Sequence[str]], int]], usage: str, argv: Sequence[str]) -> int:
    """Run the verb that ``argv`` begins with, of those below ``lit-fsdp name``, and return its exit code.

    Raises:
        ConfigError: There is no such verb; the nearest one is named.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] not in verbs:
        near = difflib.get_close_matches(argv[0], verbs, n=1) or list(verbs)[:1]
        raise ConfigError(f"lit-fsdp {name}", argv[0], ", ".join(verbs), f"lit-fsdp {name} {near[0]} ...")
    return verbs[argv[0]](argv[1:])


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Arguments, or a ConfigError that names the nearest flag."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for word in argv:
        name = word.split("=")[0]
        if name.startswith("--") and name not in flags:
            near = difflib.get_close_matches(name, flags, n=1, cutoff=0.5) or flags[-1:]
            raise ConfigError(
                f"{parser.prog} {name}", "a flag that does not exist", ", ".join(flags), f"write {near[0]}"
            )
    try:
        return parser.parse_args(list(argv))
    except argparse.ArgumentError as error:
        usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
        raise ConfigError(parser.prog, str(error), usage, f"see {parser.prog} --help") from None
