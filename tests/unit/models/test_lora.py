"""Adapters and the base below them: what is trained, where values come from, which layers are kept in 4 bits."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from pathlib import Path

import peft
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.jamba import modeling_jamba

from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.sections import build
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.adapter_names import base_name
from lit_fsdp.models.build import build_on_meta, freeze_parameters
from lit_fsdp.models.lora import LoraWeights, apply_lora, apply_saved_lora, check_saved_lora
from lit_fsdp.models.quantize import apply_nf4
from lit_fsdp.models.special_layers import bypassed_layers
from lit_fsdp.parallel.units import quantized_layers
from tests.unit.models import families
from tests.unit.models.conftest import fill, opened

IDS = torch.arange(20).reshape(2, 10)


def test_the_first_logits_are_the_base_models(saved):
    for family in ("llama", "bloom", "gpt2", "gemma3_text", "mixtral"):
        folder = saved(family)
        source, base, _ = opened(folder)
        model = build_on_meta(source.hf_config, "eager")
        apply_lora(model, LoraConfig(target_modules=None if family in ("llama", "bloom") else "all-linear"))
        model = fill(LoraWeights(base, model, 5), model)
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        with torch.no_grad():  # a cache changes the layout, and with it the last bit
            assert torch.equal(*(one.eval()(IDS, use_cache=False).logits for one in (model, plain))), family
        trained = [name for name, param in model.named_parameters() if param.requires_grad]
        assert trained
        assert all(".lora_A." in name or ".lora_B." in name for name in trained)


def test_adapters_are_drawn_as_wide_as_pefts(saved):
    folder = saved("llama")
    for init, spread in (("gaussian", 1 / 8), (True, None)):
        source, base, plain = opened(folder)
        model = build_on_meta(source.hf_config, "eager")
        lora = LoraConfig(r=8, target_modules=["q_proj", "up_proj"], peft_args={"init_lora_weights": init})
        assert apply_lora(model, lora)["init_lora_weights"] == init
        adapters = [p for n, p in fill(LoraWeights(base, model, 5), model).named_parameters() if ".lora_A." in n]
        wanted = spread or (3 * plain.config.hidden_size) ** -0.5
        assert torch.cat(adapters).std().item() == pytest.approx(wanted, rel=0.1)


def test_an_unused_bitsandbytes_is_not_imported_and_is_found_later(tiny, monkeypatch):
    class Refusing:
        def find_spec(self, name, path=None, target=None):
            assert name != "bitsandbytes"

    monkeypatch.delitem(sys.modules, "bitsandbytes")
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    model = build_on_meta(tiny("llama"))
    apply_lora(model, LoraConfig())
    assert any(base_name(name) != name for name, _ in model.named_parameters())
    monkeypatch.undo()
    assert peft.import_utils.is_bnb_4bit_available()


def test_names_that_cannot_be_meant_are_refused(tiny):
    for lora, field, text in (
        ({"target_modules": ["q_projj"]}, "target_modules", "'q_projj'"),
        ({"target_modules": ["q_proj", "query"]}, "target_modules", "layers of this model: down_proj,"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", "share no weight"),
        ({"target_modules": ["norm"]}, "target_modules", "not supported"),
        ({"target_modules": "q_proj"}, "target_modules", r"write \[q_proj\], or '\.\*q_proj'"),
        ({"target_modules": ".*(q_proj|lm_head)"}, "target_modules", "'lm_head', whose weight the model uses twice"),
        ({"target_modules": "(q_proj"}, "target_modules", "missing \\)"),
        ({"peft_args": {"lora_alpha": 3}}, "peft_args.lora_alpha", "write model.lora.alpha"),
        ({"peft_args": {"rank_patern": {}}}, "peft_args.rank_patern", "write rank_pattern"),
        ({"peft_args": {"bias": "all"}}, "peft_args.bias", "name modules in modules_to_save"),
        ({"peft_args": {"init_lora_weights": "pissa"}}, "peft_args.init_lora_weights", "does not support"),
        ({"peft_args": {"init_lora_weights": False}}, "peft_args.init_lora_weights", "write true or gaussian"),
        ({"peft_args": {"ensure_weight_tying": True}}, "peft_args.ensure_weight_tying", "drop it"),
        ({"peft_args": {"rank_pattern": {"k_proj": 3}}}, "peft_args.rank_pattern", r"\['k_proj'\], which match"),
        ({"peft_args": {"layers_to_transform": [0, 9]}}, "peft_args.layers_to_transform", "that layer has no adapter"),
        ({"peft_args": {"exclude_modules": ["kk"]}, "target_modules": ["q_proj"]}, "peft_args", "no modules were"),
        ({"peft_args": {"layers_to_transform": [0]}, "target_modules": ".*q_proj"}, "peft_args", "`layers_to_tr"),
    ):
        with pytest.raises(ConfigError, match=text) as error:
            apply_lora(build_on_meta(tiny("llama")), build(LoraConfig, lora, "model.lora"))
        assert error.value.field == f"model.lora.{field}"
    for pattern, text in (("model.embed_token.*", "such as model.embed_tokens.weight"), ("*", "trainable parameters")):
        with pytest.raises(ConfigError, match=text):
            freeze_parameters(build_on_meta(tiny("llama")), [pattern])


def test_adapters_of_peft_that_would_be_another_model_are_refused():
    """Those that peft_args refuses, too; what is off, or unknown and off, is not."""
    path = Path("adapter/adapter_config.json")
    for more, name, fix in (
        ({"init_lora_weights": "pissa"}, "init_lora_weights", "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights", "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "init_lora_weights", "path_initial_model_for_weight_conversion"),
        ({"lora_bias": True}, "lora_bias", "merge the adapter with peft first"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication", "merge the adapter with peft first"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens", "merge the adapter with peft first"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices", "merge the adapter with peft first"),
        ({"bias": "lora_only"}, "bias", "merge the adapter with peft first"),
        ({"use_another_scale": True}, "use_another_scale", "merge the adapter with peft first"),
    ):
        with pytest.raises(ConfigError, match=fix) as error:
            check_saved_lora({**peft.LoraConfig().to_dict(), **more}, path)
        assert error.value.field == f"{path}: {name}"
    for init in (True, False, "gaussian"):
        of_newer = {"init_lora_weights": init, "use_another_scale": False}
        patterns = {"rank_pattern": {"q_proj": 2}, "exclude_modules": ["k_proj"], "layers_to_transform": [0]}
        own = {"r": 4, "use_dora": True, "use_rslora": True, "modules_to_save": ["norm"], "fan_in_fan_out": True}
        check_saved_lora({**peft.LoraConfig(task_type="CAUSAL_LM").to_dict(), **of_newer, **patterns, **own}, path)


def test_arguments_of_peft_choose_the_layers_that_peft_itself_chooses(tiny):
    """By names, ranks and scales, and again from the saved adapter_config.json."""
    for chosen, more in (
        (r"model\.layers\.1\..*(q|v)_proj", {}),
        (["q_proj", "up_proj"], {"layers_to_transform": [1], "layers_pattern": "layers"}),
        (["q_proj", "up_proj"], {"exclude_modules": r".*layers\.0.*"}),
        (
            ["q_proj", "up_proj"],
            {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {r"layers\.0\..*": 7}, "bias": "none"},
        ),
    ):
        ours, again = build_on_meta(tiny("llama")), build_on_meta(tiny("llama"))
        saved = apply_lora(ours, LoraConfig(r=2, target_modules=chosen, peft_args=more))
        apply_saved_lora(again, json.loads(json.dumps(saved)))
        settings = peft.LoraConfig(r=2, lora_alpha=32, target_modules=chosen, **more)
        plain = peft.LoraModel(build_on_meta(tiny("llama")), settings, "default", low_cpu_mem_usage=True).model
        found = []
        for model in (ours, again, plain):
            layers = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
            found.append({name: (m.lora_A["default"].weight.shape, m.scaling["default"]) for name, m in layers.items()})
        assert found[0]
        assert found[0] == found[1] == found[2]
    ours = build_on_meta(tiny("llama"))  # whole names would be taken in every layer
    apply_lora(ours, LoraConfig(target_modules="all-linear", peft_args={"layers_to_transform": 1}))
    names = [name for name, _ in ours.named_modules() if name.endswith("lora_A")]
    assert len(names) == 7
    assert all(".layers.1." in name for name in names)


def test_experts_in_one_tensor_are_adapted_routers_are_not(tiny, caplog):
    """What is named is adapted, in peft too after a save, and no more than that, whatever peft takes for experts."""
    of_attention, experts = (
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"},
    )
    for family, lora, wanted in (
        ("qwen3_moe", {"target_modules": "all-linear"}, {0: of_attention | experts, 1: of_attention | experts}),
        ("qwen3_moe", {"target_modules": "attention-only"}, {0: of_attention, 1: of_attention}),
        (
            "qwen3_moe",
            {"target_modules": ["q_proj", "experts.down_proj"]},
            {n: {"q_proj", *experts} - {"mlp.experts.gate_up_proj"} for n in (0, 1)},
        ),
        ("qwen3_moe", {"target_modules": ["mlp.gate.weight"]}, {n: {"mlp.gate.weight"} for n in (0, 1)}),
        (
            "qwen3_moe",
            {"target_modules": r".*layers\.1\..*(q_proj|down_proj)"},
            {1: {"q_proj", "mlp.experts.down_proj"}},
        ),
        (
            "qwen3_moe",
            {"target_modules": "all-linear", "peft_args": {"layers_to_transform": [1]}},
            {1: of_attention | experts},
        ),
        ("glm4_moe", {"target_modules": "all-linear"}, {0: of_attention, 1: of_attention | experts}),
    ):
        model, again = build_on_meta(tiny(family)), build_on_meta(tiny(family))
        saved = apply_lora(model, LoraConfig(r=2, **lora))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply_saved_lora(again, json.loads(json.dumps(saved)))
        names = [{n: p.shape for n, p in one.named_parameters() if ".lora_" in n} for one in (model, again)]
        assert names[0] == names[1]
        found = {}
        for name, module in model.named_modules():
            if hasattr(module, "lora_A"):
                place = base_name(".".join(filter(None, (name, getattr(module, "parameter_name", "")))))
                number, _, end = place.removeprefix("model.layers.").partition(".")
                found.setdefault(int(number), set()).add(end.removeprefix("self_attn."))
        assert found == wanted, (family, lora)
    assert "peft mistakes them for routed experts: mlp.down_proj, mlp.gate_proj" in caplog.text
    model = build_on_meta(tiny("qwen3_moe"))
    ranks = {"rank_pattern": {"mlp.experts.down_proj": 5}}
    apply_lora(model, LoraConfig(r=2, target_modules="all-linear", peft_args=ranks))
    assert model.model.layers[0].mlp.experts.lora_A["default"].weight.shape[0] == 5 * 4
    for family, lora, field, text in (
        ("qwen3_moe", {"dropout": 0.1}, "dropout", "drop dropout, or set target_modules: attention-only"),
        ("qwen3_moe", {"use_dora": True}, "use_dora", "peft supports it for layers only"),
        ("qwen3_moe", {"peft_args": {"exclude_modules": ["q_proj"]}}, "peft_args.exclude_modules", "layers only"),
        (
            "glm4_moe",
            {"target_modules": ["gate_proj"]},
            "target_modules",
            "name the experts' tensors: mlp.experts.down",
        ),
        ("llama", {"target_modules": ["experts.down_proj"]}, "target_modules", "'experts.down_proj'"),
        ("llama", {"target_modules": ["q_proj.weight"]}, "target_modules", "'q_proj.weight'"),
    ):
        with pytest.raises(ConfigError, match=text) as error:
            apply_lora(
                build_on_meta(tiny(family)), build(LoraConfig, {"target_modules": "all-linear", **lora}, "model.lora")
            )
        assert error.value.field == f"model.lora.{field}"


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 64}
HUNYUAN = {**SIZES, "num_key_value_heads": 4, "num_experts": 4, "moe_topk": 2, "intermediate_size": 64}
DBRX = {"d_model": 64, "n_layers": 1, "n_heads": 4, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}}


def test_routers_and_layers_whose_weight_code_uses_get_no_adapter_and_stay_whole(tiny, caplog):
    """A wrapper or packed weight around them would do something else than the model."""
    jamba = inspect.getsource(modeling_jamba)  # releases before call the layer
    time_step = {"mamba.dt_proj"} if "  time_step = self.dt_proj.weight @" in jamba else set()
    shared = {f"shared_mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}  # peft mistakes them for experts
    for config, special in (
        (AutoConfig.for_model("hunyuan_v1_moe", **HUNYUAN), {"mlp.gate.wg", *shared}),
        (
            AutoConfig.for_model("jamba", **SIZES, num_key_value_heads=4, intermediate_size=64),
            {*time_step, ".router"},
        ),
        (tiny("gemma3n_text"), {"altup.correction_coefs", "altup.prediction_coefs"}),
        (tiny("falcon_h1"), {"mamba.out_proj"}),
        (tiny("bloom"), set()),
    ):
        linears = {n for n, m in build_on_meta(config).named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
        alone = {name for name in linears if name.endswith(tuple(special))}
        assert bool(alone) == bool(special)
        for quantize in (None, "nf4"):
            model = build_on_meta(config)
            apply_lora(model, LoraConfig(target_modules="all-linear", quantize=quantize))
            adapted = {base_name(n) for n, m in model.named_modules() if hasattr(m, "lora_A")}
            assert linears - adapted == alone, config.model_type
            whole = linears - {base_name(name) for name in quantized_layers(model)}
            kept = {name for name in alone if not name.endswith(tuple(shared))}
            assert whole == (kept if quantize else linears), config.model_type
    name = "mamba.dt_proj" if time_step else "mamba.out_proj"
    assert f"code uses their weight directly: {name}" in caplog.text


class Own(nn.Module):
    """Uses one weight in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
        nn.init.zeros_(self.q.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.k.weight, nn.Parameter):  # self.q.weight is not used
            x = self.k(x.to(self.q.weight.dtype))
        return self.q(nn.functional.linear(x, self.v.weight))


def test_only_weights_that_a_forward_pass_uses_count():
    assert bypassed_layers(nn.ModuleDict({"own": Own()})) == {"own.v"}


def test_experts_that_cannot_be_adapted_or_packed_are_refused_by_name():
    dbrx = AutoConfig.for_model("dbrx", **DBRX)
    for lora, fix in (({"target_modules": "all-linear"}, "write attention-only"), ({"quantize": "nf4"}, "drop quant")):
        with pytest.raises(ConfigError, match=f"for dbrx, whose experts are neither layers(?s:.*){fix}"):
            apply_lora(build_on_meta(dbrx), build(LoraConfig, lora, "model.lora"))
    apply_lora(build_on_meta(dbrx), LoraConfig(target_modules="attention-only"))
    model = build_on_meta(families.tiny("gpt_oss"))
    with pytest.raises(ConfigError, match=r"mlp.experts.down_proj_bias'\], which is no weight of experts"):
        apply_lora(model, LoraConfig(target_modules=["q_proj", "experts.down_proj_bias"]))
    if "laguna" in families.FAMILIES:  # transformers 5.3 lacks it
        with pytest.raises(ConfigError, match="up_proj, which peft would not find in the adapter's folder"):
            apply_lora(build_on_meta(families.tiny("laguna")), LoraConfig(target_modules=["up_proj"]))
    with pytest.raises(ConfigError, match="write q_proj"):
        apply_lora(build_on_meta(families.tiny("llama")), LoraConfig(target_modules=["qproj"]))


def test_linear_layers_but_the_head_and_what_is_trained_whole_are_packed(tiny):
    model = build_on_meta(tiny("llama"))
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    lora = LoraConfig(quantize="nf4", target_modules=["q_proj"], modules_to_save=["down_proj"], dropout=0.25)
    apply_lora(model, lora)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}
    found = {name.replace(".base_layer", ""): layer for name, layer in quantized_layers(model).items()}
    assert set(found) == {name for name in linears if name != "lm_head" and "down_proj" not in name}


def test_what_cannot_be_quantized_is_refused(tiny, monkeypatch):
    with pytest.raises(ConfigError, match="nf4 for GPT2LMHeadModel, which has no linear layer except the head"):
        apply_nf4(build_on_meta(tiny("gpt2")), [], False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'lit-fsdp\[qlora\]'"):
        apply_nf4(build_on_meta(tiny("llama")), [], False)
