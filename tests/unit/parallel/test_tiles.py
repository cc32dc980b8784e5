"""Feed-forward layers in tiles: the same loss and gradients, whatever is inside of them, and which layers are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.strategy import ActivationConfig, StrategyConfig, WrapConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.parallel.activation import prepare_blocks, recomputes
from lit_fsdp.parallel.tiles import apply_tiles
from lit_fsdp.parallel.units import plan_units
from tests.unit.models.families import tiny

FULL, TILED = ActivationConfig(mode="full"), ActivationConfig(mode="full", tiles=3)
IDS = torch.arange(3, 40)[None]  # 37 tokens: tiles of 13, 13 and 11


def built(family: str, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny(family)).to(dtype).train()
    if lora is not None:
        apply_lora(model, lora)
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if param.is_meta:
                    setattr(module, name, nn.Parameter(torch.randn(param.shape)))
    return model, plan_units(model, WrapConfig(max_root_share=1.0)).blocks


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(input_ids=IDS, use_cache=False).logits.float().square().mean()
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).norm() / one[n].norm().clamp(min=1e-6)) for n in one)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "gpt_neox", "phi3"])
def test_loss_and_gradients_are_the_same(family: str) -> None:
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        model, blocks = built(family, dtype)
        for drop in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            drop.p = 0.0
        prepare_blocks(blocks, FULL)
        whole = gradients(model)
        for offload in (False, True):
            prepare_blocks(blocks, ActivationConfig(mode="full", tiles=3, offload_activations=offload))
            assert {recomputes(block).removesuffix(", offloaded") for block in blocks} == {"full, 3 tiles"}
            assert furthest(whole, gradients(model)) < most
        prepare_blocks(blocks, FULL)
        assert furthest(whole, gradients(model)) == 0  # nothing of it is left


def test_adapters_with_dropout_draw_the_same_when_they_are_computed_again() -> None:
    model, blocks = built("llama", lora=LoraConfig(r=4, target_modules="all-linear", dropout=0.3))
    for block in blocks:
        assert apply_tiles(block, 3)
    once = gradients(model)
    prepare_blocks(blocks, TILED)
    assert furthest(once, gradients(model)) == 0
    assert any("mlp.up_proj.lora_A" in name for name in once)


def test_what_is_inside_exists_for_one_tile_at_a_time() -> None:
    model, blocks = built("llama")
    rows: list[int] = []
    for block in blocks:
        block.mlp.act_fn.register_forward_hook(lambda module, args, output: rows.append(output.shape[-2]))
    for config, most in ((FULL, {37}), (TILED, {13, 11})):
        prepare_blocks(blocks, config)
        rows.clear()
        gradients(model)
        assert {*rows} == most


def test_mixtures_and_layers_that_take_more_are_left_alone() -> None:
    for family, wanted in (("deepseek_v3", ["full, 3 tiles", "full"]), ("mixtral", None), ("opt", None)):
        _, blocks = built(family)
        if wanted is None:
            with pytest.raises(ConfigError, match=r"here\.tiles: got 3, but no block .*Attention.*\n.*without experts"):
                prepare_blocks(blocks, TILED, path="here")
            continue
        prepare_blocks(blocks, TILED)
        assert [recomputes(block) for block in blocks] == wanted


def test_what_rules_tiles_out() -> None:
    for options in ({"mode": "selective", "tiles": 2}, {"tiles": 2}, {"mode": "full", "tiles": 1}):
        with pytest.raises(ConfigError, match=r"tiles: got \d with mode"):
            ActivationConfig(**options)
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.tiles: got 3 with compile: true"):
        StrategyConfig(activation_checkpointing=TILED, compile=True)
