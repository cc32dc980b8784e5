"""``python docs/pictures/imports.py``: the packages of lit_fsdp by floor, and which imports which, from the code."""

from __future__ import annotations

import ast
from itertools import pairwise

from drawing import BLUE, GREY, ROOT, figure, save

CODE = ROOT / "lit_fsdp"


def imports() -> dict[str, set[str]]:
    """By package or module of lit_fsdp, those that it imports, at the head of a file or inside a function."""
    found: dict[str, set[str]] = {}
    for path in CODE.rglob("*.py"):
        owner = path.relative_to(CODE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lit_fsdp."):
                found.setdefault(owner, set()).add(str(node.module).split(".")[1])
    return {owner: others - {owner} for owner, others in found.items() if owner != "__init__"}


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """One more than the highest floor of what a package imports."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = max((height(other) + 1 for other in graph.get(name, ())), default=0)
        return heights[name]

    for name in {*graph, *(other for others in graph.values() for other in others)}:
        height(name)
    return heights


def main() -> None:
    """Draw a row per floor; of the imports only those from the floor below, as the rest follow from them."""
    graph = imports()
    heights = floors(graph)
    rows = [sorted(name for name, floor in heights.items() if floor == y) for y in range(max(heights.values()) + 1)]
    places = {name: ((i + 0.5) / len(row), y) for y, row in enumerate(rows) for i, name in enumerate(row)}
    drawn, axes = figure(7.4, 0.55 * len(rows) + 0.4)
    for below, above in pairwise(rows):
        for name in above:
            for other in graph.get(name, set()) & set(below):
                (x, y), (to, floor) = places[name], places[other]
                axes.plot([x, to], [y, floor], color=GREY, linewidth=0.6, zorder=1)
    box = {"boxstyle": "round,pad=0.35", "facecolor": "#eef3fb", "edgecolor": BLUE}
    for name, (x, y) in places.items():
        axes.text(x, y, name, ha="center", va="center", bbox=box, zorder=2)
    axes.set(xlim=(0, 1), ylim=(-0.6, len(rows) - 0.4))
    axes.axis("off")
    save(drawn, "imports")


if __name__ == "__main__":
    main()
