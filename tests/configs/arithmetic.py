"""The memory and disk arithmetic that stands at the head of each recipe, from shapes on meta."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.run import RunConfig
from lit_fsdp.config.strategy import mesh_shape
from lit_fsdp.models.build import build_on_meta, num_parameters
from lit_fsdp.models.miniature import shipped_config
from lit_fsdp.parallel.units import plan_units

GIB = 2**30
STATE_BYTES = 16
"""Per parameter in the mode mixed: weight 4, gradient 4, AdamW 8."""
CHECKPOINT_BYTES = 12
"""Per parameter in the mode mixed: weight 4, AdamW 8."""


class Holder(nn.Module):
    """Stands for the LightningModule: the model hangs below it under the name ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@functools.cache
def checked(recipe: Path) -> RunConfig:
    """The recipe, every rule of which holds."""
    return load_recipe(["--config", str(recipe)], "fit").run


@functools.cache
def meta_model(name: str) -> Any:
    """The model of a hub name, from the config that ships."""
    values = shipped_config(name)
    assert values is not None, f"no config for {name} in configs/model"
    return build_on_meta(AutoConfig.for_model(values.pop("model_type"), **values))


def chunk_tokens(vocab_size: int, width: int) -> int:
    """Tokens whose logits exist at the same time: 96 MiB of fp32, or a quarter of the width where that is more."""
    return max(96 * 2**20 // (4 * vocab_size), width // 4)


def size_of_step(run: RunConfig) -> tuple[int, int]:
    """Samples and, at most, tokens of an optimizer step."""
    return run.data.global_batch_size, run.data.global_batch_size * run.data.max_seq_length


def gib_per_rank(run: RunConfig, model: Any) -> dict[str, float]:
    """GiB by what they are for: on each rank, except ``host``, which is per node."""
    assert run.world_size is not None
    config, params = model.config, num_parameters(model)
    tokens = run.data.micro_batch_size * run.data.max_seq_length
    ranks = mesh_shape(run.strategy, run.num_nodes, run.world_size)[1]
    units = plan_units(Holder(model), run.strategy.wrap_config).units
    head = config.vocab_size * config.hidden_size
    terms = {
        "state": params * STATE_BYTES / ranks,
        "unit": max(unit.num_params for unit in units) * 8,
        "inputs": config.num_hidden_layers * tokens * config.hidden_size * 2,
        "head": head * 4,
        "logits": chunk_tokens(config.vocab_size, config.hidden_size) * config.vocab_size * 10,
    }
    if run.strategy.activation_config.mode != "full":
        del terms["inputs"]
    if run.strategy.cpu_offload:
        terms["host"] = terms.pop("state") * run.world_size / run.num_nodes
    return {kind: num_bytes / GIB for kind, num_bytes in terms.items()}


def total_gib(terms: Mapping[str, float]) -> float:
    """What a rank has on its device."""
    return sum(gib for kind, gib in terms.items() if kind != "host")


def head_lines(run: RunConfig, model: Any) -> list[str]:
    """The lines that a recipe has to show, without the mark of a comment."""
    config, params, terms = model.config, num_parameters(model), gib_per_rank(run, model)
    assert run.world_size is not None
    tokens = run.data.micro_batch_size * run.data.max_seq_length
    ranks = mesh_shape(run.strategy, run.num_nodes, run.world_size)[1]
    biggest = max(plan_units(Holder(model), run.strategy.wrap_config).units, key=lambda unit: unit.num_params)
    kind = "block" if biggest.is_block else "embedding" if config.tie_word_embeddings else "head"
    if "host" in terms:
        copy = ranks * run.num_nodes // run.world_size
        nodes = "" if copy == 1 else f" / {copy} nodes of a copy"
        state = f"{params:,} x {STATE_BYTES} B{nodes} = {terms['host']:.2f} in host memory, none here"
    else:
        state = f"{params:,} x {STATE_BYTES} B / {ranks} rank{'s' * (ranks > 1)} = {terms['state']:.2f}"
    lines = {
        "weights, gradients, AdamW state": state,
        "largest unit while in use": f"{kind} {biggest.num_params:,} x (2 weight + 2 gradient + 4 fp32 to reduce) B = "
        f"{terms['unit']:.2f}",
    }
    rest = "before the activations of all blocks"
    if "inputs" in terms:
        rest = "before what one block recomputes and what the allocator keeps"
        lines[f"inputs of {config.num_hidden_layers} blocks"] = (
            f"{config.num_hidden_layers} x {tokens:,} tokens x {config.hidden_size} x 2 B = {terms['inputs']:.2f}"
        )
    chunk = chunk_tokens(config.vocab_size, config.hidden_size)
    lines["gradient of the head"] = (
        f"{config.vocab_size * config.hidden_size:,} x 4 B = {terms['head']:.2f}, while the loss adds it up in fp32"
    )
    lines["logits of a chunk"] = (
        f"{chunk:,} tokens x {config.vocab_size:,} x 10 B = {terms['logits']:.2f} (bf16, fp32, probabilities)"
    )
    lines["sum"] = f"{total_gib(terms):.1f}, {rest}"
    plural = "s" if run.world_size > 1 else ""
    first = (
        f"Memory per rank in GiB, by arithmetic, not measured ({params:,} parameters, {run.world_size} rank{plural}, "
        f"{tokens:,} tokens per forward):"
    )
    kept = run.checkpoint.keep_last + run.checkpoint.keep_best + 1
    return [
        first,
        *(f"  {what:<34}{text}" for what, text in lines.items()),
        f"A step has at most {size_of_step(run)[1]:,} tokens. A checkpoint takes {params:,} x {CHECKPOINT_BYTES} B = "
        f"{params * CHECKPOINT_BYTES / 1e9:.2f} GB",
        f"(fp32 weights and AdamW's moments), and at most {kept} lie on the disk at the same time.",
    ]
