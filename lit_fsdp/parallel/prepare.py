"""What is done to a model before any engine touches it, in one order for all engines."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from lit_fsdp.config.sharding import StrategyConfig
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
        wrap = dataclasses.replace(wrap, max_root_share=1.0)
    plan = plan_units(module, wrap, f"{path}.wrap")
    return _with_norms(plan, module) if config.precision_config.keep_norms_fp32 else plan


def recompute_by_unit(plan: UnitPlan) -> dict[str, str]:
    """What each unit does again in the backward pass, by name: ``no``, ``full``, ``selective``, ..."""
    return {name: recomputes(module) for name, module in plan.modules.items()}


def _with_norms(plan: UnitPlan, module: nn.Module) -> UnitPlan:
    """The plan with every normalisation layer as a unit of its own, taken out of the unit around it."""
    names = {child: name for name, child in module.named_modules()}
    units, modules = list(plan.units), dict(plan.modules)
    for norm in norm_modules(module):
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
    if precision.keep_norms_fp32:
        for norm in norm_modules(module):
            cast_outputs(norm, TORCH_DTYPES[precision.row.compute])
    return plan
