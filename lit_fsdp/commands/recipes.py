"""``recipes ls|show|cp``: the recipes and fragments included in the project."""

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lit_fsdp.commands.parsing import columns, parse, run_one_of, verb_parser
from lit_fsdp.config.locations import shipped_file, shipped_files
from lit_fsdp.config.yaml_files import read_yaml
from lit_fsdp.errors import require

_TITLE = re.compile(r"# .+ \((?P<parameters>.+) parameters\), [\w-]+ fine-tune, (?P<hardware>.+)\.")


def run_recipes(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp recipes`` and return the exit code."""
    verbs = {
        "ls": ("list the included recipes and fragments", _ls),
        "show": ("print a recipe or fragment", _show),
        "cp": ("copy a recipe or fragment, by default into this folder", _cp),
    }
    return run_one_of("recipes", verbs, argv)


def _ls(argv: Sequence[str]) -> int:
    text = "List the included recipes, then the fragments."
    parser = verb_parser("recipes ls", text, "lit-fsdp recipes ls qwen3 lora")
    parser.add_argument("words", nargs="*", metavar="WORD", help="show only names that contain each of these")
    words = [word.lower() for word in parse(parser, argv).words]

    def matching(names: Iterable[str]) -> list[str]:
        return [name for name in names if all(word in name.lower() for word in words)]

    files, fragments = shipped_files("recipes", ".yaml"), matching(shipped_files("configs"))
    rows = sorted((recipe_row(name, files[name]) for name in matching(files)), key=by_model)
    allowed, fix = "words that occur together in a name", "lit-fsdp recipes ls without them shows all names"
    require(rows or fragments, "lit-fsdp recipes ls", " ".join(words), allowed, fix)
    if rows:
        heads = ("recipe", "parameters", "hardware")
        print(columns([heads, *(tuple(str(cell or "-") for cell in row.values()) for row in rows)], heads[1:2]))
    if fragments:
        print(*["\nfragments:" if rows else "fragments:", *fragments], sep="\n")
    return 0


def _show(argv: Sequence[str]) -> int:
    parser = verb_parser("recipes show", "Print a recipe or a fragment.", "lit-fsdp recipes show debug/smoke")
    parser.add_argument("name", help="name as printed by recipes ls")
    print(find_shipped(parse(parser, argv).name).read_text(encoding="utf-8"), end="")
    return 0


def _cp(argv: Sequence[str]) -> int:
    example = "lit-fsdp recipes cp smollm2-135m_full_fsdp2_2xcpu my.yaml"
    parser = verb_parser("recipes cp", "Copy a recipe or a fragment for editing.", example)
    parser.add_argument("name", help="name as printed by recipes ls")
    parser.add_argument("dest", nargs="?", default=".", help="file, or folder; created if missing (default: .)")
    options = parse(parser, argv)
    source, copy = find_shipped(options.name), Path(options.dest)
    if options.dest.endswith("/") or copy.is_dir():
        copy = copy / source.name
    require(not copy.exists(), "lit-fsdp recipes cp", f"{copy}, which exists", "a new file", "name another")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, copy)
    print(copy)
    return 0


def recipe_row(name: str, file: Path) -> dict[str, str | None]:
    """Read the title line of a recipe; without a title use its devices."""
    title = _TITLE.fullmatch(file.read_text(encoding="utf-8").split("\n", 1)[0])
    return {
        "name": name,
        "parameters": title["parameters"] if title else None,
        "hardware": title["hardware"] if title else f"{read_yaml(file)['trainer'].get('devices')} devices",
    }


def by_model(row: Mapping[str, str | None]) -> tuple[str, float, str]:
    """Sort key: family, then size."""
    family, size = str(row["name"]).partition("-")[0], str(row["parameters"] or "0M")
    return family, float(size[:-1]) * {"M": 1, "B": 1000}[size[-1]], str(row["name"])


def find_shipped(name: str) -> Path:
    """Find the file of a recipe or fragment.

    Raises:
        ConfigError: It does not exist; the error suggests similar names.
    """
    found, near = shipped_file(name)
    fix = "write one of these names" if near[1:] else f"write {near[0]}" if near else "lit-fsdp recipes ls"
    require(found, "lit-fsdp recipes", name, ", ".join(near) or "a name that lit-fsdp recipes ls prints", fix)
    assert found is not None
    return found
