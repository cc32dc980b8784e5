"""What is done to a model before any engine touches it, in one order for all engines."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from torch import nn

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.activation import prepare_blocks, recomputes, resolve_gradient_checkpointing
from lit_fsdp.parallel.casting import cast_outputs, cast_parameters, norm_modules, output_module
from lit_fsdp.parallel.float8 import apply_float8
from lit_fsdp.parallel.precision import TORCH_DTYPES
from lit_fsdp.parallel.units import Unit, UnitPlan, plan_units


def plan_for(module: nn.Module, config: StrategyConfig, path: str) -> UnitPlan:
    """The units that the factory's arguments give this module; nothing is changed, meta tensors suffice.

    Raises:
        ConfigError: As :func:`lit_fsdp.parallel.units.plan_units`.
    """
    wrap = config.wrap_config
    if not config.is_sharded:  # units only say what is recomputed and compiled
        wrap = dataclasses.replace(wrap, max_root_share=1.0, experts=False)
    plan = plan_units(module, wrap, f"{path}.wrap")
    if config.compile and config.is_sharded:
        _refuse_units_inside_blocks(plan, f"{path}.compile")
    norms = _fp32_norms(module, config)
    return _with_norms(plan, module, norms) if norms else plan


def _fp32_norms(module: nn.Module, config: StrategyConfig) -> list[nn.Module]:
    """Those that keep fp32 weights: all that the recipe asks for, and batch norms, where torch mixes no dtypes."""
    precision = config.precision_config
    if precision.keep_norms_fp32:
        return norm_modules(module)
    if not config.is_sharded or config.wrap_config.manual or precision.row.compute == precision.row.param:
        return []
    return [norm for norm in norm_modules(module) if isinstance(norm, nn.modules.batchnorm._BatchNorm)]


def recompute_by_unit(plan: UnitPlan) -> dict[str, str]:
    """What each unit does again in the backward pass, by name: ``no``, ``full``, ``selective``, ...

    A unit inside a block shares its word; one around blocks that are no units says how many of them do what.
    """
    around = {module: block for block in plan.blocks for module in block.modules()}
    found = {name: recomputes(around[m]) if m in around else "no" for name, m in plan.modules.items()}
    units = set(plan.modules.values())
    enclosed: dict[str, Counter[str]] = {}
    for block in plan.blocks:
        if block not in units:
            enclosing = [name for name, m in plan.modules.items() if m is not block and block in set(m.modules())]
            enclosed.setdefault(max(enclosing, key=len, default=""), Counter())[recomputes(block)] += 1
    for name, words in enclosed.items():
        if set(words) != {"no"}:
            found[name] = ", ".join(f"{count} blocks {word}" for word, count in words.items())
    return found


def _refuse_units_inside_blocks(plan: UnitPlan, path: str) -> None:
    """Their hooks break a compiled block's graph, and it would run as it is without a word."""
    inside = {inner for block in plan.blocks for inner in block.modules() if inner is not block}
    names = [name for name, module in plan.modules.items() if module in inside]
    if names:
        raise ConfigError(
            path,
            f"true with {len(names)} FSDP units inside blocks ({names[0]}, …), made by {plan.source}",
            "blocks without units inside",
            "drop compile, or set wrap: auto",
        )


def _with_norms(plan: UnitPlan, module: nn.Module, norms: list[nn.Module]) -> UnitPlan:
    """The plan with each of these layers as a unit of its own, taken out of the unit around it."""
    names = {child: name for name, child in module.named_modules()}
    units, modules = list(plan.units), dict(plan.modules)
    for norm in norms:
        name = names[norm]
        if name in modules:
            units = [dataclasses.replace(u, keeps_fp32=True) if u.name == name else u for u in units]
            continue
        params = list(norm.parameters())
        own: dict[str, Any] = {
            "num_params": sum(p.numel() for p in params),
            "num_bytes": sum(p.numel() * p.element_size() for p in params),
            "num_trainable": sum(p.numel() for p in params if p.requires_grad),
        }
        around = [u for u in units if not u.name or name.startswith(f"{u.name}.")]
        outer = max(around, key=lambda unit: len(unit.name))
        index = units.index(outer)
        units[index] = dataclasses.replace(outer, **{key: getattr(outer, key) - n for key, n in own.items()})
        units.insert(index, Unit(name=name, class_name=type(norm).__name__, keeps_fp32=True, **own))
        modules[name] = norm
    return dataclasses.replace(plan, units=tuple(units), modules=modules, source=f"{plan.source}; norms in fp32")


def prepare(module: nn.Module, config: StrategyConfig, path: str) -> UnitPlan:
    """Cast to the dtype at rest, put fp8 layers in, plan the units, and apply activation checkpointing to the blocks.

    Args:
        module: The LightningModule; changed in place.
        config: The factory's arguments.
        path: Where they stand in the recipe, for errors.
    """
    precision = config.precision_config
    if not config.wrap_config.manual:  # sharded already: the contract compares what is there
        cast_parameters(module, TORCH_DTYPES[precision.row.param])
    if precision.mode == "fp8":
        apply_float8(module, precision.fp8_skip, f"{path}.precision")
    if precision.output_dtype is not None:
        cast_outputs(output_module(module), TORCH_DTYPES[precision.output_dtype])
    plan = plan_for(module, config, path)
    where = f"{path}.activation_checkpointing"
    activation = resolve_gradient_checkpointing(module, config.activation_config, where)
    prepare_blocks(plan.blocks, activation, config.compile, where)
    for norm in _fp32_norms(module, config):
        cast_outputs(norm, TORCH_DTYPES[precision.row.compute])
    return plan
