"""The units of every model family, found from the model itself, on meta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lit_fsdp.config.strategy import WrapConfig
from lit_fsdp.parallel.units import UnitPlan, plan_units

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}
FFN = {**SMALL, "intermediate_size": 12}
GQA = {**FFN, "num_key_value_heads": 1}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Holder(nn.Module):
    """Stands for the LightningModule around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@dataclass(frozen=True)
class Family:
    """A tiny model and the units it must have."""

    model: str
    task: str
    """The model's class is its name and this."""
    options: dict[str, Any]
    blocks: list[str]
    """Paths of the lists of blocks inside the model; two blocks in each."""
    block_class: str
    ends: list[str]
    """Embedding and head where they are units."""
    tied: list[str]
    """Further names of weights, all in the root unit."""
    config: str = ""
    """Name of the config class, where it is another."""

    def build(self) -> Holder:
        """The model on meta inside something that stands for the LightningModule."""
        config = getattr(transformers, self.config or f"{self.model}Config")(**self.options)
        with torch.device("meta"):
            model = getattr(transformers, self.model + self.task)(config)
        model.tie_weights()
        return Holder(model)

    def __str__(self) -> str:
        return f"{self.model}{self.task}{'-tied' if self.tied else ''}"


def _decoder(name: str, options: dict[str, Any], tied: list[str] | None = None, **changes: Any) -> Family:
    """One with Llama's layout."""
    values: dict[str, Any] = {
        "model": name,
        "task": "ForCausalLM",
        "options": options,
        "blocks": ["model.layers"],
        "block_class": f"{name}DecoderLayer",
        "ends": [] if tied else ["model.embed_tokens", "lm_head"],
        "tied": tied or [],
    }
    return Family(**{**values, **changes})


FAMILIES = [
    _decoder("Llama", {**GQA, "tie_word_embeddings": True}, tied=["lm_head.weight"]),
    _decoder("Llama", GQA),
    _decoder("Mistral", GQA),
    _decoder("Qwen3", {**GQA, "head_dim": 4}),
    _decoder("Gemma3", {**GQA, **TOKENS, "head_dim": 4}, tied=["lm_head.weight"], config="Gemma3TextConfig"),
    _decoder("Phi", FFN),
    _decoder("Phi3", {**GQA, **TOKENS}),
    _decoder("Mixtral", {**GQA, "num_local_experts": 3}),
    _decoder("Qwen3Moe", {**GQA, "head_dim": 4, "num_experts": 3, "moe_intermediate_size": 6}),
    _decoder(
        "OPT",
        {**SMALL, "ffn_dim": 12, "max_position_embeddings": 6, "word_embed_proj_dim": 8},
        tied=["lm_head.weight"],
        blocks=["model.decoder.layers"],
    ),
    _decoder(
        "GPTNeoX",
        FFN,
        blocks=["gpt_neox.layers"],
        block_class="GPTNeoXLayer",
        ends=["gpt_neox.embed_in", "lm_head"],
    ),
    _decoder(
        "GPT2",
        {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 4, "vocab_size": 10, **TOKENS},
        tied=["lm_head.weight"],
        task="LMHeadModel",
        blocks=["transformer.h"],
        block_class="GPT2Block",
    ),
    _decoder(
        "Bloom",
        {"hidden_size": 8, "n_layer": 2, "n_head": 2, "vocab_size": 10},
        tied=["lm_head.weight"],
        blocks=["transformer.h"],
        block_class="BloomBlock",
    ),
    _decoder(
        "T5",
        {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "vocab_size": 10},
        task="ForConditionalGeneration",
        blocks=["encoder.block", "decoder.block"],
        block_class="T5Block",
        tied=["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
    ),
    _decoder(
        "Bert",
        {**FFN, "max_position_embeddings": 6},
        task="ForMaskedLM",
        blocks=["bert.encoder.layer"],
        block_class="BertLayer",
        tied=["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
    ),
]
families = pytest.mark.parametrize("family", FAMILIES, ids=str)


def check_parameters(plan: UnitPlan, model: nn.Module) -> None:
    """Every parameter is in exactly one unit."""
    total = sum(p.numel() for p in model.parameters())
    assert sum(unit.num_params for unit in plan.units) == plan.num_params == total
    assert sum(unit.num_bytes for unit in plan.units) == 4 * total


@families
def test_auto(family: Family):
    model = family.build()
    plan = plan_units(model, WrapConfig())
    blocks = [f"model.{path}.{i}" for path in family.blocks for i in range(2)]
    ends = [f"model.{end}" for end in family.ends]
    assert {unit.name for unit in plan.units} == {*blocks, *ends, ""}
    assert len(plan.units) == len(blocks) + len(ends) + 1
    assert {unit.name for unit in plan.units if unit.is_block} == set(blocks)
    assert {unit.class_name for unit in plan.units if unit.is_block} == {family.block_class}
    assert plan.source == f"the model's no-split classes ({family.block_class})"
    assert list(plan.units[-1].tied) == [f"model.{name}" for name in family.tied]
    assert not any(unit.tied for unit in plan.units[:-1])
    assert bool(plan.kept_together) == bool(family.tied)
    check_parameters(plan, model)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model in ("Mixtral", "Qwen3Moe")], ids=str)
def test_packed_experts_are_units_inside_their_blocks(family: Family):
    model = family.build()
    plan = plan_units(model, WrapConfig(patterns=["model.layers.*", "model.layers.*.mlp.experts"]))
    plain = {unit.name: unit.num_params for unit in plan_units(model, WrapConfig()).units}
    inner = family.options.get("moe_intermediate_size", 12)
    experts = 3 * (2 * inner * 8 + 8 * inner)  # three experts: gate and up, down
    for i in range(2):
        assert plan.units[i].name == f"model.model.layers.{i}.mlp.experts"
        assert plan.units[i].class_name == f"{family.model}Experts"
        assert plan.units[i].num_params == experts
        assert not plan.units[i].is_block
        assert plan.units[i + 2].num_params == plain[f"model.model.layers.{i}"] - experts
    assert [unit.name for unit in plan.units[2:]] == list(plain)
    check_parameters(plan, model)
