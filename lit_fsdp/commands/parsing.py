"""Parsers for verbs with their own flags (without abbreviations), and tables that verbs print."""

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lit_fsdp.config.locations import expanded
from lit_fsdp.config.words import meant_flag, underscored
from lit_fsdp.errors import ConfigError, require

RECIPE = "--config RECIPE.yaml [--key value ...] [options]"
"""Usage of verbs that read a recipe."""
PARSERS: dict[str, argparse.ArgumentParser] = {}
"""Parsers of the verbs called in this process."""


class _Parser(argparse.ArgumentParser):
    """Raises all errors; argparse with ``exit_on_error=False`` alone still exits on missing or surplus arguments."""

    example = ""

    def format_help(self) -> str:
        """Append the example on a separate line for copying; an epilog would wrap it."""
        return f"{super().format_help()}\n{example_lines(self.example)}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Expand ``~`` and ``${VAR}`` in paths."""
        options, rest = super().parse_known_args(_declared(self, args or ()), namespace)
        for name, value in vars(options).items():
            if isinstance(value, (str, Path)) and name not in ("prompt", "system"):
                setattr(options, name, type(value)(expanded(str(value), name)))
        return options, rest

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        flags = message.partition("the following arguments are required: ")[2]
        require(not flags, self.prog, f"no value for {flags}", usage, f"for example: {self.example}")
        if found := re.match(r"argument (--\w+)(?:/\S+)?: invalid choice: '(.*)' \(", message):
            flag, given = found.groups()
            action = next(action for action in self._actions if flag in action.option_strings)
            choices = list(map(str, action.choices or ()))
            near = difflib.get_close_matches(given, choices, n=1, cutoff=0.5)
            fix = f"write {flag} {near[0]}" if near else "write one of these values"
            raise ConfigError(f"{self.prog} {flag}", given, ", ".join(choices), fix)
        if found := re.match(r"argument (--[\w-]+): invalid (int|float) value: '(.*)' *$", message):
            flag, kind, given = found.groups()
            size = re.fullmatch(r"(\d*\.?\d+) ?gi?b", given.lower()) if kind == "float" else None
            fix = f"write {flag} {size[1] if size else 'NUMBER'}"
            raise ConfigError(f"{self.prog} {flag}", given, "a whole number" if kind == "int" else "a number", fix)
        raise ConfigError(self.prog, message, usage, f"see {self.prog} --help")


def verb_parser(verb: str, text: str, example: str, usage: str | None = None) -> argparse.ArgumentParser:
    """Build a parser for one verb that raises :class:`ConfigError` instead of exiting.

    The ``example`` is a command line that works in a checkout, at most 78 characters long; the ``usage`` follows the
    verb and defaults to its flags.
    """
    parser = _Parser(f"lit-fsdp {verb}", description=text, allow_abbrev=False, epilog="Exit codes: 0, 1, 2.")
    parser.usage = f"{parser.prog} {usage}" if usage else None
    parser.example = example
    PARSERS[verb] = parser
    return parser


def example_lines(example: str) -> str:
    """The end of the help of a verb."""
    return f"example:\n  {example}\n"


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of a verb without a recipe; errors suggest the nearest flag, or the one that a value needs."""
    needed = [action for action in parser._actions if action.required]
    if needed and all(action.option_strings for action in needed) and argv and not argv[0].startswith("-"):
        words, flags = list(argv), [action.option_strings[0] for action in parser._actions if action.option_strings]
        if words[1:2] and not words[1].startswith("-") and "--prompt" in flags:
            words[1:] = ["--prompt", *words[1:]]
        elif words[1:2] and not words[1].startswith("-") and needed[1:]:
            words[1:] = [needed[1].option_strings[-1], *words[1:]]
        fix = f"write {parser.prog} {needed[0].option_strings[0]} {shlex.join(words)}"
        raise ConfigError(parser.prog, f"{argv[0]} without a flag", "flags and their values", fix)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    named = [flag[2:] for flag in flags if flag.startswith("--") and flag != "--help"]
    for name in (word.partition("=")[0] for word in _declared(parser, argv) if word.startswith("--")):
        alike = difflib.get_close_matches(name[2:], named, n=1, cutoff=0.5)
        near = meant_flag(name, flags) or "".join(f"--{one}" for one in alike)
        fix = f"write {near}" if near else f"see {parser.prog} --help"
        require(name in flags, f"{parser.prog} {name}", "a flag that does not exist", ", ".join(flags), fix)
    return parser.parse_args(list(argv))


def _declared(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return the words with the flags spelled as ``parser`` declares them; equivalent are ``-`` and ``_``."""
    names = {underscored(flag): flag for action in parser._actions for flag in action.option_strings}
    parts = [underscored(word).partition("=") if word.startswith("--") else (word, "", "") for word in argv]
    return [names.get(name, name) + equals + value for name, equals, value in parts]


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """Names of a verb's own flags, for the error about an unknown flag."""
    return [action.dest for action in parser._actions if action.dest != "help"]


def refuse_two_values(short: Mapping[str, tuple[str, Any]], words: Sequence[str], also: Sequence[str]) -> None:
    """Refuse a recipe flag, in any form, that differs from the verb's own flag for the same key.

    The mapping ``short`` gives the verb's flag and its value for a recipe key; for ``also`` see ``load_recipe``.
    """
    from lit_fsdp.config.command_line import read_command_line
    from lit_fsdp.config.parser import values_of_flags

    given = values_of_flags(read_command_line(words), also)
    for key, (flag, value) in short.items():
        beside = given.get(key)
        fits = beside in (None, "auto", -1) or str(beside) == str(value)
        require(fits, flag, f"{value} with --{key} {beside}", "only one of them, or equal values", f"drop --{key}")


def run_one_of(name: str, verbs: Mapping[str, tuple[str, Callable[[Sequence[str]], int]]], argv: Sequence[str]) -> int:
    """Run the subcommand of ``lit-fsdp name`` given by ``argv`` and return its exit code.

    The mapping ``verbs`` has a description of at most 68 characters and the function of each subcommand.

    Raises:
        ConfigError: The verb does not exist; the error suggests the nearest.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        lines = "\n".join(f"  {verb:<10}{text}" for verb, (text, _) in verbs.items())
        usage = f"usage: lit-fsdp {name} VERB [options]\n\n{lines}\n\nlit-fsdp {name} VERB --help explains a verb"
        print(usage, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] not in verbs:
        near = difflib.get_close_matches(argv[0], verbs, n=1) or list(verbs)[:1]
        raise ConfigError(f"lit-fsdp {name}", argv[0], ", ".join(verbs), f"lit-fsdp {name} {near[0]} ...")
    return verbs[argv[0]][1](argv[1:])


def columns(lines: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Align lines of cells as text; the first line is the header, ``right`` names the columns to align right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [f"{'>' if head in right else '<'}{width}" for head, width in zip(lines[0], widths, strict=True)]
    return "\n".join("  ".join(map(format, cells, aligned)).rstrip() for cells in lines)
