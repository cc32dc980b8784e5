"""Which modules become FSDP units: plans are exact, made on meta, and do not change the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric
from transformers import LlamaConfig, PreTrainedModel

from lit_fsdp.config.strategy import WrapConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.parallel.units import UnitPlan, audit, plan_units, tied_names

AUTO = WrapConfig()
# Older transformers have no FSDP plans: the no-split classes decide.
LLAMA_SOURCE = (
    "the model's FSDP plan (model.layers.*)"
    if hasattr(PreTrainedModel, "fsdp_plan")
    else "the model's no-split classes (LlamaDecoderLayer)"
)


class Holder(nn.Module):
    """Stands for the LightningModule around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def llama(tied: bool, vocab: int = 10) -> Holder:
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=vocab,
        tie_word_embeddings=tied,
    )
    return Holder(build_on_meta(config))


LAYER = 8 * 8 * 2 + 2 * 8 * 4 + 3 * 8 * 12 + 2 * 8  # q and o, k and v, gate, up and down, two norms


def sizes(plan: UnitPlan) -> dict[str, int]:
    return {unit.name: unit.num_params for unit in plan.units}


def refused(model: nn.Module, wrap: WrapConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_units(model, wrap, "wrap")
    return caught.value


def test_what_a_transformers_model_declares():
    plan = plan_units(llama(tied=True), AUTO)
    assert sizes(plan) == {"model.model.layers.0": LAYER, "model.model.layers.1": LAYER, "": 10 * 8 + 8}
    assert plan.source == LLAMA_SOURCE
    assert plan.kept_together == ("model.model.embed_tokens", "model.lm_head")
    assert [unit.is_block for unit in plan.units] == [True, True, False]
    assert plan.units[-1].tied == ("model.lm_head.weight",)
    assert plan.num_params == 2 * LAYER + 88
    assert plan.root_share == 88 / plan.num_params


def test_an_untied_embedding_and_head_are_units_but_no_blocks():
    plan = plan_units(llama(tied=False), AUTO)
    assert sizes(plan) == {
        "model.model.layers.0": LAYER,
        "model.model.layers.1": LAYER,
        "model.model.embed_tokens": 80,
        "model.lm_head": 80,
        "": 8,
    }
    assert [unit.name for unit in plan.units if unit.is_block] == ["model.model.layers.0", "model.model.layers.1"]
    assert [type(block).__name__ for block in plan.blocks] == ["LlamaDecoderLayer"] * 2


def test_the_members_of_module_lists():
    net = nn.Module()
    net.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    net.acts = nn.ModuleList(nn.ReLU() for _ in range(3))  # nothing to shard
    net.single = nn.ModuleList([nn.Linear(3, 3)])  # a list of one repeats nothing
    plan = plan_units(net, AUTO)
    assert sizes(plan) == {"blocks.0": 12, "blocks.1": 12, "blocks.2": 12, "": 12}
    assert plan.source == "the model's module lists (Linear)"


def test_named_classes_also_inside_each_other_inner_first():
    plan = plan_units(llama(tied=True), WrapConfig(classes=["LlamaDecoderLayer", "LlamaMLP"]))
    mlp = 3 * 8 * 12
    assert list(sizes(plan).items()) == [
        ("model.model.layers.0.mlp", mlp),
        ("model.model.layers.1.mlp", mlp),
        ("model.model.layers.0", LAYER - mlp),
        ("model.model.layers.1", LAYER - mlp),
        ("", 88),
    ]
    # recomputing a block recomputes what is inside it already
    assert [type(block).__name__ for block in plan.blocks] == ["LlamaDecoderLayer"] * 2


def test_frozen_parameters_count_in_the_root_share_and_are_told_apart():
    model = llama(tied=True)
    model.model.requires_grad_(False)
    model.model.model.layers[1].mlp.requires_grad_(True)
    plan = plan_units(model, AUTO)
    assert [unit.num_trainable for unit in plan.units] == [0, 3 * 8 * 12, 0]
    assert plan.root_share == 88 / (2 * LAYER + 88)


def test_units_by_size_are_grouped_bottom_up():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(10, 10))
    assert sizes(plan_units(net, WrapConfig(min_num_params=30))) == {"1": 40, "2": 110, "": 20}
    assert sizes(plan_units(net, WrapConfig(min_num_params=20)))["0"] == 20  # exactly the size is enough
    assert sizes(plan_units(net, WrapConfig(min_num_params=1000))) == {"": 170}  # too small to be split
    with torch.device("meta"):
        large = nn.Sequential(nn.Linear(4000, 4000))
    assert refused(large, WrapConfig(min_num_params=10**8)).given.startswith(
        "units by min_num_params 100000000 leave 100% of 16,004,000 parameters in the root unit"
    )


def test_a_module_that_reads_the_weights_inside_it_is_grouped_as_a_whole():
    net = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    assert sizes(plan_units(net, WrapConfig(min_num_params=20))) == {"0": 80, "1": 20, "": 0}


def test_a_weight_used_elsewhere_keeps_its_module_out_of_the_units():
    net = nn.Module()
    net.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    net.again = nn.Linear(4, 4, bias=False)
    net.again.weight = net.blocks[1].weight
    plan = plan_units(net, AUTO)
    assert sizes(plan) == {"blocks.0": 16, "blocks.2": 16, "": 16}
    assert plan.units[-1].tied == ("again.weight",)
    assert plan.num_params == 48
    assert tied_names(net) == {"again.weight": "blocks.1.weight"}


def test_a_weight_tied_inside_one_unit_does_no_harm():
    net = nn.Module()
    net.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    net.blocks[0][1].weight = net.blocks[0][0].weight
    plan = plan_units(net, AUTO)
    assert sizes(plan) == {"blocks.0": 24, "blocks.1": 40, "": 0}
    assert plan.units[0].tied == ("blocks.0.1.weight",)


def test_a_class_that_matches_nothing_names_those_that_exist():
    error = refused(llama(tied=True), WrapConfig(classes=["LlamaDecoderLayer", "GPT2Block"]))
    assert error.field == "wrap.classes"
    assert error.given == "'GPT2Block', which matches no module"
    assert "LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel, LlamaRMSNorm" in error.allowed


def test_too_much_in_the_root_is_refused_with_the_share():
    error = refused(llama(tied=True), WrapConfig(classes=["LlamaRMSNorm"]))
    assert error.given == (
        "units by classes LlamaRMSNorm leave 96% of 1,000 parameters in the root unit "
        "(largest: model.model.layers.0.mlp.gate_proj.weight)"
    )
    assert error.allowed.startswith("at most 50% (max_root_share); classes in this model: ")
    assert "{max_root_share: 1.0} to allow it" in error.fix
    allowed = plan_units(llama(tied=True), WrapConfig(classes=["LlamaRMSNorm"], max_root_share=0.97))
    assert len(allowed.units) == 6


def test_a_model_in_which_nothing_repeats_is_one_unit_while_it_is_small():
    assert refused(nn.Sequential(nn.ReLU()), AUTO).given == "a model without parameters"
    plan = plan_units(nn.Sequential(nn.Linear(2, 2)), AUTO)
    assert sizes(plan) == {"": 6}
    assert plan.source == "nothing that repeats"
    with torch.device("meta"):
        large = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(12000, 1000), nn.ReLU())
    assert refused(large, AUTO).given.startswith("units by nothing that repeats leave 100%")


def test_what_is_tied_cannot_be_split_and_is_no_reason_to_refuse():
    model = llama(tied=True, vocab=5000)
    plan = plan_units(model, AUTO)
    assert plan.root_share > 0.9
    assert refused(model, WrapConfig(classes=["LlamaRMSNorm"])).given.startswith("units by classes LlamaRMSNorm leave")


def test_metrics_inside_do_not_disturb_the_order():
    """A metric compares equal to anything, so that list.index and remove would find the wrong module."""

    def net() -> nn.Module:
        made = nn.Module()
        made.first = MeanMetric()
        made.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), MeanMetric()) for _ in range(4))
        made.last = MeanMetric()
        return made

    plans = [plan_units(net(), AUTO) for _ in range(5)]
    assert {tuple(sizes(plan)) for plan in plans} == {("blocks.0", "blocks.1", "blocks.2", "blocks.3", "")}


def test_the_model_is_not_changed():
    model = llama(tied=True)
    before = [(name, id(module), type(module)) for name, module in model.named_modules()]
    plan_units(model, AUTO)
    assert [(name, id(module), type(module)) for name, module in model.named_modules()] == before
    assert all(param.is_meta for param in model.parameters())


def test_the_audit_is_the_plan_as_plain_data():
    plan = plan_units(llama(tied=True), AUTO)
    found = audit(plan, shard_degree=4, recompute={"model.model.layers.1": "full"})
    assert {key: value for key, value in found.items() if key != "units"} == {
        "wrapped_by": LLAMA_SOURCE,
        "kept_together_by_tied_weights": ["model.model.embed_tokens", "model.lm_head"],
        "num_params": 2 * LAYER + 88,
        "num_trainable": 2 * LAYER + 88,
        "num_units": 3,
        "root_share": 88 / (2 * LAYER + 88),
        "shard_degree": 4,
    }
    assert [row["recompute"] for row in found["units"]] == ["no", "full", "no"]
    assert found["units"][-1] == {
        "name": "(root)",
        "class": "Holder",
        "num_params": 88,
        "num_trainable": 88,
        "num_bytes": 352,
        "share": 88 / plan.num_params,
        "tied": ["model.lm_head.weight"],
        "recompute": "no",
    }
    assert sum(row["share"] for row in found["units"]) == pytest.approx(1)
