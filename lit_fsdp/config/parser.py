"""A recipe from files and flags, checked: one function for every verb that reads one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.config.miniature import adapt_to_miniature
from lit_fsdp.config.recipe import read_recipe
from lit_fsdp.config.run import RunConfig, check_recipe
from lit_fsdp.host import is_first_process


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe: typed sections, the merged values they come from, and the files."""

    run: RunConfig
    values: dict[str, Any]
    files: list[Path]


def load_recipe(argv: Sequence[str], verb: str, also: Sequence[str] = ()) -> LoadedRecipe:
    """Read ``--config`` files and ``--key value`` flags, later wins, and check every rule.

    Args:
        argv: Words of the command line, without those that belong to the verb itself.
        verb: What the recipe is for; rules that concern only a training run look at it.
        also: Flags of the verb itself, to be named in the error about a flag that does not exist.

    Raises:
        ConfigError: A key or value that does not exist, or a rule that does not hold.
    """
    recipe = read_recipe(argv, also=also)
    for line in adapt_to_miniature(recipe.values, recipe.replaced) if is_first_process() else ():
        print(f"miniature: {line}", file=sys.stderr)
    return LoadedRecipe(check_recipe(recipe.values, verb), recipe.values, recipe.files)
