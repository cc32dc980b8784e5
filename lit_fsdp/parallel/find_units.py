"""Units found from the model itself: its FSDP plan, else its no-split classes, its repeated blocks, or by size."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.wrap_choice import can_be_unit, modules_of_patterns, modules_of_size, transformers_models

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_UNIT_SIZE = 1_000_000
"""Parameters of a unit in a model in which nothing repeats: less is not worth a gather of its own."""
_SMALL_LIST = 0.1
"""A list that holds less than this share of what the largest one holds is not worth a gather per member."""


@dataclass(frozen=True)
class Choice:
    """Modules that shall be units, and who said so."""

    blocks: list[nn.Module]
    """The repeated ones."""
    others: list[nn.Module]
    """Embedding, head, experts."""
    source: str
    recomputed: list[nn.Module] = field(default_factory=list)
    """Those that activation checkpointing applies to, if they are told apart from ``blocks``."""


def find_units(model: nn.Module, path: str) -> Choice:
    """The units a model declares or shows, by the first way that finds any; a small model may have none.

    Args:
        model: Not changed.
        path: Where the choice stands in the recipe, for errors.

    Raises:
        ConfigError: A model without parameters.
    """
    for found in (_by_fsdp_plan, _by_no_split_classes, _by_lists):
        choice = found(model)
        if choice is not None:
            return choice
    if sum(p.numel() for p in model.parameters()) == 0:
        raise ConfigError(path, "a model without parameters", "a model with parameters", "build the model first")
    others = [*modules_of_size(model, _UNIT_SIZE), *embeddings_and_heads(model)]
    return Choice([], others, "size, as nothing in it repeats")


def embeddings_and_heads(model: nn.Module) -> list[nn.Module]:
    """Input embedding and output head of every transformers model in ``model``, tied or not."""
    ends: dict[nn.Module, None] = {}
    for owner in transformers_models(model):
        for get in (owner.get_input_embeddings, getattr(owner, "get_output_embeddings", None)):
            try:
                end = get() if callable(get) else None
            except NotImplementedError:  # e.g. a vision tower
                continue
            if isinstance(end, nn.Module) and can_be_unit(end):
                ends[end] = None
    return list(ends)


def _by_fsdp_plan(model: nn.Module) -> Choice | None:
    """What the model's authors planned, if the plan is about this model.

    transformers gives a plan to every model, also where its paths do not exist (GPT-2, T5), and to parts of a model
    only. So one counts if its repeated entries (with ``*``) match and no block of a no-split class is left out. Entries
    that shall stay gathered (``keep_full_weight``: the final norm) are left in the root, which stays gathered anyway:
    as a unit each would cost one more gather for a few kilobytes. The head is a unit, see ``embeddings_and_heads``.
    """
    blocks: dict[nn.Module, None] = {}
    others: dict[nn.Module, None] = {}
    entries: dict[str, None] = {}
    inside: set[nn.Module] = set()
    for owner in model.modules():
        plan = getattr(owner, "fsdp_plan", None)
        if owner in inside or not isinstance(plan, dict):
            continue
        repeated = {entry: _matches(owner, entry) for entry in plan if "*" in entry.split(".")}
        if not any(repeated.values()):
            continue
        inside.update(owner.modules())
        entries.update((entry, None) for entry, found in repeated.items() if found)
        blocks.update((m, None) for found in repeated.values() for m in found)
        freed = [e for e, style in plan.items() if e not in repeated and style != "keep_full_weight"]
        others.update((m, None) for entry in freed for m in _matches(owner, entry))
    covered = {m for block in blocks for m in block.modules()}
    declared, _ = _no_split_modules(model)
    if not blocks or any(m not in covered and not covered.intersection(m.modules()) for m in declared):
        return None
    ends = [*others, *embeddings_and_heads(model)]
    return Choice(list(blocks), ends, f"the model's FSDP plan ({', '.join(entries)})")


def _matches(owner: nn.Module, entry: str) -> list[nn.Module]:
    try:
        return modules_of_patterns(owner, [entry], "")
    except ConfigError:
        return []


def _by_no_split_classes(model: nn.Module) -> Choice | None:
    blocks, others = _no_split_modules(model)
    if not blocks:
        return None
    names = ", ".join(sorted({type(block).__name__ for block in blocks}))
    return Choice(blocks, [*others, *embeddings_and_heads(model)], f"the model's no-split classes ({names})")


def _no_split_modules(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Instances of no-split classes: those in lists (blocks), and single ones (BERT declares its embeddings)."""
    declared = {c for m in model.modules() for c in (getattr(m, "_no_split_modules", None) or ())}
    found = [m for m in model.modules() if type(m).__name__ in declared and can_be_unit(m)]
    members = {child for m in model.modules() if isinstance(m, _LISTS) for child in m.children()}
    blocks = [m for m in found if m in members]
    return (blocks, [m for m in found if m not in members]) if blocks else (found, [])


def _by_lists(model: nn.Module) -> Choice | None:
    """Members of module lists, and of Sequentials and ModuleDicts whose members are all of one class; outermost."""
    lists: list[list[nn.Module]] = []

    def visit(module: nn.Module) -> None:
        holding = [child for child in module.children() if any(True for _ in child.parameters())]
        alike = len({type(child) for child in module.children()}) == 1
        is_list = isinstance(module, nn.ModuleList) or (isinstance(module, _LISTS) and alike)
        if is_list and len(holding) > 1 and all(can_be_unit(child) for child in holding):
            lists.append(holding)
            return
        for child in holding:
            visit(child)

    visit(model)
    sizes = [sum(p.numel() for child in members for p in child.parameters()) for members in lists]
    blocks = [
        child
        for members, size in zip(lists, sizes, strict=True)
        if size >= _SMALL_LIST * max(sizes)
        for child in members
    ]
    if not blocks:
        return None
    names = ", ".join(sorted({type(block).__name__ for block in blocks}))
    inside = {inner for block in blocks for inner in block.modules()}
    large = [m for m in modules_of_size(model, _UNIT_SIZE) if m not in inside and inside.isdisjoint(m.modules())]
    return Choice(blocks, [*large, *embeddings_and_heads(model)], f"the model's module lists ({names})")
