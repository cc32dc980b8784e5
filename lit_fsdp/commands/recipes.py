"""``recipes ls|show|cp``: the recipes and fragments that ship with the project."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_fsdp.commands.parsing import parse, verb_parser
from lit_fsdp.config.parser import read_yaml
from lit_fsdp.config.places import shipped_root
from lit_fsdp.errors import ConfigError

_VERBS = ("ls", "show", "cp")
_USAGE = """usage: lit-fsdp recipes VERB [options]

  ls [--configs] [--json]      the recipes, or the fragments, that ship
  show NAME                    print one
  cp NAME [DEST] [--force]     copy one to change it; default: into this folder
"""
_TITLE = re.compile(r"# (?P<model>.+), (?P<method>[a-z-]+) fine-tune, (?P<hardware>.+)\.")
_PARAMETERS = re.compile(r"([\d,]+) parameters")


@dataclass(frozen=True)
class RecipeRow:
    """What ``ls`` says of one recipe."""

    name: str
    model: str
    parameters: int | None
    """As its head says; None where it does not."""
    hardware: str
    method: str


def run_recipes(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp recipes`` and return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    verbs = {"ls": _ls, "show": _show, "cp": _cp}
    if argv[0] not in verbs:
        near = difflib.get_close_matches(argv[0], _VERBS, n=1) or ["ls"]
        raise ConfigError("lit-fsdp recipes", argv[0], ", ".join(_VERBS), f"lit-fsdp recipes {near[0]}")
    return verbs[argv[0]](argv[1:])


def _ls(argv: Sequence[str]) -> int:
    parser = verb_parser("recipes ls", "The recipes that ship: whole runs, to be used as they are or copied.")
    parser.add_argument("--configs", action="store_true", help="fragments and model configs instead")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    options = parse(parser, argv)
    if options.configs:
        described = {name: _first_sentence(file) for name, file in _configs().items()}
        if options.json:
            print(json.dumps([{"name": name, "what": what} for name, what in described.items()], indent=1))
        else:
            _print_columns([("config", "what"), *described.items()])
        return 0
    rows = [recipe_row(name, file) for name, file in _recipes().items()]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return 0
    lines = [
        (row.name, row.model, "-" if row.parameters is None else f"{row.parameters:,}", row.hardware, row.method)
        for row in rows
    ]
    _print_columns([("recipe", "model", "parameters", "hardware", "method"), *lines], to_the_right=(2,))
    return 0


def _show(argv: Sequence[str]) -> int:
    parser = verb_parser("recipes show", "Print a recipe or a fragment.")
    parser.add_argument("name", help="as ls and ls --configs call it")
    print(find_shipped(parse(parser, argv).name).read_text(encoding="utf-8"), end="")
    return 0


def _cp(argv: Sequence[str]) -> int:
    parser = verb_parser("recipes cp", "Copy a recipe or a fragment, to change it.")
    parser.add_argument("name", help="as ls and ls --configs call it")
    parser.add_argument("dest", nargs="?", default=".", help="file, or folder; missing folders are made (default: .)")
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")
    options = parse(parser, argv)
    source = find_shipped(options.name)
    copy = copy_shipped(source, options.dest, options.force)
    print(copy)
    if source.suffix == ".yaml":
        first = "" if source.parent == shipped_root("recipes") else "--config RECIPE.yaml "
        print(f"use it: lit-fsdp fit {first}--config {shlex.quote(str(copy))}", file=sys.stderr)
    return 0


def recipe_row(name: str, file: Path) -> RecipeRow:
    """The row of one recipe: from its head, and where that is free text from its keys."""
    text = file.read_text(encoding="utf-8")
    title, count = _TITLE.fullmatch(text.split("\n", 1)[0]), _PARAMETERS.search(text)
    values = read_yaml(file)
    trainer, model = values.get("trainer") or {}, values.get("model") or {}
    devices = f"{trainer.get('devices')} devices ({trainer.get('accelerator')})"
    return RecipeRow(
        name=name,
        model=Path(str(model.get("name"))).name,
        parameters=int(count[1].replace(",", "")) if count else None,
        hardware=title["hardware"] if title else devices,
        method=title["method"] if title else "lora" if model.get("lora") else "full",
    )


def find_shipped(name: str) -> Path:
    """The file of a recipe or fragment; ``.yaml`` and a leading ``recipes/`` or ``configs/`` may be left out.

    Raises:
        ConfigError: There is none; near names are given.
    """
    known = {**_configs(), **_recipes()}
    plain = name.removesuffix(".yaml").removesuffix(".json")
    for prefix in ("recipes/", "configs/"):
        plain = plain.removeprefix(prefix)
    if plain in known:
        return known[plain]
    short = {key.rpartition("/")[2]: key for key in known}
    near = [key for key in _recipes() if plain and key.startswith(plain)]
    near += difflib.get_close_matches(plain, known, n=3, cutoff=0.5)
    near += [short[key] for key in difflib.get_close_matches(plain, short, n=3, cutoff=0.6)]
    near = list(dict.fromkeys(near))[:6]
    allowed = ", ".join(near) if near else "a name that lit-fsdp recipes ls or ls --configs prints"
    fix = f"write {near[0]}" if near else "lit-fsdp recipes ls"
    raise ConfigError("lit-fsdp recipes", name, allowed, fix)


def copy_shipped(source: Path, dest: str, force: bool = False) -> Path:
    """Copy ``source`` to a file, or into a folder under its own name, and return the copy.

    Args:
        source: A file that ships.
        dest: A folder if it exists as one or ends with ``/``; else a file, which gets the suffix if it has none.
        force: Overwrite what is there.

    Raises:
        ConfigError: Something is there already, or the copy cannot be written.
    """
    copy = Path(dest).expanduser()
    if dest.endswith("/") or copy.is_dir():
        copy = copy / source.name
    elif copy.suffix not in (".yaml", ".yml", ".json"):
        copy = copy.with_name(copy.name + source.suffix)
    if os.path.lexists(copy) and not force:
        raise ConfigError("lit-fsdp recipes cp", f"{copy}, which exists", "a new file", "name another, or give --force")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    except OSError as error:
        why = error.strerror or "it is the file that ships"
        raise ConfigError("lit-fsdp recipes cp", f"{copy} ({why})", "a place for a file", "name another") from None
    return copy


def _recipes() -> dict[str, Path]:
    return {file.stem: file for file in sorted(shipped_root("recipes").glob("*.yaml"), key=lambda file: file.stem)}


def _configs() -> dict[str, Path]:
    root = shipped_root("configs")
    files = sorted(file for file in root.rglob("*") if file.suffix in (".yaml", ".json"))
    return {str(file.relative_to(root).with_suffix("")): file for file in files}


def _first_sentence(file: Path) -> str:
    """Of the comment at the head; of a model config, the first of the hub names that it stands for."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        first, *others = json.loads(text).get("_hub_names") or ["?"]
        return f"the architecture of {first}" + (f" and {len(others)} like it" if others else "")
    lines = itertools.takewhile(lambda line: re.match(r"# ?\S", line), text.splitlines())  # up to an example
    words = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=\.)\s", words, maxsplit=1)[0].rstrip(".:")


def _print_columns(rows: Sequence[Sequence[str]], to_the_right: Sequence[int] = ()) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if i in to_the_right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
