"""Which modules become FSDP units, of every model family: plans are exact, made on meta, and change no model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig

from lit_fsdp.config.model import OptimConfig
from lit_fsdp.config.strategy import StrategyConfig, WrapConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.parallel.materialize import Materializer, check_memory, reset_parameters_reader
from lit_fsdp.parallel.units import UnitPlan, plan_for, plan_units
from tests.unit.models.families import tiny

AUTO = WrapConfig()
LAYER = 8 * 8 * 2 + 2 * 8 * 4 + 3 * 8 * 12 + 2 * 8  # q and o, k and v, gate, up and down, two norms
MLP = 3 * 8 * 12
LAYERS = ["model.model.layers.0", "model.model.layers.1"]
ENDS = ["model.model.embed_tokens", "model.lm_head"]


class Holder(nn.Module):
    """Stands for the LightningModule around these parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self._modules.update(parts)


class Block(nn.Module):
    """Twelve parameters and somewhere to call them."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Linear(3, 3)

    def forward(self, x: object) -> object:
        return self.inner(x)


def llama(tied: bool, vocab: int = 10) -> Holder:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=vocab, tie_word_embeddings=tied)
    return Holder(model=build_on_meta(config))


def sizes(plan: UnitPlan) -> dict[str, int]:
    return {unit.name: unit.num_params for unit in plan.units}


def refused(model: nn.Module, wrap: WrapConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan_units(model, wrap, "wrap")
    return caught.value


def test_untied_embedding_and_head_are_units_of_their_own_or_not():
    for wrap, ends in (
        (WrapConfig(classes=["LlamaDecoderLayer"]), set(ENDS)),
        (WrapConfig(classes=["LlamaDecoderLayer"], embedding_and_head=False), set()),
        (WrapConfig(min_num_params=10**9, max_root_share=1.0), set()),
        (WrapConfig(min_num_params=10**9, max_root_share=1.0, embedding_and_head=True), set(ENDS)),
    ):
        assert set(sizes(plan_units(llama(tied=False), wrap))).intersection(ENDS) == ends


def test_lists_of_modules():
    """Their members are the units: of the outermost list, in which several modules hold parameters."""
    blocks = nn.ModuleList([Block(Holder(inner=nn.ModuleList([Block(), Block()]))), Block()])
    stages = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    mlp = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    for parts, wanted in (
        ({"blocks": nn.ModuleList(nn.Linear(3, 3) for _ in range(3))}, ["blocks.0", "blocks.1", "blocks.2"]),
        ({"acts": nn.ModuleList(nn.ReLU() for _ in range(3)), "one": nn.ModuleList([nn.Linear(3, 3)])}, []),
        ({"net": nn.Sequential(Block(), Block()), "mlp": mlp}, ["net.0", "net.1"]),  # all of one class
        ({"layers": blocks}, ["layers.0", "layers.1"]),
        ({"stages": stages}, ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]),  # a list is never called
    ):
        assert list(sizes(plan_units(Holder(**parts), AUTO))) == [*wanted, ""]
    assert plan_units(Holder(net=nn.Sequential(Block(), Block())), AUTO).source == "the model's module lists (Block)"


def test_classes_and_patterns():
    """Also inside each other, inner ones first; a star is one part or the rest of one."""
    mlps = [f"{layer}.mlp" for layer in LAYERS]
    plan = plan_units(llama(tied=True), WrapConfig(classes=["LlamaDecoderLayer", "LlamaMLP"]))
    assert list(sizes(plan).items()) == [(n, MLP) for n in mlps] + [(n, LAYER - MLP) for n in LAYERS] + [("", 88)]
    assert [type(block).__name__ for block in plan.blocks] == ["LlamaDecoderLayer"] * 2  # not what is inside them
    wrap = WrapConfig(patterns=["model.layers.*.mlp", "lm_head"], classes=["LlamaDecoderLayer"])
    plan = plan_units(llama(tied=False), wrap)
    assert set(sizes(plan)) == {*mlps, *LAYERS, *ENDS, ""}
    assert plan.source == "classes ['LlamaDecoderLayer'], patterns ['model.layers.*.mlp', 'lm_head']"
    assert [name for name, module in plan.modules.items() if module in plan.blocks] == LAYERS
    wrap = WrapConfig(patterns=["model.layers.1.mlp.*_proj"], max_root_share=1.0, embedding_and_head=False)
    found = list(sizes(plan_units(llama(tied=False), wrap)))
    assert found == [*(f"model.model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")), ""]


def test_what_matches_nothing_names_what_exists():
    for wrap, name, allowed in (
        (WrapConfig(classes=["LlamaMLP", "GPT2Block"]), "GPT2Block", "LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP"),
        (WrapConfig(classes=["ModuleList"]), "ModuleList", "LlamaDecoderLayer"),  # never called itself
        (WrapConfig(patterns=["model.layer.*"]), "model.layer.*", "model.model.layers.*.self_attn"),
        (WrapConfig(patterns=["model.layers.*.mlp.act_fn"]), "model.layers.*.mlp.act_fn", "model.lm_head"),
    ):
        error = refused(llama(tied=True), wrap)
        assert error.field == ("wrap.classes" if wrap.classes else "wrap.patterns")
        assert error.given == f"{name!r}, which matches no module with parameters and a forward"
        assert allowed in error.allowed
    assert refused(llama(tied=True), WrapConfig(manual=True)).given == "manual, but nothing in the model is wrapped"


def test_units_by_size_are_grouped_bottom_up():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(10, 10))
    assert sizes(plan_units(net, WrapConfig(min_num_params=30))) == {"1": 40, "2": 110, "": 20}
    assert sizes(plan_units(net, WrapConfig(min_num_params=20)))["0"] == 20  # exactly the size is enough
    assert sizes(plan_units(net, WrapConfig(min_num_params=1000))) == {"": 170}  # too small to be split
    reads = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))  # the weights inside it, without calling them
    assert sizes(plan_units(reads, WrapConfig(min_num_params=20))) == {"0": 80, "1": 20, "": 0}


def test_tied_weights_stay_in_the_unit_around_all_their_users():
    outside = Holder(blocks=nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)))
    outside.again = nn.Linear(4, 4, bias=False)
    outside.again.weight = outside.blocks[1].weight
    plan = plan_units(outside, AUTO)
    assert sizes(plan) == {"blocks.0": 16, "blocks.2": 16, "": 16}
    assert (plan.units[-1].tied, plan.num_params) == (["again.weight"], 48)
    inside = Holder(blocks=nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))
    inside.blocks[0][1].weight = inside.blocks[0][0].weight
    plan = plan_units(inside, AUTO)
    assert sizes(plan) == {"blocks.0": 24, "blocks.1": 40, "": 0}
    assert plan.units[0].tied == ["blocks.0.1.weight"]


def test_too_much_in_the_root_is_refused_with_the_share():
    """What nobody chose by name only from ten million parameters on; what is tied has to stay there."""
    error = refused(llama(tied=True), WrapConfig(classes=["LlamaRMSNorm"]))
    assert error.given == "units by classes ['LlamaRMSNorm'], which leave 96% of 1,000 parameters in the root unit"
    assert error.allowed.startswith("at most 50% (max_root_share); classes in this model: ")
    allowed = plan_units(llama(tied=True), WrapConfig(classes=["LlamaRMSNorm"], max_root_share=0.97))
    assert len(allowed.units) == 6
    tied = plan_units(llama(tied=True, vocab=5000), AUTO)
    assert tied.units[-1].num_params > 0.9 * tied.num_params
    small = plan_units(nn.Sequential(nn.Linear(2, 2)), AUTO)
    assert (sizes(small), small.source) == ({"": 6}, "default (no repeated blocks)")
    large = nn.Sequential(nn.Linear(4000, 4000, device="meta"))
    given = refused(large, AUTO).given
    assert given == "units by default (no repeated blocks), which leave 100% of 16,004,000 parameters in the root unit"


def test_units_inside_blocks_cannot_be_compiled():
    config = StrategyConfig(wrap=["model.layers.*", "model.layers.*.mlp"], compile=True)
    with pytest.raises(ConfigError, match="2 FSDP units inside blocks"):
        plan_for(llama(tied=False), config, "strategy")


OWN = ("model.embed_tokens", "lm_head")
_T5_SHARES = ("decoder.embed_tokens.weight", "lm_head.weight")
# model type: lists of blocks, their class, and embedding and head where they are units, or share a weight
FAMILIES: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "llama": ("model.layers", "LlamaDecoderLayer", OWN, ()),
    "gemma3_text": ("model.layers", "Gemma3DecoderLayer", (), ("lm_head.weight",)),
    "mixtral": ("model.layers", "MixtralDecoderLayer", OWN, ()),
    "gpt_neox": ("gpt_neox.layers", "GPTNeoXLayer", ("gpt_neox.embed_in", "lm_head"), ()),
    "gpt2": ("transformer.h", "GPT2Block", (), ("lm_head.weight",)),
    "t5": ("encoder.block decoder.block", "T5Block", (), ("encoder.embed_tokens.weight", *_T5_SHARES)),
}


def build(model_type: str) -> Holder:
    """A model of two blocks on meta."""
    with torch.device("meta"):
        if model_type == "t5":
            config = transformers.T5Config(d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, vocab_size=10)
            model: Any = transformers.T5ForConditionalGeneration(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(tiny(model_type))
    model.tie_weights()
    return Holder(model=model)


def test_auto():
    for model_type, (lists, block_class, ends, tied) in FAMILIES.items():
        model = build(model_type)
        plan = plan_units(model, AUTO)
        if not hasattr(model.model, "lm_head"):  # GPT-NeoX before transformers 5.14
            ends = tuple(end.replace("lm_head", "embed_out") for end in ends)
        blocks = [f"model.{path}.{i}" for path in lists.split() for i in range(2)]
        assert sorted(unit.name for unit in plan.units) == sorted([*blocks, *(f"model.{end}" for end in ends), ""])
        assert {name for name, module in plan.modules.items() if module in plan.blocks} == set(blocks), model_type
        assert plan.source == f"the model's no-split classes ({block_class})"
        assert plan.units[-1].tied == [f"model.{name}" for name in tied], model_type
        assert not any(unit.tied for unit in plan.units[:-1])
        assert bool(plan.kept_together) == bool(tied)
        assert all(param.is_meta for param in model.parameters())
        total = sum(p.numel() for p in model.parameters())  # each in exactly one unit
        assert sum(unit.num_params for unit in plan.units) == plan.num_params == total
        assert sum(unit.num_bytes for unit in plan.units) == 4 * total


def test_a_module_without_reset_parameters_is_named():
    net = nn.Sequential(Holder())
    net[0].scale = nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match=r"^0 \(Holder\) is on meta and has no reset_parameters"):
        Materializer(net, reset_parameters_reader(0), torch.device("cpu")).fill(net[0])


def test_slow_loading_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, *[16.0] * 3, *[20.0] * 1000])
    monkeypatch.setattr("lit_fsdp.parallel.materialize.time.monotonic", lambda: next(times))
    caplog.set_level("INFO")
    model = llama(tied=True)
    read = lambda name, module, attribute, rows: torch.zeros(getattr(module, attribute).shape)  # noqa: E731
    Materializer(model, read, torch.device("cpu")).fill_all()
    count = sum(1 for _ in model.parameters())
    said = [one.getMessage() for one in caplog.records if "loading" in one.getMessage()]
    assert said == [f"loading weights: 1 of {count} parameters"]


@pytest.mark.parametrize(
    ("optim", "copies", "kinds"),
    [
        (None, 1, "parameters"),
        (OptimConfig(), 4, "parameters, gradients and optimizer state"),
        (OptimConfig(optimizer="torch.optim.SGD"), 2, "parameters and gradients"),  # momentum or none
    ],
)
def test_state_larger_than_the_memory_is_refused_before_loading(
    optim: OptimConfig | None, copies: int, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(tied=False)
    head = model.get_parameter("model.lm_head.weight").requires_grad_(False)
    frozen, numbers = head.numel(), sum(p.numel() for p in model.parameters())
    needed = 4 * (frozen + copies * (numbers - frozen))
    ranks = 2
    for memory, fits in ((needed, True), (needed - ranks, False)):
        monkeypatch.setattr("lit_fsdp.parallel.materialize.host_bytes", lambda memory=memory: memory - 8)
        monkeypatch.setattr("lit_fsdp.parallel.materialize.swap_bytes", lambda: 8)
        # the ranks of a host share its memory, as they share the state; a replica on each needs twice as much
        for shards in (ranks, 1):
            given = (model, shards, torch.device("cpu"), ranks, optim)
            if fits and shards == ranks:
                check_memory(*given)
                continue
            with pytest.raises(ConfigError, match=f"of {kinds} per rank\n.*divided by its 2 ranks"):
                check_memory(*given)
