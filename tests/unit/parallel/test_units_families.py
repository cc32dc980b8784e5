"""The units of every model family, found from the model itself, on meta."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from lit_fsdp.config.strategy import WrapConfig
from lit_fsdp.parallel.units import UnitPlan, plan_units
from tests.unit.models.families import tiny

ENDS = ("model.embed_tokens", "lm_head")
# model type: lists of blocks, their class, and embedding and head where they are no units because they share a weight
FAMILIES: dict[str, tuple[list[str], str, tuple[str, ...], list[str]]] = {
    "llama": (["model.layers"], "LlamaDecoderLayer", ENDS, []),
    "mistral": (["model.layers"], "MistralDecoderLayer", ENDS, []),
    "qwen3": (["model.layers"], "Qwen3DecoderLayer", ENDS, []),
    "gemma3_text": (["model.layers"], "Gemma3DecoderLayer", (), ["lm_head.weight"]),
    "phi": (["model.layers"], "PhiDecoderLayer", ENDS, []),
    "mixtral": (["model.layers"], "MixtralDecoderLayer", ENDS, []),
    "qwen3_moe": (["model.layers"], "Qwen3MoeDecoderLayer", ENDS, []),
    "opt": (["model.decoder.layers"], "OPTDecoderLayer", (), ["lm_head.weight"]),
    "gpt_neox": (["gpt_neox.layers"], "GPTNeoXLayer", ("gpt_neox.embed_in", "lm_head"), []),
    "gpt2": (["transformer.h"], "GPT2Block", (), ["lm_head.weight"]),
    "bloom": (["transformer.h"], "BloomBlock", (), ["lm_head.weight"]),
    "bert": (
        ["bert.encoder.layer"],
        "BertLayer",
        (),
        ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"],
    ),
    "t5": (
        ["encoder.block", "decoder.block"],
        "T5Block",
        (),
        ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"],
    ),
}


class Holder(nn.Module):
    """Stands for the LightningModule around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def build(model_type: str) -> Holder:
    """A model of two blocks on meta."""
    with torch.device("meta"):
        if model_type == "t5":
            config = transformers.T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, vocab_size=10)
            model: Any = transformers.T5ForConditionalGeneration(config)
        elif model_type == "bert":
            model = transformers.BertForMaskedLM(tiny(model_type))
        else:
            model = transformers.AutoModelForCausalLM.from_config(tiny(model_type))
    model.tie_weights()
    return Holder(model)


def check_parameters(plan: UnitPlan, model: nn.Module) -> None:
    """Every parameter is in exactly one unit."""
    total = sum(p.numel() for p in model.parameters())
    assert sum(unit.num_params for unit in plan.units) == plan.num_params == total
    assert sum(unit.num_bytes for unit in plan.units) == 4 * total


def test_auto():
    for model_type, (lists, block_class, ends, tied) in FAMILIES.items():
        model = build(model_type)
        plan = plan_units(model, WrapConfig())
        blocks = [f"model.{path}.{i}" for path in lists for i in range(2)]
        assert sorted(unit.name for unit in plan.units) == sorted([*blocks, *(f"model.{end}" for end in ends), ""])
        assert {name for name, module in plan.modules.items() if module in plan.blocks} == set(blocks), model_type
        assert plan.source == f"the model's no-split classes ({block_class})"
        assert list(plan.units[-1].tied) == [f"model.{name}" for name in tied], model_type
        assert not any(unit.tied for unit in plan.units[:-1])
        assert bool(plan.kept_together) == bool(tied)
        check_parameters(plan, model)


def test_packed_experts_are_units_inside_their_blocks():
    for model_type in ("mixtral", "qwen3_moe"):
        model = build(model_type)
        plan = plan_units(model, WrapConfig(patterns=["model.layers.*", "model.layers.*.mlp.experts"]))
        plain = {unit.name: unit.num_params for unit in plan_units(model, WrapConfig()).units}
        for i in range(2):
            block = model.model.model.layers[i]
            experts = sum(param.numel() for param in block.mlp.experts.parameters())
            assert (plan.units[i].name, plan.units[i].num_params) == (f"model.model.layers.{i}.mlp.experts", experts)
            assert block.mlp.experts not in plan.blocks
            assert plan.units[i + 2].num_params == plain[f"model.model.layers.{i}"] - experts
        assert [unit.name for unit in plan.units[2:]] == list(plain)
        check_parameters(plan, model)
