"""Which modules become FSDP units, as a plan made before anything is sharded, and its audit.

A unit is gathered, used and freed as a whole, so units decide both peak memory and overlap. The plan is the same
for both engines; after wrapping the units are read back from the live model and compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lit_fsdp.config.sharding import WrapConfig
from lit_fsdp.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: a module and the parameters it alone gathers."""

    name: str
    """Path of the module inside the LightningModule; empty for the root."""
    class_name: str
    num_params: int
    """Parameters of this unit without those of units inside it; a tied weight counts once."""
    num_bytes: int
    """Bytes of these parameters in the storage dtype, before sharding."""
    tied: tuple[str, ...] = ()
    """Names under which a weight of this unit appears again."""
    is_block: bool = False
    """Whether activation checkpointing applies to it."""


@dataclass(frozen=True)
class UnitPlan:
    """All units of a model, inner ones before outer ones, the root last."""

    units: tuple[Unit, ...]
    source: str
    """What decided: the model's no-split classes, its module lists, class names, or a size."""
    num_params: int
    modules: dict[str, nn.Module] = field(repr=False, default_factory=dict)
    """The modules of all units but the root, by name."""

    @property
    def root_share(self) -> float:
        """Share of all parameters left in the root unit, 0 to 1."""
        return self.units[-1].num_params / max(1, self.num_params)

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules to which activation checkpointing applies."""
        return [self.modules[unit.name] for unit in self.units if unit.is_block]


def plan_units(model: nn.Module, wrap: WrapConfig, path: str = "wrap") -> UnitPlan:
    """The FSDP units of a model, by class name, by size, or found from the model itself.

    Works on meta tensors; ``model`` is not changed. A module that holds a weight which is also used outside of it
    is never a unit of its own: tied weights stay in the unit that encloses all their users.

    Args:
        model: The LightningModule (or any module) about to be sharded.
        wrap: The recipe's choice.
        path: Where the choice stands in the recipe, for errors.

    Raises:
        ConfigError: A class that matches no module (the existing ones are listed), nothing to wrap, or more than
            ``max_root_share`` of the parameters left in the root.
    """
    names = {module: name for name, module in model.named_modules()}
    if wrap.classes is not None:
        blocks, source = _by_class(model, wrap.classes, f"{path}.classes"), f"classes {', '.join(wrap.classes)}"
    elif wrap.min_num_params is not None:
        blocks, source = _by_size(model, int(wrap.min_num_params)), f"min_num_params {int(wrap.min_num_params)}"
    else:
        blocks, source = _from_model(model, path)
    ends = _untied_ends(model) if wrap.classes is None and wrap.min_num_params is None else []
    chosen = [m for m in [*blocks, *ends] if m is not model and not _shares_outside(model, m)]
    # By position and not with list.index: torchmetrics make == of a module true for everything.
    position = {module: i for i, module in enumerate(names)}
    chosen = sorted(set(chosen), key=lambda m: (-names[m].count("."), position[m]))
    plan = _count(model, chosen, set(blocks), names, source)
    if plan.root_share > wrap.max_root_share:
        largest = max(
            (n for n, _ in model.named_parameters()), key=lambda n: model.get_parameter(n).numel(), default=""
        )
        raise ConfigError(
            path,
            f"units by {source} leave {plan.root_share:.0%} of {plan.num_params:,} parameters in the root unit "
            f"(largest: {largest})",
            f"at most {wrap.max_root_share:.0%} (max_root_share); classes in this model: {_class_list(model)}",
            f"name the block classes, or set {path}: {{max_root_share: 1.0}} to allow it",
        )
    return plan


def audit(plan: UnitPlan, shard_degree: int, checkpointed: set[str]) -> dict[str, Any]:
    """The plan as plain data for ``audit.json`` and the table: one row per unit and the totals."""
    rows = [
        {
            "name": unit.name or "(root)",
            "class": unit.class_name,
            "num_params": unit.num_params,
            "num_bytes": unit.num_bytes,
            "share": unit.num_params / max(1, plan.num_params),
            "tied": list(unit.tied),
            "activation_checkpointing": unit.name in checkpointed,
        }
        for unit in plan.units
    ]
    return {
        "wrapped_by": plan.source,
        "num_params": plan.num_params,
        "num_units": len(rows),
        "root_share": plan.root_share,
        "shard_degree": shard_degree,
        "units": rows,
    }


def _from_model(model: nn.Module, path: str) -> tuple[list[nn.Module], str]:
    """Blocks as the model declares them (transformers' no-split classes), else the members of its module lists."""
    declared = {c for m in model.modules() for c in (getattr(m, "_no_split_modules", None) or ())}
    blocks = [m for m in model.modules() if type(m).__name__ in declared]
    if blocks:
        return blocks, f"the model's no-split classes ({', '.join(sorted({type(b).__name__ for b in blocks}))})"
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    blocks = [child for one in lists for child in one if any(True for _ in child.parameters())]
    if blocks:
        return blocks, f"the model's module lists ({', '.join(sorted({type(b).__name__ for b in blocks}))})"
    if sum(p.numel() for p in model.parameters()) == 0:
        raise ConfigError(path, "a model without parameters", "a model with parameters", "build the model first")
    raise ConfigError(
        path,
        "auto, but the model declares no blocks and has no module lists",
        f"class names out of: {_class_list(model)}; or {{min_num_params: N}}",
        f"set {path}: {{min_num_params: 1.0e6}}, or {path}: {{classes: [...]}}",
    )


def _by_class(model: nn.Module, classes: list[str], path: str) -> list[nn.Module]:
    present = {type(m).__name__ for m in model.modules()}
    for name in classes:
        if name not in present:
            raise ConfigError(
                path,
                f"{name!r}, which matches no module",
                f"classes in this model: {_class_list(model)}",
                "name one of these, or set wrap: auto",
            )
    return [m for m in model.modules() if type(m).__name__ in classes]


def _by_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Modules grouped bottom-up: one becomes a unit as soon as its not yet grouped parameters reach the size."""
    grouped: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        free = sum(p.numel() for p in module.parameters(recurse=False)) + sum(visit(c) for c in module.children())
        has_forward = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if free >= min_num_params and has_forward and module is not model:
            grouped.append(module)
            return 0
        return free

    visit(model)
    return grouped


def _untied_ends(model: nn.Module) -> list[nn.Module]:
    """Input embedding and output head as units of their own; tied ones are ruled out by the caller."""
    ends: list[nn.Module] = []
    for module in model.modules():
        if not hasattr(module, "_no_split_modules") or not hasattr(module, "get_input_embeddings"):
            continue
        owner: Any = module
        found = [owner.get_input_embeddings(), owner.get_output_embeddings()]
        return [m for m in found if isinstance(m, nn.Module)]
    return ends


def _shares_outside(model: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of ``module`` is also used by a module that is not inside it."""
    inside = set(module.modules())
    own = {id(p) for p in module.parameters()}
    return any(id(p) in own for m in model.modules() if m not in inside for p in m.parameters(recurse=False))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter, mapped to its first name."""
    first: dict[int, str] = {}
    again: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            again[name] = first[id(param)]
    return again


def _count(
    model: nn.Module, chosen: list[nn.Module], blocks: set[nn.Module], names: dict[nn.Module, str], source: str
) -> UnitPlan:
    seen: set[int] = set()
    ties = tied_names(model)
    units: list[Unit] = []
    for module in [*chosen, model]:
        own = {n: p for n, p in module.named_parameters() if id(p) not in seen}
        seen.update(id(p) for p in own.values())
        prefix = f"{names[module]}." if names[module] else ""
        aliases = tuple(again for again, first in ties.items() if first.removeprefix(prefix) in own)
        units.append(
            Unit(
                name=names[module],
                class_name=type(module).__name__,
                num_params=sum(p.numel() for p in own.values()),
                num_bytes=sum(p.numel() * p.element_size() for p in own.values()),
                tied=aliases,
                is_block=module in blocks and module is not model,
            )
        )
    total = sum(p.numel() for p in model.parameters())
    return UnitPlan(tuple(units), source, total, {names[m]: m for m in chosen})


def _class_list(model: nn.Module) -> str:
    modules = [m for m in model.modules() if m is not model and not isinstance(m, nn.ModuleList)]
    return ", ".join(sorted({type(m).__name__ for m in modules if any(True for _ in m.parameters())}))
