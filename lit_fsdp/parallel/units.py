"""Which modules become FSDP units, as a plan made before anything is sharded, and its audit.

A unit is gathered, used and freed as a whole, so units decide both peak memory and overlap. The plan is the same
for both engines; after wrapping the units are read back from the live model and compared with it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lit_fsdp.config.strategy import WrapConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.find_units import Choice, embeddings_and_heads, find_units
from lit_fsdp.parallel.live_units import class_name, clean_name, read_live_units
from lit_fsdp.parallel.wrap_choice import (
    can_be_unit,
    class_list,
    expert_modules,
    modules_of_classes,
    modules_of_patterns,
    modules_of_size,
)

_LARGE_ROOT = 10_000_000
"""Parameters that are too many to be left in the root by a choice that nobody made by name."""


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: a module and the parameters it alone gathers."""

    name: str
    """Path of the module inside the LightningModule; empty for the root."""
    class_name: str
    num_params: int
    """Parameters of this unit without those of units inside it, frozen ones too; a tied weight counts once."""
    num_bytes: int
    """Bytes of these parameters in the storage dtype, before sharding."""
    num_trainable: int = 0
    """Those of the parameters that are not frozen."""
    tied: tuple[str, ...] = ()
    """Names under which a weight of this unit appears again."""
    is_block: bool = False
    """Whether activation checkpointing applies to it."""
    keeps_fp32: bool = False
    """Whether it is gathered in fp32 whatever the precision mode says."""


@dataclass(frozen=True)
class UnitPlan:
    """All units of a model, inner ones before outer ones, the root last."""

    units: tuple[Unit, ...]
    source: str
    """What decided: the model's FSDP plan, no-split classes or module lists; classes, patterns, a size; manual."""
    num_params: int
    modules: dict[str, nn.Module] = field(repr=False, default_factory=dict)
    """The modules of all units but the root, by name."""
    kept_together: tuple[str, ...] = ()
    """Chosen modules that are no units: a weight of theirs is used outside too and stays in the enclosing unit."""
    blocks: tuple[nn.Module, ...] = ()
    """The modules that are recomputed and compiled; none is inside another, and units may be inside or around them."""

    @property
    def root_share(self) -> float:
        """Share of all parameters, frozen ones too (they are gathered alike), left in the root unit, 0 to 1."""
        return self.units[-1].num_params / max(1, self.num_params)


def plan_units(model: nn.Module, wrap: WrapConfig, path: str = "wrap") -> UnitPlan:
    """The FSDP units of a model: found from the model itself, named, by size, or read back where it wrapped itself.

    Works on meta tensors; ``model`` is not changed. A module that holds a weight which is also used outside of it
    is never a unit of its own: tied weights stay in the unit that encloses all their users.

    Args:
        model: The LightningModule (or any module) about to be sharded.
        wrap: The recipe's choice.
        path: Where the choice stands in the recipe, for errors.

    Raises:
        ConfigError: A class or pattern that matches no module (what exists is listed), experts or wrapped modules
            that are not there, nothing to wrap, or more than ``max_root_share`` of the parameters left in the root.
    """
    if wrap.manual:
        live = read_live_units(model, path)
        blocks = _outermost(model, live.modules.values(), embeddings_and_heads(model))
        plan = _count(model, live.modules.values(), blocks, "manual", live.num_elements)
    else:
        choice = _choose(model, wrap, path)
        chosen = dict.fromkeys([*choice.others, *choice.blocks, *_manual_parts(model)])
        chosen.pop(model, None)
        shares = _shares_outside(model, [*chosen, *choice.recomputed])
        blocks = _outermost(model, [m for m in choice.recomputed if not shares[m]], embeddings_and_heads(model))
        plan = _count(model, [m for m in chosen if not shares[m]], blocks, choice.source, {})
        kept = tuple(name for name, module in model.named_modules() if shares.get(module, False))
        plan = dataclasses.replace(plan, kept_together=kept)
    inner = {id(p) for m in plan.modules.values() for p in m.parameters()}
    kept_together = {p for name in plan.kept_together for p in model.get_submodule(name).parameters()}
    num_tied = sum(p.numel() for p in kept_together if id(p) not in inner)
    left, total = plan.units[-1].num_params - num_tied, plan.num_params - num_tied
    is_named = wrap.manual or wrap.classes or wrap.patterns or wrap.max_root_share is not None
    limit = 0.5 if wrap.max_root_share is None else wrap.max_root_share
    if left > limit * total and (is_named or left >= _LARGE_ROOT):
        sizes = {n: p.numel() for n, p in model.named_parameters() if id(p) not in inner and p not in kept_together}
        raise ConfigError(
            path,
            f"units by {plan.source} leave {left / total:.0%} of {total:,} parameters in the root unit "
            f"(largest: {max(sizes, key=lambda name: sizes[name])})",
            f"at most {limit:.0%} (max_root_share); classes in this model: {class_list(model)}",
            f"name the block classes, or set {path}: {{max_root_share: 1.0}} to allow it",
        )
    return plan


def audit(plan: UnitPlan, shard_degree: int, recompute: Mapping[str, str]) -> dict[str, Any]:
    """The plan as plain data for ``audit.json`` and the table: one row per unit and the totals."""
    rows = [
        {
            "name": unit.name or "(root)",
            "class": unit.class_name,
            "num_params": unit.num_params,
            "num_trainable": unit.num_trainable,
            "num_bytes": unit.num_bytes,
            "share": unit.num_params / max(1, plan.num_params),
            "tied": list(unit.tied),
            "recompute": recompute.get(unit.name, "no"),
        }
        for unit in plan.units
    ]
    return {
        "wrapped_by": plan.source,
        "num_params": plan.num_params,
        "num_trainable": sum(unit.num_trainable for unit in plan.units),
        "num_units": len(rows),
        "root_share": plan.root_share,
        "kept_together_by_tied_weights": list(plan.kept_together),
        "shard_degree": shard_degree,
        "units": rows,
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter, mapped to its first name."""
    first: dict[int, str] = {}
    again: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            again[name] = first[id(param)]
    return again


def owners_by_unit(model: nn.Module, plan: UnitPlan) -> dict[nn.Module, list[tuple[str, nn.Module]]]:
    """For each unit, ``model`` as the root among them, the modules by name whose own parameters it gathers."""
    units = set(plan.modules.values())
    found: dict[nn.Module, list[tuple[str, nn.Module]]] = {}
    unit_of: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():  # parents first
        unit = module if module is model or module in units else unit_of[module]
        unit_of.update((child, unit) for child in module.children() if child not in unit_of)
        if any(p is not None for p in module._parameters.values()):
            found.setdefault(unit, []).append((clean_name(name), module))
    return found


def _choose(model: nn.Module, wrap: WrapConfig, path: str) -> Choice:
    blocks: list[nn.Module] = []
    others: list[nn.Module] = []
    sources: list[str] = []
    if wrap.classes is not None:
        blocks += modules_of_classes(model, wrap.classes, f"{path}.classes")
        sources.append(f"classes {', '.join(wrap.classes)}")
    if wrap.patterns is not None:
        blocks += modules_of_patterns(model, wrap.patterns, f"{path}.patterns")
        sources.append(f"patterns {', '.join(wrap.patterns)}")
    if wrap.min_num_params is not None:
        blocks += modules_of_size(model, int(wrap.min_num_params))
        sources.append(f"min_num_params {int(wrap.min_num_params)}")
    if not sources:
        found = find_units(model, path)
        blocks, others, sources = list(found.blocks), list(found.others), [found.source]
    elif wrap.embedding_and_head or (wrap.embedding_and_head is None and wrap.min_num_params is None):
        others += embeddings_and_heads(model)
    if wrap.embedding_and_head is False:
        ends = embeddings_and_heads(model)
        others = [m for m in others if not any(m is end for end in ends)]
    if wrap.experts:
        others += expert_modules(model, f"{path}.experts")
        sources.append("experts")
    return Choice(blocks, others, ", ".join(sources), _recomputed(model, wrap, blocks))


def _recomputed(model: nn.Module, wrap: WrapConfig, named: list[nn.Module]) -> list[nn.Module]:
    """The blocks of the model itself, however large its units are, and what else was named outside of these."""
    found = find_units(model, "").blocks
    if found and wrap.min_num_params is not None:
        return found
    inside, blocks = {m for block in found for m in block.modules()}, set(found)
    apart = [m for m in named if m not in inside and not blocks.intersection(m.modules())]
    return [*found, *apart]


def _shares_outside(model: nn.Module, candidates: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    """Whether a parameter of a candidate is also used by a module that is not inside it."""

    def uses(module: nn.Module) -> Counter[int]:
        return Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)

    everywhere = uses(model)
    return {m: any(everywhere[key] > count for key, count in uses(m).items()) for m in candidates}


def _count(
    model: nn.Module,
    chosen: Iterable[nn.Module],
    blocks: list[nn.Module],
    source: str,
    num_elements: Mapping[int, int],
) -> UnitPlan:
    """The plan for modules that are chosen, and the blocks among, inside or around them."""
    # By position and not with list.index: torchmetrics make == of a module true for everything.
    names = {module: (clean_name(name), i) for i, (name, module) in enumerate(model.named_modules())}
    ordered = sorted(chosen, key=lambda m: (-names[m][0].count("."), names[m][1]))
    is_block = set(blocks)
    ties: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(param), []).append(clean_name(name))
    seen: set[int] = set()
    units: list[Unit] = []
    for module in [*ordered, model]:
        own = [(p, num_elements.get(id(p), p.numel())) for p in module.parameters() if id(p) not in seen]
        seen.update(id(p) for p, _ in own)
        units.append(
            Unit(
                name=names[module][0],
                class_name=class_name(module),
                num_params=sum(n for _, n in own),
                num_bytes=sum(n * p.element_size() for p, n in own),
                num_trainable=sum(n for p, n in own if p.requires_grad),
                tied=tuple(name for p, _ in own for name in ties[id(p)][1:]),
                is_block=module in is_block,
            )
        )
    total = sum(unit.num_params for unit in units)
    return UnitPlan(tuple(units), source, total, {names[m][0]: m for m in ordered}, blocks=tuple(blocks))


def _outermost(model: nn.Module, modules: Iterable[nn.Module], ends: list[nn.Module]) -> list[nn.Module]:
    """Those not inside another, in the model's order: recomputing one inside another would run it three times.

    Embedding and head never.
    """
    wanted = set(modules) - {model}
    inside = {inner for m in wanted for inner in m.modules() if inner is not m}
    return [m for m in model.modules() if m in wanted and m not in inside and not any(m is end for end in ends)]


def _manual_parts(model: nn.Module) -> list[nn.Module]:
    """The parts of a LightningModule that optimizes manually: each gathers its weights anew after every backward pass.

    What is left in the root is gathered once per ``training_step``, so a second pass there would find nothing.
    """
    if getattr(model, "automatic_optimization", True):
        return []
    parts = [child for child in model.children() if any(True for _ in child.parameters())]
    return [
        inner for part in parts for inner in ([part] if can_be_unit(part) else part.children()) if can_be_unit(inner)
    ]
