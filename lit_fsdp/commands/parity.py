"""``lit-fsdp parity``: whether two recipes, or a recipe and a plain PyTorch loop, train alike; else, what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.commands.parsing import RECIPE, flags_of, verb_parser
from lit_fsdp.errors import require


def run_parity(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp parity`` and return the exit code: 1 if the two sides differ, or a run failed."""
    text = (
        "Whether two recipes train alike, or a recipe and a plain PyTorch loop: loss, gradient norm and weights after "
        "each step. If not, one choice after the other is turned until one can be named. Both sides have the model "
        "and the rows of --config, flags hold for both, and all is in miniature unless --full is given."
    )
    example = "lit-fsdp parity --config recipes/quickstart.yaml --against plain"
    parser = verb_parser("parity", text, example, RECIPE)
    parser.add_argument("--against", default="plain", help="a recipe, a fragment over the first, or plain (default)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to compare; default: 5")
    parser.add_argument("--full", action="store_true", help="the recipe's own model, rows, batches and devices")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = parser.parse_known_args(argv)
    require(options.steps >= 1, "--steps", options.steps, "a number of optimizer steps >= 1", "write --steps 5")
    is_plain = options.against == "plain"
    sides = [words] if is_plain else [words, _words_against(options.against, words)]
    recipes = [_checked(side, flags_of(parser), options.full, is_plain) for side in sides]
    from lit_fsdp.commands.parity_runs import compare_recipes

    return compare_recipes(sides, recipes, options)


def _words_against(path: str, words: Sequence[str]) -> list[str]:
    """The words of the other side: a fragment goes over the files of the first one, a recipe in their place."""
    from lit_fsdp.config.parser import read_command_line, read_yaml

    line, content = read_command_line(words), read_yaml(Path(path))
    model: Any = content.get("model") or {}
    is_whole = {"name", "class_path"} & set(model) and content.get("data")
    files = [path] if is_whole else [*line.files, path]
    flags = [word for word in line.words if not word.startswith("--config=")]
    return [*(f"--config={file}" for file in files), *flags, *(f"--allow-imports={one}" for one in line.allow_imports)]


def _checked(words: Sequence[str], flags: Sequence[str], full: bool, is_plain: bool) -> Any:
    from lit_fsdp.config.model import PreferenceModelConfig
    from lit_fsdp.config.parser import PREFERENCE, load_recipe

    recipe = load_recipe(words, "fit", flags)
    nodes, model = recipe.run.num_nodes if full else 1, recipe.run.model
    require(nodes == 1, "trainer.num_nodes", nodes, "1: all ranks are started here", "leave --full out")
    if is_plain:
        allowed, fix = "what a loop over single rows can train", "compare with a recipe: --against OTHER.yaml"
        require(not isinstance(model, PreferenceModelConfig), "model.class_path", PREFERENCE, allowed, fix)
        require(not recipe.run.data.streaming, "data.streaming", "true", f"{allowed} in an order of its own", fix)
    return recipe
