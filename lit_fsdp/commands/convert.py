"""``convert``: convert another library's configuration to a recipe."""

import difflib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_fsdp.commands.parsing import parse, verb_parser
from lit_fsdp.errors import ConfigError, require

_MEANT = dict.fromkeys(("trl", "transformers", "hf", "hf_trainer", "trainer", "sft"), "hf-trainer")


def run_convert(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp convert`` and return the exit code: 1 if the recipe would train differently."""
    from lit_fsdp.convert import FORMATS, convert_file

    text = "Write a recipe that trains in the same way as another library's configuration file."
    example = """echo '{"zero_optimization": {"stage": 3}}' | lit-fsdp convert deepspeed -"""
    parser = verb_parser("convert", text, example)
    parser.add_argument("format", help=f"library of the configuration: {', '.join(FORMATS)}")
    parser.add_argument("file", type=Path, help="YAML or JSON file to convert; - reads standard input")
    parser.add_argument("-o", "--out", type=Path, help="file to create; default: standard output")
    parser.add_argument("--ranks", type=int, help="ranks of the run, if the file does not specify them")
    parser.add_argument("--num_nodes", type=int, default=1, help="nodes of the run, if the file does not specify them")
    parser.add_argument("--allow-differences", action="store_true", help="write a recipe that trains differently")
    words = [word for word in argv if not word.startswith("-")]
    if len(words) == 1 and Path(words[0]).is_file():
        fix = f"write lit-fsdp convert FORMAT {shlex.quote(words[0])}"
        raise ConfigError("lit-fsdp convert", f"{words[0]} without its format", " | ".join(FORMATS), fix)
    options = parse(parser, argv)
    name = options.format.lower()
    near = [_MEANT[name]] if name in _MEANT else difflib.get_close_matches(name, FORMATS, n=1)
    fix = f"write lit-fsdp convert {near[0]} {options.file}" if near else ""
    require(options.format in FORMATS, "lit-fsdp convert", options.format, " | ".join(FORMATS), fix)
    conversion = convert_file(options.format, options.file, options.ranks, options.num_nodes)
    for fate in conversion.fates:
        print(fate, file=sys.stderr)
    if conversion.differs and not options.allow_differences:
        keys = ", ".join(dict.fromkeys(fate.key for fate in conversion.fates if fate.differs))
        text = f"no recipe: it would train differently because of {keys}; --allow-differences writes it anyway"
        print(text, file=sys.stderr)
        return 1
    name = "standard input" if str(options.file) in ("-", "/dev/stdin") else options.file.name
    text = conversion.as_yaml(f"{name} ({options.format})")
    if not options.out:
        print(text, end="")
        return 0
    try:
        with options.out.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except OSError as error:
        raise ConfigError("--out", f"{options.out} ({error.strerror})", "a new file", "name another") from None
    return 0
