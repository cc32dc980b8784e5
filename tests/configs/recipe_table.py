"""The table of recipes/README.md by the planner, without weights: ``python -m tests.configs.recipe_table``."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from lit_fsdp.commands.recipes import by_model, recipe_row
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.run import RunConfig
from lit_fsdp.plan.memory import RankMemory, rank_memory

README = Path(__file__).parents[2] / "recipes" / "README.md"
RECIPES = [path for path in sorted(README.parent.glob("*.yaml")) if path.stem != "quickstart"]
GIB = 2**30


@functools.cache
def checked(recipe: Path) -> RunConfig:
    """The recipe, every rule of which holds."""
    return load_recipe(["--config", str(recipe)], "fit").run


@functools.cache
def planned(recipe: Path) -> RankMemory:
    """What the rank that holds most needs."""
    return rank_memory(checked(recipe))


def table() -> str:
    """A line for each recipe: between steps, and at the highest moment on the device."""
    lines = ["| recipe | parameters | hardware | weights, gradients, AdamW | peak memory |", "|---|---|---|---|---|"]
    for row in sorted((recipe_row(path.stem, path) for path in RECIPES), key=by_model):
        name, found = row["name"], planned(README.parent / f"{row['name']}.yaml")
        state = (found.parameters + found.gradients + found.optimizer) / GIB
        where = " on the host" if found.offloads else ""
        cells = [f"[{name}]({name}.yaml)", row["parameters"], row["hardware"], f"{state:.2f}{where}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {found.peak / GIB:.1f} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The text of recipes/README.md with the table as the planner gives it."""
    return re.sub(r"(?m)^\| recipe \|.*\n(\|.*\n)+", lambda _: table(), text)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
