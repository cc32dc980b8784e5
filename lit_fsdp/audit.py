"""What a recipe would do on given ranks, without doing it: units, mesh, dtypes and state, from shapes on meta."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TextIO

import torch
from torch import nn

from lit_fsdp.config.model import FLASH_ATTENTION
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.strategy import StrategyConfig, mesh_shape
from lit_fsdp.models.attention import check_architecture
from lit_fsdp.models.resolve import resolve_architecture
from lit_fsdp.models.trainable import build_trainable
from lit_fsdp.parallel.devices import has_bf16
from lit_fsdp.parallel.prepare import prepare, recompute_by_unit
from lit_fsdp.parallel.shards import state_per_rank
from lit_fsdp.parallel.units import audit
from lit_fsdp.report.tables import parameter_counts, ranks_table, units_table, wide_console


class CausalLMModule(nn.Module):
    """Stands for the LightningModule of that name: the same tree of modules, without Lightning."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def audit_recipe(run: RunConfig) -> dict[str, Any]:
    """What ``audit.json`` of this run would say about units, and what each rank would keep.

    Needs the model's config only, no weights, no process group and no memory for the model.

    Args:
        run: A checked recipe with a known number of ranks.

    Returns:
        The audit of a run, without what only a run can measure, and beside it ``replicate_degree``, ``ranks``,
        ``precision`` (mode and declared dtypes), ``state_per_rank`` (see
        :func:`lit_fsdp.parallel.shards.state_per_rank`) and ``replaced``.

    Raises:
        ConfigError: A model whose config is not at hand, or units that the model does not have.
    """
    assert run.world_size is not None
    strategy = run.strategy.on(has_bf16(_device_type(run.trainer.get("accelerator"))))
    copies, shards = mesh_shape(strategy, run.num_nodes, run.world_size, STRATEGY)
    config = strategy.precision_config
    attention = run.model.attn_implementation
    model_config = run.model
    if attention in FLASH_ATTENTION:  # its package need not be installed here, and parameters do not depend on it
        model_config = dataclasses.replace(model_config, attn_implementation="eager")
    hf_config = resolve_architecture(model_config)
    model = build_trainable(hf_config, model_config)[0]
    check_architecture(model, attention)
    module = CausalLMModule(model)
    plan = prepare(module, _without_fp8_layers(strategy), STRATEGY)
    state = state_per_rank(module, plan, strategy, shards)
    return {
        **audit(plan, shards, recompute_by_unit(plan)),
        "num_params_on_this_rank": state[0]["num_params"],
        "engine": strategy.engine,
        "sharding": strategy.sharding,
        "ranks": run.world_size,
        "replicate_degree": copies,
        "precision": {"mode": config.mode, "declared": dataclasses.asdict(config.row)},
        "state_per_rank": state,
        "replaced": strategy.replaced,
    }


def _device_type(accelerator: Any) -> str:
    """Of the run: where the recipe leaves it open, as if it were on this machine."""
    open_here = accelerator in (None, "auto") and not torch.cuda.is_available()
    return "cpu" if accelerator == "cpu" or open_here else "cuda"


def _without_fp8_layers(strategy: StrategyConfig) -> StrategyConfig:
    """The same units and dtypes at rest without torchao, which need not be installed where an audit is made."""
    precision = strategy.precision_config
    if precision.mode != "fp8":
        return strategy
    return dataclasses.replace(strategy, precision=dataclasses.replace(precision, mode="mixed", fp8_skip=None))


def print_recipe_audit(record: dict[str, Any], file: TextIO | None = None) -> None:
    """The audit of a recipe as tables on standard output, or in ``file``."""
    console = wide_console(file or sys.stdout)
    console.print(units_table(record))
    console.print(ranks_table(record["state_per_rank"]))
    dtypes = ", ".join(f"{what} {dtype}" for what, dtype in record["precision"]["declared"].items())
    sharding = record["sharding"] if not record["replaced"] else "no_shard"
    lines = [
        f"{parameter_counts(record)} in {record['num_units']} units",
        f"{record['engine']} {sharding} on {record['ranks']} ranks: {record['replicate_degree']} "
        f"{'copy' if record['replicate_degree'] == 1 else 'copies'} of the model, each over "
        f"{record['shard_degree']} {'rank' if record['shard_degree'] == 1 else 'ranks'}",
        f"precision {record['precision']['mode']} declares {dtypes}",
        *(f"not split, for weights tied to others: {name}" for name in record["kept_together_by_tied_weights"]),
        *(f"replaced: {name}: {text}" for name, text in record["replaced"].items()),
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)
