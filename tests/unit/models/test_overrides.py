"""Values of a recipe in place of a config's: what transformers makes of them, what is refused, and what is exported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.export_files import model_files
from lit_fsdp.models.overrides import check_overrides
from lit_fsdp.models.resolve import resolve_architecture, resolve_model
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.module import CausalLMModule
from tests.unit.models.conftest import fill, opened

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
YARN, LINEAR = {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LAYERS = {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 2e4}}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "rope_parameters": LAYERS}
SHORT = {"max_position_embeddings": 64, "rope_parameters": PLAIN}
LONG, BEFORE = {"max_position_embeddings": 512}, {"original_max_position_embeddings": 64}


def _rope(given):
    return {"rope_parameters": given}


# family, its config, what is given, what is in effect then
TAKEN = (
    ("llama", SHORT, {**LONG, **_rope(YARN)}, {**LONG, **_rope({**PLAIN, **YARN, **BEFORE})}),
    ("llama", SHORT, {**LONG, **_rope(LLAMA3)}, _rope({**PLAIN, **LLAMA3, **BEFORE})),
    ("llama", _rope({**PLAIN, **YARN, **BEFORE}), {**LONG, **_rope(YARN)}, _rope({**PLAIN, **YARN, **BEFORE})),
    ("llama", SHORT, {"rope_scaling": {"type": "linear", "factor": 8.0}}, _rope({**PLAIN, **LINEAR})),
    ("llama", SHORT, _rope({"rope_type": "default", "rope_theta": 1e6}), _rope({**PLAIN, "rope_theta": 1e6})),
    ("gpt_neox", _rope({**PLAIN, "partial_rotary_factor": 0.5}), _rope(LINEAR),
     _rope({**PLAIN, **LINEAR, "partial_rotary_factor": 0.5})),
    ("gemma3_text", KINDS, _rope({"full_attention": LINEAR}), _rope({**LAYERS, "full_attention": {**PLAIN, **LINEAR}})),
    ("mixtral", {}, *[{"output_router_logits": True, "router_aux_loss_coef": 0.5}] * 2),
    ("qwen2", {}, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
     {"layer_types": ["sliding_attention"] * 2}),
)  # fmt: skip
REFUSED = (
    ("llama", SHORT, {"max_positions": 8}, r"overrides\.max_positions: .*\n.*\n.*write max_position_embeddings"),
    ("llama", SHORT, {"rope_theta": 1e6}, r"overrides\.rope_theta: .*\n.*\n.*into rope_parameters"),
    ("llama", SHORT, {"model_type": "qwen2"}, r"overrides\.model_type: got a key that cannot"),
    ("gpt2", {}, _rope(LINEAR), r"a key that cannot be overridden"),
    ("llama", SHORT, {"max_position_embeddings": "long"}, "expected int, got str"),
    ("llama", SHORT, {"attention_dropout": 1.5}, "0 to 1"),
    ("llama", SHORT, {"hidden_act": "swiglu"}, r"overrides\.hidden_act: got swiglu\n.*silu"),
    ("llama", SHORT, {"hidden_act": 1}, r"overrides\.hidden_act: got 1\n.*silu"),
    ("gemma3_text", KINDS, {"layer_types": "full_attention"}, "overrides"),
    ("llama", SHORT, {"rms_norm_eps": -1.0}, r"overrides\.rms_norm_eps: got -1.0\n.*>= 0"),
    ("llama", SHORT, {"max_position_embeddings": 0}, ">= 1"),
    ("mixtral", {}, {"num_experts_per_tok": 5}, r"overrides\.num_experts_per_tok: got 5\n.*1 to 4"),
    ("aria_text", {}, {"moe_topk": 99}, "1 to 8"),
    ("mixtral", {}, {"router_aux_loss_coef": -0.1}, ">= 0"),
    ("mixtral", {}, {"router_aux_loss_coef": 0.1}, "add output_router_logits: true"),
    ("deepseek_v3", {}, {"output_router_logits": True}, "deepseek_v3 computes no router loss|cannot be overr"),
    ("llama4_text", {}, {"router_aux_loss_coef": 0.1}, "llama4_text computes no router loss"),
    ("llama", SHORT, _rope("yarn"), r"overrides\.rope_parameters: got yarn\n.*a mapping"),
    ("llama", SHORT, _rope({"full_attention": LINEAR}), "a mapping such as"),
    ("llama", SHORT, _rope({"factor": 8.0}), "Unrecognized keys .*factor"),
    ("llama", SHORT, _rope({"rope_type": "liner", "factor": 8.0}), r"rope_type: got liner\n.*default \| dynamic"),
    ("llama", SHORT, _rope({"rope_type": "default", "rope_theta": 0}), r"rope_theta: got 0\n.*> 0"),
    ("llama", SHORT, _rope({"rope_type": "linear", "factor": "8"}), "factor field must be"),
    ("llama", SHORT, _rope(LLAMA3), "must be less than max_position_embeddings"),
    ("gemma3_text", KINDS, _rope(LINEAR), "for each of full_attention, sliding_attention"),
    ("gemma3_text", KINDS, _rope({"full_attention": 8}), "for each of full_attention, sliding_attention"),
    ("llama", SHORT, {"num_hidden_layers": 3}, r"changes names, shapes.*model\.layers\.2.*\n.*\n.*random init"),
    ("llama", SHORT, {"tie_word_embeddings": False}, "changes names, shapes"),
    ("gpt2", {}, {"n_head": 2}, "shapes or meaning"),  # of which no shape tells
    ("gpt2", {}, {"n_positions": 99}, r"wpe\.weight"),
)  # fmt: skip


OF_LATER = ("gpt_neox", "expected int, got str")
"""What transformers before 5.14 does otherwise: shares of rotated dimensions, and the types of values."""
is_old = Version(transformers.__version__) < Version("5.14")


@pytest.mark.parametrize(
    ("family", "config", "given", "effect"), [c for c in TAKEN if c[0] not in OF_LATER or not is_old]
)
def test_the_model_has_them_and_keeps_the_rest(saved, tiny, family, config, given, effect):
    folder = saved(family, config=config)
    for name in (str(folder), tiny(family, **config).to_dict()):
        found = resolve_architecture(ModelConfig(name=name, config_overrides=given)).to_dict()
        assert {key: found[key] for key in effect} == effect
        others = found.keys() - {*given, *effect}
        before = resolve_architecture(ModelConfig(name=name)).to_dict()
        assert {key: found[key] for key in others} == {key: before[key] for key in others}


@pytest.mark.parametrize(
    ("family", "config", "given", "said"), [c for c in REFUSED if c[3] not in OF_LATER or not is_old]
)
def test_what_is_refused(saved, family, config, given, said):
    name = str(saved(family, config=config))
    for miniature in (False, True):
        with pytest.raises(ConfigError, match=said):
            resolve_model(ModelConfig(name=name, config_overrides=given, miniature=miniature))


def test_random_weights_have_any_shape_and_a_miniature_keeps_the_scaling(tiny):
    config = ModelConfig(name=tiny("llama", **SHORT).to_dict(), config_overrides={"num_hidden_layers": 3})
    assert resolve_architecture(config).num_hidden_layers == 3
    config = ModelConfig(name=tiny("llama", **SHORT).to_dict(), config_overrides=_rope(YARN), miniature=True)
    assert resolve_architecture(config).rope_parameters == {**PLAIN, **YARN, **BEFORE}


@pytest.mark.parametrize("given", [_rope(YARN), _rope(LINEAR), {"rms_norm_eps": 0.1}], ids=str)
def test_plain_transformers_loads_the_same_model(saved, given):
    folder, ids = saved("llama", config=SHORT), torch.arange(3, 51).reshape(1, 48)
    source, weights, meta = opened(folder, config_overrides=given)
    ours = fill(weights, meta)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    (folder / "config.json").write_bytes(model_files(source, miniature_tokenizer())["hf/config.json"])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert torch.equal(plain(ids).logits, ours(ids).logits)
    assert not torch.allclose(plain(ids).logits, before(ids).logits, atol=1e-4)


def test_a_resume_wants_those_of_the_model_and_lets_those_of_training_change(tiny):
    module = CausalLMModule(name=tiny("llama", **SHORT).to_dict(), config_overrides=_rope(LINEAR))
    manifest: Any = SimpleNamespace(extra={"model": {"config_overrides": _rope(YARN)}}, folder="step-00000002")
    with pytest.raises(ConfigError, match="as in step-00000002"):
        module.check_checkpoint(manifest)
    saved = {**_rope(YARN), "attention_dropout": 0.1}
    for now in (saved, _rope(YARN), {**_rope(YARN), "router_aux_loss_coef": 0.1}):
        check_overrides(saved, now, "step-00000002")
    check_overrides(None, _rope(YARN), "an imported one")
    for now in (None, {}, _rope(LINEAR), {**_rope(YARN), **LONG}):
        with pytest.raises(ConfigError, match=r"config_overrides: got .*\n.*yarn.*as in step-00000002.*\n.*new run"):
            check_overrides(saved, now, "step-00000002")
