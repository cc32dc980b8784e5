"""Units named in the recipe, and what auto finds in modules of other people."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from lit_fsdp.config.strategy import WrapConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.parallel.units import UnitPlan, engines_already_there, plan_units, units_already_wrapped


class Holder(nn.Module):
    """Somebody's module with these parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Block(nn.Module):
    """Twelve parameters and somewhere to call them."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(3, 3)

    def forward(self, x: object) -> object:
        return self.inner(x)


class Mixture(nn.Module):
    """Experts in a list or a dict beside a router."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(3, 2)
        self.experts = experts

    def forward(self, x: object) -> object:
        return x


class Packed(nn.Module):
    """Experts in one weight, and a child without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.zeros(2, 3, 3)), nn.SiLU()

    def forward(self, x: object) -> object:
        return x


def llama() -> Holder:
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=10,
    )
    return Holder(model=build_on_meta(config))


def names(plan: UnitPlan) -> list[str]:
    return [unit.name for unit in plan.units]


def refused(model: nn.Module, wrap: WrapConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_units(model, wrap, "wrap")
    return caught.value


def test_several_patterns_and_classes_together():
    wrap = WrapConfig(patterns=["model.layers.*.mlp", "lm_head"], classes=["LlamaDecoderLayer"])
    plan = plan_units(llama(), wrap)
    layers = ["model.model.layers.0", "model.model.layers.1"]
    assert set(names(plan)) == {*(f"{x}.mlp" for x in layers), *layers, "model.model.embed_tokens", "model.lm_head", ""}
    assert plan.source == "classes LlamaDecoderLayer, patterns model.layers.*.mlp, lm_head"
    assert [unit.name for unit in plan.units if unit.is_block] == layers  # not the head, not what is inside


def test_a_star_is_one_part_or_the_rest_of_one():
    wrap = WrapConfig(patterns=["model.layers.1.mlp.*_proj"], max_root_share=1.0, embedding_and_head=False)
    found = names(plan_units(llama(), wrap))
    assert found == [*(f"model.model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")), ""]


def test_a_star_below_packed_experts_means_the_experts():
    packed = Packed()
    model = Holder(layers=nn.ModuleList([Block(packed), Block()]))
    plan = plan_units(model, WrapConfig(patterns=["layers.*", "layers.0.inner.*"]))
    assert names(plan) == ["layers.0.inner", "layers.0", "layers.1", ""]


def test_a_pattern_that_matches_nothing_says_how_far_it_does():
    for pattern, allowed in (
        (
            "model.layers.*.mlp.experts.*",
            "model.layers.*.mlp matches 2 (model.model.layers.0.mlp, …); "
            "below it: act_fn, down_proj, gate_proj, up_proj",
        ),
        ("model.layer.*", "model matches 1 (model.model, …); below it: embed_tokens, layers, norm, rotary_emb"),
        ("transformer.h.*", "at the top of the model; below it: lm_head, model"),
    ):
        error = refused(llama(), WrapConfig(patterns=["model.layers.*", pattern]))
        assert error.field == "wrap.patterns"
        assert error.given == f"{pattern!r}, which matches no module"
        assert error.allowed == allowed


def test_what_can_be_no_unit_is_refused():
    for wrap, given in (
        (WrapConfig(patterns=["model.layers"]), "'model.layers', which matches only a ModuleList, never called itself"),
        (
            WrapConfig(patterns=["model.layers.*.mlp.act_fn"]),
            "'model.layers.*.mlp.act_fn', which matches no parameters",
        ),
        (WrapConfig(classes=["ModuleList"]), "'ModuleList', which matches only a ModuleList, never called itself"),
    ):
        assert refused(llama(), wrap).given == given


@pytest.mark.parametrize("pattern", ["model..mlp", ".model", "model.**", "model."])
def test_paths_with_holes_are_refused(pattern: str):
    with pytest.raises(ConfigError, match="in which \\* is one part"):
        WrapConfig(patterns=[pattern])


@pytest.mark.parametrize(
    "experts",
    [
        nn.ModuleList(nn.Linear(3, 3) for _ in range(2)),
        nn.ModuleDict({"0": nn.Linear(3, 3), "1": nn.Linear(3, 3)}),
    ],
)
def test_experts_in_a_list_are_units_one_by_one(experts: nn.Module):
    model = Holder(layers=nn.ModuleList([Block(Mixture(experts)), Block()]))
    plan = plan_units(model, WrapConfig(experts=True))
    assert names(plan) == ["layers.0.inner.experts.0", "layers.0.inner.experts.1", "layers.0", "layers.1", ""]
    assert [unit.num_params for unit in plan.units] == [12, 12, 8, 12, 0]
    assert [unit.is_block for unit in plan.units] == [False, False, True, True, False]
    assert plan.source == "the model's module lists (Block), experts"


def test_a_model_without_experts_says_so():
    error = refused(llama(), WrapConfig(experts=True))
    assert error.field == "wrap.experts"
    assert error.given == "true, but the model has no module called experts that holds parameters"
    assert "LlamaDecoderLayer" in error.allowed


def test_a_sequential_of_one_class_repeats_too():
    model = Holder(net=nn.Sequential(Block(), Block()), mlp=nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)))
    plan = plan_units(model, WrapConfig())
    assert names(plan) == ["net.0", "net.1", ""]
    assert plan.source == "the model's module lists (Block)"


def test_lists_inside_lists_the_outer_one_counts():
    inner = nn.ModuleList([Block(), Block()])
    holding = Block(Holder(inner=inner))
    plan = plan_units(Holder(layers=nn.ModuleList([holding, Block()])), WrapConfig())
    assert names(plan) == ["layers.0", "layers.1", ""]
    # a list of lists is never called itself
    bare = Holder(stages=nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])]))
    assert names(plan_units(bare, WrapConfig())) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", ""]


def test_a_small_list_beside_a_large_one_stays_in_the_root():
    model = Holder(
        encoder=nn.ModuleList(nn.Linear(10, 10) for _ in range(3)),
        decoder=nn.ModuleList(nn.Linear(10, 10) for _ in range(2)),
        norms=nn.ModuleList(nn.LayerNorm(2) for _ in range(3)),
    )
    plan = plan_units(model, WrapConfig())
    assert names(plan) == ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "decoder.1", ""]
    assert plan.units[-1].num_params == 12


class Planned(nn.Module):
    """Declares a plan and no-split classes as transformers models do."""

    def __init__(self, plan: dict[str, str], no_split: list[str]) -> None:
        super().__init__()
        self.fsdp_plan, self._no_split_modules = plan, no_split
        self.layers = nn.ModuleList([Block(), Block()])
        self.tower = nn.ModuleList([Mixture(nn.Linear(3, 3)), Mixture(nn.Linear(3, 3))])
        self.embed, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


PLAN = {"layers.*": "free_full_weight", "embed": "free_full_weight", "norm": "keep_full_weight", "gone": "free"}


def test_a_plan_gives_blocks_and_what_it_frees_but_no_unit_to_what_it_keeps():
    plan = plan_units(Planned(PLAN, ["Block"]), WrapConfig(max_root_share=0.7))
    assert names(plan) == ["layers.0", "layers.1", "embed", ""]
    assert [unit.is_block for unit in plan.units] == [True, True, False, False]
    assert plan.source == "the model's FSDP plan (layers.*)"


def test_a_plan_that_forgets_blocks_is_not_used():
    plan = plan_units(Planned(PLAN, ["Block", "Mixture"]), WrapConfig())
    assert names(plan) == ["layers.0", "layers.1", "tower.0", "tower.1", ""]
    assert plan.source == "the model's no-split classes (Block, Mixture)"


def test_a_plan_whose_blocks_do_not_exist_is_not_used():
    plan = plan_units(Planned({"h.*": "free_full_weight", "embed": "free_full_weight"}, []), WrapConfig())
    assert names(plan) == ["layers.0", "layers.1", "tower.0", "tower.1", ""]
    assert plan.source == "the model's module lists (Block, Mixture)"


def test_nothing_is_wrapped_yet():
    model = llama()
    assert units_already_wrapped(model) == {}
    assert engines_already_there(model) == set()
    error = refused(model, WrapConfig(manual=True))
    assert error.given == "manual, but nothing in the model is wrapped"
