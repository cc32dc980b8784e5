"""The table of memory and disk in recipes/README.md, by shapes on meta: ``python -m tests.configs.arithmetic``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig

from lit_fsdp.audit import state_per_rank
from lit_fsdp.config.model import PreferenceModelConfig
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.run import RunConfig
from lit_fsdp.config.strategy import mesh_shape
from lit_fsdp.models.build import build_on_meta, build_trainable, num_parameters
from lit_fsdp.models.loss import chunk_rows
from lit_fsdp.models.miniature import shipped_config
from lit_fsdp.parallel.precision import cast_parameters
from lit_fsdp.parallel.units import plan_units, quantized_layers

README = Path(__file__).parents[2] / "recipes" / "README.md"
RECIPES = sorted(README.parent.glob("*.yaml"))
QUICKSTART_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
COLUMNS = (
    "recipe",
    "parameters",
    "hardware",
    "samples × tokens per step",
    "tokens per forward",
    "weights, gradients, AdamW",
    "largest unit in use",
    "inputs of all blocks",
    "head's gradient and a chunk of logits",
    "GiB per rank in all",
    "one checkpoint",
)
GIB = 2**30
STATE_BYTES = 16
"""Per trained parameter in the mode mixed: weight 4, gradient 4, AdamW 8."""
CHECKPOINT_BYTES = 12
"""Per trained parameter in the mode mixed: weight 4, AdamW 8; a frozen one is not in it."""


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


def longest_sample(run: RunConfig) -> int:
    """Tokens of a sample at most; a pair of completions has twice as many."""
    return run.data.max_seq_length * (2 if isinstance(run.model, PreferenceModelConfig) else 1)


def size_of_step(run: RunConfig) -> tuple[int, int]:
    """Samples and, at most, tokens of an optimizer step."""
    return run.data.global_batch_size, run.data.global_batch_size * longest_sample(run)


def gib_per_rank(run: RunConfig, model: Any) -> dict[str, float]:
    """GiB by what they are for: on each rank, except ``host``, which is per node; ``model`` is without adapters."""
    assert run.world_size is not None
    config, params = model.config, num_parameters(model)
    tokens = run.data.micro_batch_size * longest_sample(run)
    ranks = mesh_shape(run.strategy, run.num_nodes, run.world_size)[1]
    units = once("units", run, lambda: plan_units(Holder(model), run.strategy.wrap_config).units)
    head = config.vocab_size * config.hidden_size
    terms = {
        "state": params * STATE_BYTES / ranks,
        "unit": max(unit.num_params for unit in units) * 8,
        "inputs": config.num_hidden_layers * tokens * config.hidden_size * 2,
        "head": head * 4,
        "logits": chunk_rows(config.vocab_size, config.hidden_size) * config.vocab_size * 10,
    }
    if run.model.lora is not None:
        terms |= {**beside_a_frozen_base(run, ranks), "head": 0}
    if run.strategy.activation_config.mode != "full":
        del terms["inputs"]
    if run.strategy.cpu_offload:
        terms["host"] = terms.pop("state") * run.world_size / run.num_nodes
    return {kind: num_bytes / GIB for kind, num_bytes in terms.items()}


_KNOWN: dict[tuple[Any, ...], Any] = {}


def once(what: str, run: RunConfig, make: Callable[[], Any]) -> Any:
    """What recipes have in common that differ in their hardware alone."""
    key = (what, run.model.name, str(run.model.lora), str(run.strategy.wrap), str(run.strategy.precision))
    if key not in _KNOWN:
        _KNOWN[key] = make()
    return _KNOWN[key]


def with_adapters(run: RunConfig) -> Holder:
    """The model of a recipe with adapters on meta, in the dtypes it rests in."""

    def make() -> Holder:
        holder = Holder(build_trainable(meta_model(str(run.model.name)).config, run.model)[0])
        cast_parameters(holder, run.strategy)
        return holder

    return once("adapters", run, make)


def num_trained(model: nn.Module) -> int:
    """Parameters that are not frozen."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def beside_a_frozen_base(run: RunConfig, ranks: int) -> dict[str, float]:
    """Of a recipe with adapters: bytes between steps, and of a unit in use."""
    holder = with_adapters(run)
    plan = once("units with adapters", run, lambda: plan_units(holder, run.strategy.wrap_config))
    state = state_per_rank(holder, plan, run.strategy, ranks)[0]
    layers = [layer.in_features * layer.out_features for layer in quantized_layers(holder).values()]
    units = [unit.num_bytes - 4 * unit.num_trainable + 8 * unit.num_trainable for unit in plan.units]
    return {
        "state": sum(size for kind, size in state.items() if kind.endswith("_bytes")),
        "unit": max(units) + 2 * max(layers, default=0),
    }


def total_gib(terms: Mapping[str, float]) -> float:
    """What a rank has on its device."""
    return sum(gib for kind, gib in terms.items() if kind != "host")


def row_of(recipe: Path) -> str:
    """The recipe's row of the table in recipes/README.md."""
    run = checked(recipe)
    name = str(run.model.name)
    model = meta_model(QUICKSTART_MODEL if recipe.stem == "quickstart" else name)
    params, terms = num_parameters(model), gib_per_rank(run, model)
    trained = params if run.model.lora is None else num_trained(with_adapters(run))
    title = re.fullmatch(r"# .+ fine-tune, (.+)\.", recipe.read_text(encoding="utf-8").split("\n", 1)[0])
    samples, tokens = size_of_step(run)
    cells = [
        f"[{recipe.stem}]({recipe.name})",
        f"{params:,}" if run.model.lora is None else f"{params:,}; {trained:,} in adapters",
        title[1] if title else "",
        f"{samples} × {longest_sample(run):,} = {tokens:,}",
        f"{run.data.micro_batch_size * longest_sample(run):,}",
        f"{terms['host']:.0f} GiB of host memory per node" if "host" in terms else f"{terms['state']:.2f}",
        f"{terms['unit']:.2f}",
        f"{terms['inputs']:.2f}" if "inputs" in terms else "all kept",
        f"{terms['head'] + terms['logits']:.2f}",
        f"**{total_gib(terms):.1f}**",
        f"{trained * CHECKPOINT_BYTES / 1e9:.2f} GB",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The table of recipes/README.md: GiB per rank by arithmetic, for each recipe."""
    rows = [row_of(recipe) for recipe in RECIPES]
    return "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]) + "\n"


def with_table(text: str) -> str:
    """The text of recipes/README.md with the table as the recipes give it."""
    return re.sub(r"(?m)^\| recipe \|.*\n(\|.*\n)+", lambda _: table(), text)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
