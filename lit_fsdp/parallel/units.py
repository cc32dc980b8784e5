"""Plan which modules become FSDP units, for both engines, on meta tensors before sharding."""

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm

from lit_fsdp.config.strategy import StrategyConfig, WrapConfig
from lit_fsdp.errors import require
from lit_fsdp.models.experts import grouped_experts, reads_inner_weights

_LARGE_ROOT = 10_000_000  # parameters: too many for the root unless units were chosen explicitly
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NO_MATCH = "which matches no module with parameters and a forward"
# Their forward reads weights of submodules without calling them, so that no hook would gather these weights.
_READS_ITS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: a module and the parameters that it gathers."""

    name: str  # path inside the LightningModule; empty for the root
    class_name: str
    num_params: int  # without those of inner units, with frozen parameters; a tied weight counts once
    num_bytes: int  # of these parameters in the storage dtype, before sharding
    quantization_bytes: int  # additional bytes of the scales of 4-bit weights, whole on every rank
    num_trainable: int
    tied: list[str]  # further names of tied weights of this unit
    keeps_fp32: bool  # gathered in fp32 in any precision mode


@dataclass(frozen=True)
class UnitPlan:
    """All units of a model, inner ones before outer ones, the root last."""

    units: tuple[Unit, ...]
    source: str  # description of what selected the units
    modules: dict[str, nn.Module]  # modules of all units except the root, by name
    blocks: tuple[nn.Module, ...]  # blocks to recompute and compile; units may be inside or around them
    kept_together: tuple[str, ...]  # modules that are not units because a weight of theirs is also used outside

    @property
    def num_params(self) -> int:
        """Parameters of the whole model; a tied weight counts once."""
        return sum(unit.num_params for unit in self.units)


def plan_for(module: nn.Module, config: StrategyConfig, path: str) -> UnitPlan:
    """Call :func:`plan_units` with the strategy's options; refuses units inside blocks that are to be compiled."""
    wrap = config.wrap_config
    if not config.is_sharded:  # units only determine what is recomputed and compiled
        wrap = dataclasses.replace(wrap, max_root_share=1.0)
    row = config.precision_config.row
    mixes = config.is_sharded and not wrap.manual and row.compute != row.param
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.affine] if mixes else []
    experts = grouped_experts(module).values() if config.expert_parallel > 1 else ()
    plan = plan_units(module, wrap, f"{path}.wrap", norms, experts)
    if config.compile and config.is_sharded:
        inside = {inner for block in plan.blocks for inner in block.modules() if inner is not block}
        names = [unit.name for unit in plan.units if plan.modules.get(unit.name) in inside and not unit.keeps_fp32]
        given = f"true with {len(names)} FSDP units inside blocks, such as {', '.join(names[:1])}"
        require(not names, f"{path}.compile", given, "false, or wrap: auto")
    return plan


def plan_units(
    model: nn.Module,
    wrap: WrapConfig,
    path: str = "wrap",
    fp32: Collection[nn.Module] = (),
    experts: Iterable[nn.Module] = (),
) -> UnitPlan:
    """Plan the FSDP units of a model: detected, by name, by size, or existing units if the model wrapped itself.

    Tied weights stay in the unit that contains all their users. The modules ``fp32``, gathered in fp32, and ``experts``
    become separate units.

    Raises:
        ConfigError: A name matches no module (existing names are listed), or the root has too many parameters.
    """
    ends = _embeddings_and_heads(model)
    if wrap.manual:
        chosen = recomputed = list(units_already_wrapped(model).values())
        require(chosen, path, "manual, but nothing in the model is wrapped", "units made in configure_model, or auto")
        source, shares = "manual", dict.fromkeys(chosen, False)
    else:
        chosen, recomputed, source = _choose(model, wrap, ends, path)
        chosen = [m for m in dict.fromkeys([*chosen, *_manual_parts(model), *fp32, *experts]) if m is not model]
        shares = _shares_outside(model, [*chosen, *recomputed])
    blocks = _outermost(model, [m for m in recomputed if not shares[m]], ends)
    names = {module: clean_name(name) for name, module in model.named_modules()}
    order = {module: (-name.count("."), place) for place, (module, name) in enumerate(names.items())}
    units = sorted((m for m in chosen if not shares[m]), key=lambda m: order[m])
    counted = _count(model, units, names, fp32)
    kept = tuple(name for module, name in names.items() if shares.get(module, False))
    plan = UnitPlan(counted, source, {names[m]: m for m in units}, blocks, kept)
    _check_root(model, plan, wrap, path)
    return plan


def audit(plan: UnitPlan, config: StrategyConfig, degrees: tuple[int, int], recompute: Mapping[str, str]) -> Any:
    """Convert the plan to plain data for ``audit.json`` and the table: one row per unit, the totals and the mesh.

    The pair ``degrees`` has the number of copies of the model and the ranks that share one.
    """
    total = max(1, plan.num_params)
    rows = []
    for unit in plan.units:
        row = dataclasses.asdict(unit)
        row |= {"name": unit.name or "(root)", "class": row.pop("class_name"), "share": unit.num_params / total}
        rows.append({**row, "recompute": recompute.get(unit.name, "no")})
    return {
        "wrapped_by": plan.source,
        "num_params": plan.num_params,
        "num_trainable": sum(unit.num_trainable for unit in plan.units),
        "num_units": len(rows),
        "root_share": plan.units[-1].num_params / total,
        "kept_together_by_tied_weights": list(plan.kept_together),
        "shard_degree": degrees[1],
        "units": rows,
        "engine": config.engine,
        "sharding": config.sharding,
        "replicate_degree": degrees[0],
        "context_parallel": config.context_config.degree,
        "expert_parallel": config.expert_parallel,
        "replaced": config.replaced,
    }


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The 4-bit layers of bitsandbytes by name; their ``weight`` stores packed weights, in any dtype."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "quant_state")}


def packed_weights(model: nn.Module) -> dict[int, int]:
    """Number of weights in one element of a packed parameter, by ``id``."""
    return {id(layer.weight): layer.weight.element_size() * 2 for layer in quantized_layers(model).values()}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map every further name of a tied parameter to its first name."""
    first: dict[int, str] = {}
    again: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            again[name] = first[id(param)]
    return again


def owners_by_unit(model: nn.Module, plan: UnitPlan) -> dict[nn.Module, list[tuple[str, nn.Module]]]:
    """For each unit, including ``model`` as the root, the modules by name whose own parameters it gathers."""
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
    """The unit that is called last or ``None``; it stays gathered, because the backward pass needs it immediately."""
    outer = _outermost(model, plan.modules.values(), [])
    return outer[-1] if outer else None


def _count(
    model: nn.Module, chosen: list[nn.Module], names: Mapping[nn.Module, str], fp32: Collection[nn.Module]
) -> tuple[Unit, ...]:
    whole, packed = unsharded_numels(model), packed_weights(model)
    scales = {id(layer.weight): getattr(layer, "quantization_bytes", 0) for layer in quantized_layers(model).values()}
    ties: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(param), []).append(clean_name(name))
    seen: set[int] = set()
    units: list[Unit] = []
    for module in [*chosen, model]:
        own = [(p, whole.get(id(p), p.numel())) for p in module.parameters() if id(p) not in seen]
        seen.update(id(p) for p, _ in own)
        units.append(
            Unit(
                name=names[module],
                class_name=(type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)).__name__,
                num_params=sum(n * packed.get(id(p), 1) for p, n in own),
                num_bytes=sum(n * p.element_size() for p, n in own),
                quantization_bytes=sum(scales.get(id(p), 0) for p, _ in own),
                num_trainable=sum(n for p, n in own if p.requires_grad),
                tied=[name for p, _ in own for name in ties[id(p)][1:]],
                keeps_fp32=module in fp32,
            )
        )
    return tuple(units)


def _check_root(model: nn.Module, plan: UnitPlan, wrap: WrapConfig, path: str) -> None:
    """Refuse a plan that leaves too many parameters in the root, not counting tied weights."""
    inner = {id(p) for m in plan.modules.values() for p in m.parameters()}
    tied = {id(p) for name in plan.kept_together for p in model.get_submodule(name).parameters()}
    num_tied = sum(p.numel() for p in model.parameters() if id(p) in tied - inner)
    left, total = plan.units[-1].num_params - num_tied, plan.num_params - num_tied
    is_named = wrap.manual or wrap.classes or wrap.patterns or wrap.max_root_share is not None
    limit = 0.5 if wrap.max_root_share is None else wrap.max_root_share
    fits = left <= limit * total or not (is_named or left >= _LARGE_ROOT)
    given = f"units by {plan.source}, which leave {left / max(1, total):.0%} of {total:,} parameters in the root unit"
    allowed = f"at most {limit:.0%} (max_root_share); classes in this model: {_classes(model.modules())}"
    require(fits, path, given, allowed, "name the block classes, or set max_root_share: 1.0 to allow it")


def _shares_outside(model: nn.Module, candidates: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    """Whether a parameter of a candidate is also used by a module that is not inside it."""

    def uses(module: nn.Module) -> Counter[int]:
        return Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)

    everywhere = uses(model)
    return {m: any(everywhere[key] > count for key, count in uses(m).items()) for m in candidates}


def _outermost(model: nn.Module, modules: Iterable[nn.Module], ends: list[nn.Module]) -> tuple[nn.Module, ...]:
    """Modules that are not inside another one, in the model's order, without ``ends`` (embedding and head)."""
    wanted = set(modules) - {model, *ends}
    inside = {inner for m in wanted for inner in m.modules() if inner is not m}
    return tuple(m for m in model.modules() if m in wanted and m not in inside)


def _choose(
    model: nn.Module, wrap: WrapConfig, ends: list[nn.Module], path: str
) -> tuple[list[nn.Module], list[nn.Module], str]:
    """Return the modules to make units, the modules to recompute, and a description of what selected them."""
    blocks, single, source = _find_units(model)
    named: list[nn.Module] = []
    candidates = model.named_modules() if wrap.classes or wrap.patterns else ()
    callable_ones = {name: m for name, m in candidates if m is not model and _can_be_unit(m)}
    for name in wrap.classes or ():
        matches = [m for m in callable_ones.values() if type(m).__name__ == name]
        given, allowed = f"{name!r}, {_NO_MATCH}", f"classes in this model: {_classes(callable_ones.values())}"
        require(matches, f"{path}.classes", given, allowed)
        named += matches
    for pattern in wrap.patterns or ():
        matches = [m for name, m in callable_ones.items() if _ends_with(name.split("."), pattern.split("."))]
        paths = dict.fromkeys(re.sub(r"\.\d+", ".*", name) for name in callable_ones)
        given, allowed = f"{pattern!r}, {_NO_MATCH}", f"paths in this model: {', '.join(paths)}"
        require(matches, f"{path}.patterns", given, allowed)
        named += matches
    if wrap.min_num_params is not None:
        named += _of_size(model, int(wrap.min_num_params))
    choices = {"classes": wrap.classes, "patterns": wrap.patterns, "min_num_params": wrap.min_num_params}
    by_name = ", ".join(f"{kind} {given}" for kind, given in choices.items() if given)
    named = _with_readers(model, named)
    chosen = named if by_name else [*blocks, *single]
    # the model's own blocks, whatever the size of its units, and named modules outside of these blocks
    inside, recomputed = {m for block in blocks for m in block.modules()}, list(blocks)
    if not blocks or wrap.min_num_params is None:
        recomputed += [m for m in named if m not in inside and not set(blocks).intersection(m.modules())]
    has_ends = wrap.min_num_params is None if wrap.embedding_and_head is None else wrap.embedding_and_head
    chosen = [*(m for m in chosen if m not in set(ends)), *(ends if has_ends else set(ends).intersection(named))]
    return chosen, recomputed, by_name or source


def _manual_parts(model: nn.Module) -> list[nn.Module]:
    """Parts of a LightningModule with manual optimization: the root is gathered for one backward pass only."""
    if getattr(model, "automatic_optimization", True):
        return []
    parts = [inner for part in model.children() for inner in ([part] if _can_be_unit(part) else part.children())]
    return [part for part in parts if _can_be_unit(part)]


def _can_be_unit(module: nn.Module) -> bool:
    """Whether the module has parameters and a forward: hooks of a module list would never run."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.parameters())


def _reads_inside(module: nn.Module) -> bool:
    return isinstance(module, _READS_ITS_CHILDREN) or reads_inner_weights(module)


def _with_readers(model: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Replace modules whose weights an outer module reads by that module, the outermost one."""
    readers: dict[nn.Module, nn.Module] = {}
    for module in model.modules() if modules else ():  # parents first
        for inner in module.modules() if _reads_inside(module) else ():
            readers.setdefault(inner, module)
    return [readers.get(module, module) for module in modules]


def _classes(modules: Iterable[nn.Module]) -> str:
    return ", ".join(sorted({type(m).__name__ for m in modules}))


def _ends_with(parts: list[str], wanted: list[str]) -> bool:
    """Whether a path ends with a pattern such as ``layers.*.mlp``; a ``*`` matches one part."""
    return len(parts) >= len(wanted) and all(map(fnmatchcase, parts[-len(wanted) :], wanted))


def _of_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Group modules bottom-up: a module becomes a unit as soon as its ungrouped parameters reach the size."""
    grouped: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        children = () if _reads_inside(module) else module.children()
        own = module.parameters(recurse=_reads_inside(module))
        free = sum(p.numel() for p in own) + sum(visit(child) for child in children)
        if free >= min_num_params and module is not model and _can_be_unit(module):
            grouped.append(module)
            return 0
        return free

    visit(model)
    return grouped


def _find_units(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module], str]:
    """Find repeated blocks from no-split classes or module lists, other single no-split modules, and the source."""
    declared = {c for m in model.modules() for c in (getattr(m, "_no_split_modules", None) or ())}
    found = [m for m in model.modules() if type(m).__name__ in declared and _can_be_unit(m)]
    members = {child for m in model.modules() if isinstance(m, _LISTS) for child in m.children()}
    blocks = [m for m in found if m in members] or found
    single = [m for m in found if m not in blocks]  # BERT declares its embeddings
    if blocks:
        return blocks, single, f"the model's no-split classes ({_classes(blocks)})"
    blocks = _members_of_lists(model)
    return blocks, [], f"the model's module lists ({_classes(blocks)})" if blocks else "default (no repeated blocks)"


def _members_of_lists(module: nn.Module) -> list[nn.Module]:
    """Members of outermost module lists, and of Sequentials and ModuleDicts whose members have a single class."""
    holding = [child for child in module.children() if any(True for _ in child.parameters())]
    alike = len({type(child) for child in module.children()}) == 1
    is_list = isinstance(module, nn.ModuleList) or (isinstance(module, _LISTS) and alike)
    if is_list and len(holding) > 1 and all(_can_be_unit(child) for child in holding):
        return holding
    return [member for child in holding for member in _members_of_lists(child)]


def _embeddings_and_heads(model: nn.Module) -> list[nn.Module]:
    """Input embedding and output head of every transformers model in ``model``, tied or not."""
    ends: dict[nn.Module, None] = {}
    for owner in model.modules():
        for getter in ("get_input_embeddings", "get_output_embeddings"):
            try:
                end = getattr(owner, getter)() if hasattr(owner, "_no_split_modules") else None
            except (AttributeError, NotImplementedError):  # e.g. a vision tower
                continue
            if isinstance(end, nn.Module) and _can_be_unit(end):
                ends[end] = None
    return list(ends)


def units_already_wrapped(module: nn.Module) -> dict[str, Any]:
    """The modules inside ``module`` that FSDP1 (without its wrapper) or FSDP2 wraps, by their first names."""
    return {
        clean_name(name): inner.module if isinstance(inner, FullyShardedDataParallel) else inner
        for name, inner in module.named_modules()
        if isinstance(inner, (FullyShardedDataParallel, FSDPModule)) and clean_name(name)
    }


def clean_name(name: str) -> str:
    """The path of a module or parameter without FSDP1's wrappers."""
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


def unsharded_numels(module: nn.Module) -> dict[int, int]:
    """Number of elements of the whole parameter by ``id``, for FSDP1, where a rank has only a view of its part."""
    flats = [m._handle.flat_param for m in module.modules() if isinstance(m, FullyShardedDataParallel) and m._handle]
    return {id(param): n for flat in flats for param, n in zip(flat._params or (), flat._numels, strict=False)}
