"""``model prepare``: fetch or convert a model and its tokenizer ahead of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.commands.parsing import verb_parser
from lit_fsdp.errors import ConfigError

_TEXT = (
    "Fetch a model and its tokenizer from the hub, or convert them, into the caches that a run reads: on a login node, "
    "say, for compute nodes without a network. What is there already is only looked at."
)
_GIB = 2**30


def run_model(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp model prepare`` and return the exit code."""
    verb, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb in ("-h", "--help"):
        verb, rest = "prepare", ["--help"]
    if verb != "prepare":
        raise ConfigError("lit-fsdp model", verb or "nothing", "prepare", "lit-fsdp model prepare --config RECIPE.yaml")
    parser = verb_parser("model prepare", _TEXT)
    parser.usage = "lit-fsdp model prepare (--config RECIPE.yaml ... | --name NAME) [--json] [--key value ...]"
    parser.add_argument("--name", help="hub name, folder or GGUF file; default: model.name of the recipe")
    parser.add_argument("--json", action="store_true", help="JSON instead of lines on standard output")
    if "-h" in rest or "--help" in rest:
        parser.print_help()
        return 0
    try:
        options, words = parser.parse_known_args(rest)
    except argparse.ArgumentError as error:
        raise ConfigError(parser.prog, str(error), "--config, --name, --json", f"see {parser.prog} --help") from None
    config = _model_section(words, options.name)
    from lit_fsdp.models.prepared import prepare_model
    from lit_fsdp.speak import speak

    speak()
    record = prepare_model(config)
    if options.json:
        print(json.dumps(record, indent=1))
        return 0
    for what in ("weights", "tokenizer"):
        print(f"{what:<10}{_line(record[what])}")
    return 0


def _model_section(words: list[str], name: str | None) -> Any:
    """The ``model`` section of a recipe and flags, or of a name alone."""
    from lit_fsdp.config.miniature import adapt_to_miniature
    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.config.recipe import read_recipe
    from lit_fsdp.config.typed import build

    recipe = read_recipe(words, also=("name", "json"))
    for line in adapt_to_miniature(recipe.values, recipe.replaced):
        print(f"miniature: {line}", file=sys.stderr)
    config = build(ModelConfig, recipe.values.get("model"), "model")
    if name is not None:
        config = dataclasses.replace(config, name=name)
    if config.name is None:
        fix = "lit-fsdp model prepare --config RECIPE.yaml, or --name NAME"
        raise ConfigError("lit-fsdp model prepare", "no model", "a recipe with model.name, or --name", fix)
    return config


def _line(part: dict[str, Any]) -> str:
    if part["folder"] is None:
        return str(part["note"])
    size = part["num_bytes"]
    shown = f"{size / _GIB:.2f} GiB" if size >= _GIB / 10 else f"{size / 2**20:.1f} MiB"
    return f"{Path(part['folder'])}  {shown} in {part['num_files']} files"
