"""Which modules become FSDP units, as a plan made before anything is sharded, and its audit.

The plan is the same for both engines; after wrapping the units are read back from the live model and compared with it.
Everything works on meta tensors and changes nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm

from lit_fsdp.config.strategy import StrategyConfig, WrapConfig
from lit_fsdp.errors import ConfigError, require

_LARGE_ROOT = 10_000_000
"""Parameters that are too many to be left in the root by a choice that nobody made by name."""
_SMALL_LIST = 0.1
"""A list that holds less than this share of what the largest one holds is not worth a gather per member."""
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_WRAPPER = "_fsdp_wrapped_module"
_NO_MATCH = "which matches no module with parameters and a forward"
# Their forward reads the weights of modules inside them without calling these, so that no hook would gather them.
_READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


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
    quantization_bytes: int = 0
    """Beside them, of what turns 4-bit weights back into weights, which every rank keeps whole."""
    num_trainable: int = 0
    """Those of the parameters that are not frozen."""
    tied: tuple[str, ...] = ()
    """Names under which a weight of this unit appears again."""
    keeps_fp32: bool = False
    """Whether it is gathered in fp32 whatever the precision mode says."""


@dataclass(frozen=True)
class UnitPlan:
    """All units of a model, inner ones before outer ones, the root last."""

    units: tuple[Unit, ...]
    source: str
    """What decided: the model's no-split classes or module lists; classes, patterns, a size; manual."""
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


def plan_for(module: nn.Module, config: StrategyConfig, path: str) -> UnitPlan:
    """The units that the factory's arguments give this module.

    Raises:
        ConfigError: As :func:`plan_units`; units inside blocks that are to be compiled, whose hooks break the graph.
    """
    wrap = config.wrap_config
    if not config.is_sharded:  # units only say what is recomputed and compiled
        wrap = dataclasses.replace(wrap, max_root_share=1.0)
    row = config.precision_config.row
    mixes = config.is_sharded and not wrap.manual and row.compute != row.param
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.affine] if mixes else []
    plan = plan_units(module, wrap, f"{path}.wrap", norms)
    if config.compile and config.is_sharded:
        inside = {inner for block in plan.blocks for inner in block.modules() if inner is not block}
        names = [unit.name for unit in plan.units if plan.modules.get(unit.name) in inside and not unit.keeps_fp32]
        given = f"true with {len(names)} FSDP units inside blocks ({', '.join(names[:1])}, …), made by {plan.source}"
        fix = "drop compile, or set wrap: auto"
        require(not names, f"{path}.compile", given, "blocks without units inside", fix)
    return plan


def plan_units(model: nn.Module, wrap: WrapConfig, path: str = "wrap", fp32: Collection[nn.Module] = ()) -> UnitPlan:
    """The FSDP units of a model: found from the model itself, named, by size, or read back where it wrapped itself.

    A module that holds a weight which is also used outside of it is never a unit of its own: tied weights stay in the
    unit that encloses all their users. ``fp32`` become units of their own, gathered in fp32.

    Raises:
        ConfigError: A class or pattern that matches no module (what exists is listed), wrapped modules that are not
            there, or more than ``max_root_share`` of the parameters left in the root.
    """
    ends = _embeddings_and_heads(model)
    if wrap.manual:
        live = list(units_already_wrapped(model).values())
        fix = "wrap the blocks in configure_model, by fully_shard (fsdp2) or FullyShardedDataParallel (fsdp1)"
        require(live, path, "manual, but nothing in the model is wrapped", "a module that wraps its parts", fix)
        plan = _count(model, live, _outermost(model, live, ends), "manual", ())
    else:
        chosen, recomputed, source = _choose(model, wrap, ends, path)
        chosen = [m for m in dict.fromkeys([*chosen, *_manual_parts(model), *fp32]) if m is not model]
        shares = _shares_outside(model, [*chosen, *recomputed])
        blocks = _outermost(model, [m for m in recomputed if not shares[m]], ends)
        plan = _count(model, [m for m in chosen if not shares[m]], blocks, source, fp32)
        kept = tuple(name for name, module in model.named_modules() if shares.get(module, False))
        plan = dataclasses.replace(plan, kept_together=kept)
    _check_root(model, plan, wrap, path)
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
        | ({"quantization_bytes": unit.quantization_bytes} if unit.quantization_bytes else {})
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


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The 4-bit layers of bitsandbytes by name: their ``weight`` holds packed weights, in whatever dtype."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "quant_state")}


def packed_weights(model: nn.Module) -> dict[int, int]:
    """How many weights one number of a packed parameter stands for, by ``id``."""
    return {id(layer.weight): layer.weight.element_size() * 2 for layer in quantized_layers(model).values()}


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


def last_unit(plan: UnitPlan, model: nn.Module) -> Any:
    """The unit that is called last, as far as the module tree tells; ``None`` without units.

    The backward pass needs it at once, so it stays gathered, as torchtitan and Accelerate keep it.
    """
    units = set(plan.modules.values())
    inside = {inner for unit in units for inner in unit.modules() if inner is not unit}
    return next((m for m in reversed(list(model.modules())) if m in units and m not in inside), None)


def _count(
    model: nn.Module,
    chosen: Iterable[nn.Module],
    blocks: list[nn.Module],
    source: str,
    fp32: Collection[nn.Module],
) -> UnitPlan:
    # By position and not with list.index: torchmetrics make == of a module true for everything.
    names = {module: (clean_name(name), i) for i, (name, module) in enumerate(model.named_modules())}
    ordered = sorted(chosen, key=lambda m: (-names[m][0].count("."), names[m][1]))
    whole, packed = unsharded_numels(model), packed_weights(model)
    scales = {id(layer.weight): getattr(layer, "quantization_bytes", 0) for layer in quantized_layers(model).values()}
    ties: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(param), []).append(clean_name(name))
    seen: set[int] = set()
    units: list[Unit] = []
    for module in [*ordered, model]:
        own = [(p, whole.get(id(p), p.numel())) for p in module.parameters() if id(p) not in seen]
        seen.update(id(p) for p, _ in own)
        units.append(
            Unit(
                name=names[module][0],
                class_name=(type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)).__name__,
                num_params=sum(n * packed.get(id(p), 1) for p, n in own),
                num_bytes=sum(n * p.element_size() for p, n in own),
                quantization_bytes=sum(scales.get(id(p), 0) for p, _ in own),
                num_trainable=sum(n for p, n in own if p.requires_grad),
                tied=tuple(name for p, _ in own for name in ties[id(p)][1:]),
                keeps_fp32=module in fp32,
            )
        )
    total = sum(unit.num_params for unit in units)
    return UnitPlan(tuple(units), source, total, {names[m][0]: m for m in ordered}, blocks=tuple(blocks))


def _check_root(model: nn.Module, plan: UnitPlan, wrap: WrapConfig, path: str) -> None:
    """Refuse a plan that leaves too much in the root; what is tied has to stay there and does not count."""
    inner = {id(p) for m in plan.modules.values() for p in m.parameters()}
    tied = {id(p) for name in plan.kept_together for p in model.get_submodule(name).parameters()}
    sizes = {n: p.numel() for n, p in model.named_parameters() if id(p) not in inner}
    num_tied = sum(p.numel() for p in model.parameters() if id(p) in tied - inner)
    left, total = plan.units[-1].num_params - num_tied, plan.num_params - num_tied
    is_named = wrap.manual or wrap.classes or wrap.patterns or wrap.max_root_share is not None
    limit = 0.5 if wrap.max_root_share is None else wrap.max_root_share
    if left > limit * total and (is_named or left >= _LARGE_ROOT):
        given = f"units by {plan.source} leave {left / total:.0%} of {total:,} parameters in the root unit "
        given += f"(largest: {max(sizes, key=lambda name: sizes[name])})"
        allowed = f"at most {limit:.0%} (max_root_share); classes in this model: {_class_list(model)}"
        fix = f"name the block classes, set {path}: {{min_num_params: 1.0e6}}, or {{max_root_share: 1.0}} to allow it"
        raise ConfigError(path, given, allowed, fix)


def _shares_outside(model: nn.Module, candidates: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    """Whether a parameter of a candidate is also used by a module that is not inside it."""

    def uses(module: nn.Module) -> Counter[int]:
        return Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)

    everywhere = uses(model)
    return {m: any(everywhere[key] > count for key, count in uses(m).items()) for m in candidates}


def _outermost(model: nn.Module, modules: Iterable[nn.Module], ends: list[nn.Module]) -> list[nn.Module]:
    """Those not inside another, in the model's order: recomputing one inside another would run it three times.

    Embedding and head never.
    """
    wanted = set(modules) - {model, *ends}
    inside = {inner for m in wanted for inner in m.modules() if inner is not m}
    return [m for m in model.modules() if m in wanted and m not in inside]


# -- what the recipe chooses


def _choose(
    model: nn.Module, wrap: WrapConfig, ends: list[nn.Module], path: str
) -> tuple[list[nn.Module], list[nn.Module], str]:
    """Modules that shall be units, those that shall be recomputed, and who said so."""
    found, others, own_source = _find_units(model)
    named: list[nn.Module] = []
    sources: list[str] = []
    if wrap.classes is not None:
        named += _of_classes(model, wrap.classes, f"{path}.classes")
        sources.append(f"classes {', '.join(wrap.classes)}")
    if wrap.patterns is not None:
        named += _of_patterns(model, wrap.patterns, f"{path}.patterns")
        sources.append(f"patterns {', '.join(wrap.patterns)}")
    if wrap.min_num_params is not None:
        named += _of_size(model, int(wrap.min_num_params))
        sources.append(f"min_num_params {int(wrap.min_num_params)}")
    # the blocks of the model itself, however large its units are, and what else was named outside of these
    inside, recomputed = {m for block in found for m in block.modules()}, list(found)
    if not found or wrap.min_num_params is None:
        recomputed += [m for m in named if m not in inside and not set(found).intersection(m.modules())]
    chosen = [*named, *([] if sources else [*found, *others])]
    has_ends = wrap.min_num_params is None if wrap.embedding_and_head is None else wrap.embedding_and_head
    chosen = [*(m for m in chosen if m not in set(ends)), *(ends if has_ends else set(ends).intersection(named))]
    return chosen, recomputed, ", ".join(sources) or own_source


def _manual_parts(model: nn.Module) -> list[nn.Module]:
    """The parts of a LightningModule that optimizes manually: each gathers its weights anew after every backward pass.

    What is left in the root is gathered once per ``training_step``, so a second pass there would find nothing.
    """
    if getattr(model, "automatic_optimization", True):
        return []
    parts = [inner for part in model.children() for inner in ([part] if _can_be_unit(part) else part.children())]
    return [part for part in parts if _can_be_unit(part)]


def _can_be_unit(module: nn.Module) -> bool:
    """Whether the module holds parameters and is called: hooks on a list's ``forward`` would never run."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.parameters())


def _class_list(model: nn.Module) -> str:
    return ", ".join(sorted({type(m).__name__ for m in model.modules() if m is not model and _can_be_unit(m)}))


def _of_classes(model: nn.Module, classes: Iterable[str], path: str) -> list[nn.Module]:
    allowed = f"classes in this model: {_class_list(model)}"
    found: list[nn.Module] = []
    for name in classes:
        matches = [m for m in model.modules() if type(m).__name__ == name and _can_be_unit(m)]
        require(matches, path, f"{name!r}, {_NO_MATCH}", allowed, "name one of these, or set wrap: auto")
        found += matches
    return found


def _of_patterns(model: nn.Module, patterns: Iterable[str], path: str) -> list[nn.Module]:
    """Every module at one of these paths, in which ``*`` stands for one part.

    A path starts at ``model`` (the LightningModule) or, where nothing is found from there, at a transformers model
    inside it: ``model.layers.*.mlp`` finds the LightningModule's ``model.model.layers.0.mlp``.
    """
    found: list[nn.Module] = []
    for pattern in patterns:
        starts = [model, *_transformers_models(model)]
        matches = next((matches for start in starts if (matches := _at(start, pattern))), [])
        if not matches and pattern.endswith(".*"):  # transformers packs experts into weights of the module above
            matches = [m for start in starts for m in _at(start, pattern[:-2]) if m._parameters]
        names = (name for name, m in model.named_modules() if name and _can_be_unit(m))
        known = dict.fromkeys(re.sub(r"\.\d+", ".*", name) for name in names)
        allowed = f"paths in this model: {', '.join(known)}"
        require(matches, path, f"{pattern!r}, {_NO_MATCH}", allowed, "mend the path; * stands for exactly one part")
        found += matches
    return found


def _at(start: nn.Module, pattern: str) -> list[nn.Module]:
    wanted, found = pattern.split("."), []
    for name, module in start.named_modules():
        parts = name.split(".")
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)) and _can_be_unit(module):
            found.append(module)
    return found


def _of_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Modules grouped bottom-up: one becomes a unit as soon as its not yet grouped parameters reach the size."""
    grouped: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        if isinstance(module, _READS_ITS_CHILDREN):
            free = sum(p.numel() for p in module.parameters())
        else:
            free = sum(p.numel() for p in module.parameters(recurse=False)) + sum(visit(c) for c in module.children())
        if free >= min_num_params and module is not model and _can_be_unit(module):
            grouped.append(module)
            return 0
        return free

    visit(model)
    return grouped


# -- what the model shows


def _find_units(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module], str]:
    """The repeated blocks a model declares as no-split, or shows by its module lists, single others, and the source."""
    declared, single = _no_split_modules(model)
    if declared:
        return declared, single, f"the model's no-split classes ({_classes(declared)})"
    if members := _members_of_lists(model):
        return members, [], f"the model's module lists ({_classes(members)})"
    return [], [], "nothing that repeats"


def _embeddings_and_heads(model: nn.Module) -> list[nn.Module]:
    """Input embedding and output head of every transformers model in ``model``, tied or not."""
    ends: dict[nn.Module, None] = {}
    for owner in _transformers_models(model):
        for get in (owner.get_input_embeddings, getattr(owner, "get_output_embeddings", None)):
            try:
                end = get() if callable(get) else None
            except NotImplementedError:  # e.g. a vision tower
                continue
            if isinstance(end, nn.Module) and _can_be_unit(end):
                ends[end] = None
    return list(ends)


def _transformers_models(model: nn.Module) -> list[Any]:
    """The transformers models at or inside ``model``, outer ones first."""
    return [m for m in model.modules() if hasattr(m, "_no_split_modules") and hasattr(m, "get_input_embeddings")]


def _classes(modules: Iterable[nn.Module]) -> str:
    return ", ".join(sorted({type(m).__name__ for m in modules}))


def _no_split_modules(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Instances of no-split classes: those in lists (blocks), and single ones (BERT declares its embeddings)."""
    declared = {c for m in model.modules() for c in (getattr(m, "_no_split_modules", None) or ())}
    found = [m for m in model.modules() if type(m).__name__ in declared and _can_be_unit(m)]
    members = {child for m in model.modules() if isinstance(m, _LISTS) for child in m.children()}
    blocks = [m for m in found if m in members]
    return (blocks, [m for m in found if m not in members]) if blocks else (found, [])


def _members_of_lists(model: nn.Module) -> list[nn.Module]:
    """Members of module lists, and of Sequentials and ModuleDicts whose members are all of one class; outermost."""
    lists: list[list[nn.Module]] = []

    def visit(module: nn.Module) -> None:
        holding = [child for child in module.children() if any(True for _ in child.parameters())]
        alike = len({type(child) for child in module.children()}) == 1
        is_list = isinstance(module, nn.ModuleList) or (isinstance(module, _LISTS) and alike)
        if is_list and len(holding) > 1 and all(_can_be_unit(child) for child in holding):
            lists.append(holding)
            return
        for child in holding:
            visit(child)

    visit(model)
    sizes = [sum(p.numel() for child in members for p in child.parameters()) for members in lists]
    return [m for members, size in zip(lists, sizes, strict=True) if size >= _SMALL_LIST * max(sizes) for m in members]


# -- units that are there already


def units_already_wrapped(module: nn.Module) -> dict[str, Any]:
    """The modules inside ``module`` that FSDP1 (without its wrapper) or FSDP2 wraps, by their first names."""
    return {
        clean_name(name): inner.module if isinstance(inner, FullyShardedDataParallel) else inner
        for name, inner in module.named_modules()
        if isinstance(inner, (FullyShardedDataParallel, FSDPModule)) and clean_name(name)
    }


def engines_already_there(module: nn.Module) -> set[str]:
    """``fsdp1`` and ``fsdp2``, as far as ``module`` or something in it is wrapped by them."""
    classes = {"fsdp1": FullyShardedDataParallel, "fsdp2": FSDPModule}
    return {engine for engine, cls in classes.items() if any(isinstance(m, cls) for m in module.modules())}


def clean_name(name: str) -> str:
    """A module's or a parameter's path without the wrappers that FSDP1 puts into it."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def unsharded_numels(module: nn.Module) -> dict[int, int]:
    """Elements of the whole parameter by ``id``, where FSDP1 leaves this rank a view of its part, or nothing."""
    flats = [m._handle.flat_param for m in module.modules() if isinstance(m, FullyShardedDataParallel) and m._handle]
    return {id(param): n for flat in flats for param, n in zip(flat._params or (), flat._numels, strict=False)}
