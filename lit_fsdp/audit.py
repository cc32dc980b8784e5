"""Audit of a recipe without running it: units, mesh, dtypes and state per rank, from shapes on meta."""

import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lit_fsdp.config.model import FLASH_ATTENTION
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import require
from lit_fsdp.models.build import build_trainable
from lit_fsdp.models.optimizers import state_bytes
from lit_fsdp.models.parts import context_method
from lit_fsdp.models.resolve import resolve_architecture
from lit_fsdp.parallel.activation import prepare_blocks, recompute_by_unit
from lit_fsdp.parallel.expert_units import check_experts
from lit_fsdp.parallel.precision import TORCH_DTYPES, cast_parameters, declared_dtypes, has_bf16
from lit_fsdp.parallel.units import UnitPlan, audit, packed_weights, plan_for
from lit_fsdp.report.tables import console_for, parameter_counts, ranks_table, units_table

_DEGREES = ("replicate_degree", "shard_degree", "context_parallel", "expert_parallel")


class CausalLMModule(nn.Module):
    """Placeholder for the LightningModule of that name: the same module tree, without Lightning."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def audit_recipe(run: RunConfig) -> dict[str, Any]:
    """Return the content of this run's ``audit.json`` about units, and the state per rank, from the model's config."""
    strategy, model_config, optim = settled_strategy(run), run.model, run.model.optim
    copies, shards = run.mesh_shape()
    attention, row = model_config.attn_implementation, strategy.precision_config.row
    degree = strategy.context_config.degree
    given, fits = f"{degree} with attention {attention}", degree == 1 or attention not in FLASH_ATTENTION
    require(fits, f"{STRATEGY}.context_parallel", given, "SDPA", "drop model.attn_implementation")
    if attention in FLASH_ATTENTION:  # its package may be missing here, and parameters do not depend on it
        model_config = dataclasses.replace(model_config, attn_implementation="eager")
    model = build_trainable(resolve_architecture(model_config), model_config)[0]
    fits = attention not in FLASH_ATTENTION or model._supports_flash_attn
    require(fits, "model.attn_implementation", f"{attention} for {model.config.model_type}", "one that it supports")
    module = CausalLMModule(model)
    if degree > 1:
        context_method(model, strategy.context_config, f"{STRATEGY}.context_parallel")
    if strategy.expert_parallel > 1:
        check_experts(module, strategy.expert_parallel, shards, f"{STRATEGY}.expert_parallel")
    frozen = cast_parameters(module, strategy)
    plan = plan_for(module, strategy, STRATEGY)
    prepare_blocks(plan.blocks, strategy.activation_config, strategy.compile)
    kept, known_as = state_bytes(optim, model, TORCH_DTYPES[row.param].itemsize)
    state = state_per_rank(module, plan, strategy, shards, kept)
    return {
        **audit(plan, strategy, (copies, shards), recompute_by_unit(plan)),
        "num_params_on_this_rank": state[0]["num_params"],
        "ranks": run.world_size,
        "precision": {"mode": strategy.precision_config.mode, "declared": declared_dtypes(row, frozen)},
        "state_per_rank": state,
        "optimizer": optim.optimizer,
        "optimizer_bytes_of": known_as,  # AdamW's if the optimizer is unknown
    }


def settled_strategy(run: RunConfig) -> StrategyConfig:
    """The recipe's strategy with ``precision: auto`` resolved for its device."""
    return run.strategy.on(has_bf16(device_type(run)))


def device_type(run: RunConfig) -> str:
    """Device type of the run, ``cpu`` or ``cuda``; if the recipe leaves it open, that of this machine."""
    accelerator = run.trainer.get("accelerator")
    open_here = accelerator in (None, "auto") and not torch.cuda.is_available()
    return "cpu" if accelerator == "cpu" or open_here else "cuda"


def print_recipe_audit(record: dict[str, Any]) -> None:
    """Print the audit of a recipe as tables."""
    console = console_for(sys.stdout)
    console.print(units_table(record))
    console.print(ranks_table(record["state_per_rank"]))
    dtypes = ", ".join(f"{what} {dtype}" for what, dtype in record["precision"]["declared"].items())
    sharding = record["sharding"] if not record["replaced"] else "no_shard"
    degrees = [f"{name} {record[name]}" for name in _DEGREES if record[name] > 1 or not name.endswith("parallel")]
    lines = [
        f"{parameter_counts(record)} in {record['num_units']} units",
        f"{record['engine']} {sharding} on {record['ranks']} ranks: {', '.join(degrees)}",
        f"precision {record['precision']['mode']} declares {dtypes}",
        f"optimizer {record['optimizer']}, with the state size of {record['optimizer_bytes_of']}",
        *(f"not split because of tied weights: {name}" for name in record["kept_together_by_tied_weights"]),
        *(f"replaced: {name}: {text}" for name, text in record["replaced"].items()),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


# State of each rank between steps: FSDP2 splits every parameter along dim 0 into chunks of ceil(rows / ranks) rows and
# pads the last ones in storage. FSDP1 concatenates the parameters of a unit, each aligned to a multiple of 16 bytes,
# pads the result to a multiple of the ranks and splits it into equal parts, regardless of parameter boundaries.

_Kept = Callable[[nn.Parameter, int], int]
_KINDS = ("num_params", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "rounding_bytes")
_ALIGNMENT_BYTES = 16  # of a parameter in FSDP1's flat parameter


def state_per_rank(
    model: nn.Module, plan: UnitPlan, config: StrategyConfig, ranks: int, kept: _Kept, pins: bool = False
) -> list[dict[str, int]]:
    """State per rank between steps, with the engine's padding, of the ranks that share one copy of the model.

    The ``model`` is cast but not sharded yet; the function ``kept`` returns the optimizer bytes of a parameter for a
    number of its elements. A 4-bit base adds ``quantization_bytes``: its scales, unsharded on each rank. With ``pins``,
    as in offload from a GPU, also ``rounding_bytes``: torch pins each parameter and gradient (FSDP1: each flat
    parameter) separately, in a block of the next power of two (ATen/core/CachingHostAllocator.h, torch 2.11 to 2.15).
    """
    changes = [Counter[str]() for _ in range(ranks + 1)]  # differences between consecutive ranks
    row, packed = config.precision_config.row, packed_weights(model)
    seen: set[int] = set()
    for unit in plan.units:
        module = plan.modules[unit.name] if unit.name else model
        own = [param for param in module.parameters() if id(param) not in seen]
        seen.update(id(param) for param in own)
        if config.engine == "fsdp1":
            _add_flat(changes, own, TORCH_DTYPES["fp32" if unit.keeps_fp32 else row.compute].itemsize, kept)
        else:
            _add_by_rows(changes, own, packed, kept)
    scales = sum(unit.quantization_bytes for unit in plan.units)
    kinds = _KINDS if pins else _KINDS[:-1]
    sums = zip(*(itertools.accumulate([one[kind] for one in changes[:-1]]) for kind in kinds), strict=True)
    held = [dict(zip(kinds, one, strict=True)) for one in sums]
    return [{**one, "quantization_bytes": scales} for one in held] if scales else held


def _add(changes: list[Counter[str]], first: int, last: int, **numbers: int) -> None:
    """Add to the state of the ranks from ``first`` up to ``last``."""
    changes[first].update(numbers)
    changes[last].subtract(numbers)


def _add_by_rows(
    changes: list[Counter[str]], params: Iterable[nn.Parameter], packed: Mapping[int, int], kept: _Kept
) -> None:
    ranks = len(changes) - 1
    for param in params:
        rows = param.shape[0] if param.dim() else 1
        per_row = param.numel() // max(1, rows)
        chunk = -(-rows // ranks)
        size = chunk * per_row * param.element_size()
        stored = {"parameter_bytes": size, "gradient_bytes": size * param.requires_grad}
        _add(changes, 0, ranks, **stored, rounding_bytes=pinned_excess(size) * (1 + param.requires_grad))
        whole, rest = divmod(rows, max(1, chunk))  # ranks with full chunks, one with fewer rows, the others empty
        for first, last, of_rank in ((0, whole, chunk), (whole, whole + 1, rest)):
            if local := of_rank * per_row:
                state = kept(param, local) if param.requires_grad else 0
                _add(changes, first, last, num_params=local * packed.get(id(param), 1), optimizer_bytes=state)


def pinned_excess(num_bytes: int) -> int:
    """Bytes up to the next power of two, as which torch pins a block of host memory."""
    return (1 << (num_bytes - 1).bit_length()) - num_bytes if num_bytes else 0


def _add_flat(changes: list[Counter[str]], params: Sequence[nn.Parameter], itemsize: int, kept: _Kept) -> None:
    align, ranks = _ALIGNMENT_BYTES // itemsize, len(changes) - 1
    starts, end = [], 0
    for param in params:
        end += -end % align
        starts.append(end)
        end += param.numel()
    part, size = -(-end // ranks), next((param.element_size() for param in params), 0)
    is_trained = any(param.requires_grad for param in params)  # one gradient for the flat parameter
    stored = {"parameter_bytes": part * size, "gradient_bytes": part * size * is_trained}
    _add(changes, 0, ranks, **stored, rounding_bytes=pinned_excess(part * size) * (1 + is_trained))
    for start, param in zip(starts, params, strict=True):
        stop, first = start + param.numel(), start // max(1, part)
        last = stop // max(1, part)  # ranks before it have full parts, except the first
        for one, other in ((first, first + 1), (first + 1, last), (max(first + 1, last), last + 1)):
            local = min(stop, (one + 1) * part) - max(start, one * part)
            if one < other and local > 0:
                state = kept(param, local) if param.requires_grad else 0
                _add(changes, one, other, num_params=local, optimizer_bytes=state)
