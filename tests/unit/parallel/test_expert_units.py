"""Which experts ranks can divide, who holds which, and what is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.strategy import StrategyConfig, check_quantized, mesh_shape
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.parallel.expert_units import check_experts, held_experts
from lit_fsdp.parallel.units import plan_for
from tests.unit.models.families import tiny


def _model(family: str, **changes: Any) -> Any:
    config = tiny(family)
    config.update(changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("experts", "shards"), [(8, 2), (8, 4), (8, 8), (8, 16), (6, 4), (7, 4), (8, 6), (128, 32)])
def test_each_expert_is_held_by_the_ranks_whose_rows_it_is_in(experts: int, shards: int):
    model, rows = _model("qwen3_moe", num_experts=experts), torch.arange(experts).chunk(shards)
    rows = [*rows, *[torch.arange(0)] * (shards - len(rows))]
    fits = []
    for degree in (n for n in range(2, shards + 1) if shards % n == 0):
        held = held_experts(experts, shards, degree)
        assert sorted(expert for own in held for expert in own) == list(range(experts))
        gathered = [torch.cat(rows[place::degree]) for place in range(degree)]
        assert [own.tolist() for own in gathered] == held
        # torch splits what a rank gathers into as many rows as its like have of all experts
        parts = [[len(part) for part in own.chunk(shards // degree)] for own in gathered]
        wanted = [[len(part) for part in rows[place::degree] if len(part)] for place in range(degree)]
        if parts == wanted and all(held):
            check_experts(model, degree, shards, "here")
            fits.append(degree)
        else:
            with pytest.raises(ConfigError, match=f"here: got {degree} for qwen3_moe, with {experts} experts over"):
                check_experts(model, degree, shards, "here")
    assert fits == {(6, 4): [], (7, 4): [2, 4], (8, 16): [2, 4, 8], (8, 6): [2]}.get((experts, shards), fits)


def test_what_cannot_be_divided_is_refused_by_name():
    for family, changes, text in (
        ("llama", {}, "2 for llama, which has no such experts"),
        ("llama4_text", {}, "2 for llama4_text, which has no such experts"),
        ("qwen3_moe", {"experts_implementation": "eager"}, "whose experts use eager"),
    ):
        model = _model(family)
        if changes:
            model.set_experts_implementation(changes["experts_implementation"])
        with pytest.raises(ConfigError) as refused:
            check_experts(model, 2, 4, "trainer.strategy.init_args.expert_parallel")
        assert text in str(refused.value)
        assert "fix:     drop expert_parallel" in str(refused.value)
    copied = _model("qwen3_moe")
    apply_lora(copied, LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp.experts"]))
    with pytest.raises(ConfigError, match="2 for qwen3_moe, with a trained copy of its experts"):
        check_experts(copied, 2, 4, "here")
    for given, text in (
        ({"engine": "fsdp1"}, "2 with fsdp1"),
        ({"engine": "ddp"}, "2 with ddp"),
        ({"sharding": "no_shard"}, "2 with no_shard"),
        ({"compile": True}, "2 with compile: true"),
        ({"wrap": "manual"}, "2 with wrap: manual"),
        ({"expert_parallel": 0}, "got 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            StrategyConfig(**{"expert_parallel": 2, **given})
    config = StrategyConfig(expert_parallel=2)
    with pytest.raises(ConfigError, match=r"here\.expert_parallel: got 2 on 3 ranks"):
        mesh_shape(config, 1, 3, "here")
    with pytest.raises(ConfigError, match=r"2 with model\.lora\.quantize"):
        check_quantized(config, "here")


def test_degrees_that_do_not_fit_the_ranks_are_named_with_one_that_does():
    for given, text in (
        ({"replicate_degree": 3}, "replicate_degree: got 3 on 4 ranks\n  allowed: a divisor of the ranks: 1, 2, 4"),
        ({"shard_degree": 8}, "shard_degree: got 8 on 4 ranks\n  allowed: a divisor of the ranks: 1, 2, 4"),
        ({"shard_degree": 3, "context_parallel": 4}, "shard_degree: got 3 on 4 ranks"),  # 2 would not do
        ({"replicate_degree": 2, "shard_degree": 4}, "shard_degree: got 4 with replicate_degree 2 on 4 ranks"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(text)}") as caught:
            mesh_shape(StrategyConfig(sharding="hybrid_shard", **given), 1, 4)
        if not caught.value.fix:
            continue
        name, _, value = caught.value.fix.removeprefix("set ").partition(": ")
        assert int(value) > 1
        assert mesh_shape(StrategyConfig(sharding="hybrid_shard", **{**given, name: int(value)}), 1, 4)
    assert mesh_shape(StrategyConfig(sharding="hybrid_shard", shard_degree=2), 1, 4) == (2, 2)


def test_divided_experts_are_units_of_their_own():
    model = _model("qwen3_moe")
    plain, divided = (plan_for(model, StrategyConfig(expert_parallel=n), "here") for n in (1, 2))
    names = {unit.name for unit in divided.units} - {unit.name for unit in plain.units}
    assert names == {name for name, _ in model.named_modules() if name.endswith("mlp.experts")}
    assert divided.num_params == plain.num_params
    assert divided.blocks == plain.blocks
