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
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.commands.parsing import columns, parse, run_one_of, verb_parser
from lit_fsdp.config.locations import shipped_root
from lit_fsdp.config.parser import read_yaml
from lit_fsdp.errors import ConfigError, require

_USAGE = """usage: lit-fsdp recipes VERB [options]

  ls [--configs] [--json]      the recipes, or the fragments, that ship
  show NAME                    print one
  cp NAME [DEST] [--force]     copy one to change it; default: into this folder

example:
  lit-fsdp recipes cp smollm2-135m_full_fsdp2_2xcpu my.yaml
"""
_TITLE = re.compile(r"# .+ \((?P<parameters>.+) parameters\), [\w-]+ fine-tune, (?P<hardware>.+)\.")


def run_recipes(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp recipes`` and return the exit code."""
    return run_one_of("recipes", {"ls": _ls, "show": _show, "cp": _cp}, _USAGE, argv)


def _ls(argv: Sequence[str]) -> int:
    text = "The recipes that ship: whole runs, to be used as they are or copied."
    parser = verb_parser("recipes ls", text, "lit-fsdp recipes ls --configs")
    parser.add_argument("--configs", action="store_true", help="fragments and model configs instead")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    options = parse(parser, argv)
    rows: list[dict[str, Any]]
    if options.configs:
        rows = [{"name": name, "what": _first_sentence(file)} for name, file in _configs().items()]
    else:
        rows = sorted((recipe_row(name, file) for name, file in _recipes().items()), key=by_model)
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    cells = [[str(cell or "-") for cell in row.values()] for row in rows]
    if options.configs:
        room = shutil.get_terminal_size().columns - max(len(name) for name, _ in cells) - 2
        cells = [
            ["" if line else name, part]
            for name, what in cells
            for line, part in enumerate(textwrap.wrap(what, max(room, 20)))
        ]
    print(columns([["config" if options.configs else "recipe", *list(rows[0])[1:]], *cells], right=("parameters",)))
    return 0


def _show(argv: Sequence[str]) -> int:
    parser = verb_parser("recipes show", "Print a recipe or a fragment.", "lit-fsdp recipes show debug/smoke")
    parser.add_argument("name", help="as ls and ls --configs call it")
    print(find_shipped(parse(parser, argv).name).read_text(encoding="utf-8"), end="")
    return 0


def _cp(argv: Sequence[str]) -> int:
    example = "lit-fsdp recipes cp smollm2-135m_full_fsdp2_2xcpu my.yaml"
    parser = verb_parser("recipes cp", "Copy a recipe or a fragment, to change it.", example)
    parser.add_argument("name", help="as ls and ls --configs call it")
    parser.add_argument("dest", nargs="?", default=".", help="file, or folder; missing folders are made (default: .)")
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")
    options = parse(parser, argv)
    source, copy = find_shipped(options.name), Path(options.dest)
    if options.dest.endswith("/") or copy.is_dir():
        copy = copy / source.name
    is_free = options.force or not os.path.lexists(copy)
    require(is_free, "lit-fsdp recipes cp", f"{copy}, which exists", "a new file", "name another, or give --force")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    except OSError as error:
        raise ConfigError("lit-fsdp recipes cp", f"{copy} ({error})", "a path where a file can be") from None
    print(copy)
    if source.suffix == ".yaml":
        first = "" if source.parent == shipped_root("recipes") else "--config RECIPE.yaml "
        print(f"use it: lit-fsdp fit {first}--config {shlex.quote(str(copy))}", file=sys.stderr)
    return 0


def recipe_row(name: str, file: Path) -> dict[str, str | None]:
    """Read the first line of a recipe; its devices where it has no such line."""
    text, values = file.read_text(encoding="utf-8"), read_yaml(file)
    title = _TITLE.fullmatch(text.split("\n", 1)[0])
    return {
        "name": name,
        "parameters": title["parameters"] if title else None,
        "hardware": title["hardware"] if title else f"{values['trainer'].get('devices')} devices",
    }


def by_model(row: Mapping[str, str | None]) -> tuple[str, float, str]:
    """The key that sorts rows by family, then size."""
    family, size = str(row["name"]).partition("-")[0], str(row["parameters"] or "0M")
    return family, float(size[:-1]) * {"M": 1, "B": 1000}[size[-1]], str(row["name"])


def find_shipped(name: str) -> Path:
    """Find the file of a recipe or fragment; ``.yaml`` and a leading ``recipes/`` or ``configs/`` are optional.

    Raises:
        ConfigError: There is none; near names are given.
    """
    known = shipped_files()
    plain = re.sub(r"^(recipes|configs)/|\.(yaml|json)$", "", name)
    if plain in known:
        return known[plain]
    short = {key.rpartition("/")[2]: key for key in known}
    near = [key for key in _recipes() if plain and key.startswith(plain)]
    near += [short[key] for key in difflib.get_close_matches(plain.rpartition("/")[2], short, n=3)]
    allowed = ", ".join(dict.fromkeys(near)) or "a name that lit-fsdp recipes ls or ls --configs prints"
    raise ConfigError("lit-fsdp recipes", name, allowed, f"write {near[0]}" if near else "lit-fsdp recipes ls")


def shipped_files() -> dict[str, Path]:
    """Every recipe and fragment by its name."""
    return {**_configs(), **_recipes()}


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
        return f"the architecture of {', '.join(json.loads(text).get('_hub_names') or ['?'])}"
    lines = itertools.takewhile(lambda line: re.match(r"# ?\S", line), text.splitlines())  # up to an example
    words = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=\.)\s", words, maxsplit=1)[0].rstrip(".:")
