"""What is a unit beside the named ones, and what is recomputed and compiled whatever the units are."""

from __future__ import annotations

import re

import pytest

from lit_fsdp.config.parser import strategy_config
from lit_fsdp.config.strategy import ActivationConfig, WrapConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.activation import prepare_blocks, recompute_by_unit
from lit_fsdp.parallel.units import plan_for, plan_units
from tests.unit.parallel.test_units_choice import llama, names


@pytest.mark.parametrize(
    ("wrap", "ends"),
    [
        (WrapConfig(classes=["LlamaDecoderLayer"]), True),
        (WrapConfig(classes=["LlamaDecoderLayer"], embedding_and_head=False), False),
        (WrapConfig(patterns=["model.layers.*"]), True),
        (WrapConfig(embedding_and_head=False), False),
        (WrapConfig(min_num_params=10**9, max_root_share=1.0), False),
        (WrapConfig(min_num_params=10**9, max_root_share=1.0, embedding_and_head=True), True),
    ],
)
def test_untied_embedding_and_head_are_units_of_their_own(wrap: WrapConfig, ends: bool):
    found = set(names(plan_units(llama(), wrap)))
    assert found.issuperset({"model.model.embed_tokens", "model.lm_head"}) is ends
    assert not found.intersection({"model.model.embed_tokens", "model.lm_head"}) or ends


@pytest.mark.parametrize(
    "wrap",
    [
        WrapConfig(patterns=["model.layers.*.mlp"], max_root_share=1.0),
        WrapConfig(classes=["LlamaMLP"], max_root_share=1.0),
        WrapConfig(min_num_params=1),
        WrapConfig(min_num_params=10**9, max_root_share=1.0),
        WrapConfig(classes=["LlamaModel"], max_root_share=1.0),
    ],
)
def test_blocks_are_recomputed_whatever_the_units_are(wrap: WrapConfig):
    model = llama()
    plan = plan_units(model, wrap)
    assert list(plan.blocks) == list(model.model.model.layers)
    prepare_blocks(plan.blocks, ActivationConfig(mode="full"))
    words = recompute_by_unit(plan)
    for unit in plan.units:
        inside = re.match(r"model\.model\.layers\.\d", unit.name)
        around = unit.name == ("model.model" if wrap.classes == ["LlamaModel"] else "")
        expected = "full" if inside else "2 blocks full" if around else "no"
        assert words.get(unit.name, "no") == expected, unit.name


def test_units_inside_blocks_cannot_be_compiled():
    config = strategy_config({"wrap": ["model.layers.*", "model.layers.*.mlp"], "compile": True})
    with pytest.raises(ConfigError, match="2 FSDP units inside blocks") as caught:
        plan_for(llama(), config, "strategy")
    assert caught.value.field == "strategy.compile"
