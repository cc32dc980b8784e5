"""What a model name may be, and what is said when it is none of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models import hub
from lit_fsdp.models.build import build_on_meta, num_parameters
from lit_fsdp.models.miniature import shipped_config
from lit_fsdp.models.resolve import resolve_architecture, resolve_model
from lit_fsdp.models.tokenizers import load_tokenizer, miniature_tokenizer
from tests.unit.models import families


def _resolve(name, **options):
    return resolve_model(ModelConfig(name=name, **options))


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))


def test_miniatures(tiny, no_hub):
    for family in ("llama", "gpt2", "gemma3_text", "mixtral", "opt", "phi3"):
        full = tiny(family, **({"hidden_size": 128} if family != "gpt2" else {"n_embd": 128}))
        config = ModelConfig(name=full.to_dict(), miniature=True)
        source = resolve_model(config)
        small = source.hf_config
        assert (source.weights_folder, source.tokenizer_source) == (None, None)
        assert (small.model_type, small.hidden_size) == (full.model_type, 64)
        assert small.tie_word_embeddings == full.tie_word_embeddings
        assert small.vocab_size == len(load_tokenizer(source, config)) == len(miniature_tokenizer())
        assert num_parameters(build_on_meta(small, "eager")) < 1e6
    for name, heads in (
        ("meta-llama/Llama-3.2-1B-Instruct", (4, 1)),
        ("Qwen/Qwen3-0.6B", (4, 2)),
        ("somewhere/SmolLM2-135M-Instruct.Q4_1.gguf", (3, 1)),
    ):
        small, full = _resolve(name, miniature=True).hf_config, shipped_config(name)
        assert (small.num_attention_heads, small.num_key_value_heads) == heads
        assert small.rope_parameters == full["rope_parameters"]
        assert small.tie_word_embeddings == full["tie_word_embeddings"]


def test_a_miniature_keeps_every_kind_of_layer_and_cuts_long_rope_factors(no_hub, tiny):
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    full = tiny("gemma3_text", num_hidden_layers=6, layer_types=kinds, sliding_window=24)
    small = _resolve(full.to_dict(), miniature=True).hf_config
    assert (small.layer_types, small.sliding_window) == (["sliding_attention", "full_attention"], 24)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope["original_max_position_embeddings"] = 32
    full = tiny("phi3", hidden_size=384, rope_parameters=rope)
    assert _resolve(full.to_dict(), miniature=True).hf_config.rope_parameters["long_factor"] == [2.0] * 8


def test_a_folder_is_used_as_it_is_and_a_miniature_takes_its_tokenizer(saved, no_hub):
    folder = saved("llama")
    whole = _resolve(str(folder), tokenizer="other")
    assert (whole.weights_folder, whole.tokenizer_source) == (folder, "other")
    tokenizer = miniature_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    source = _resolve(str(folder), miniature=True)
    assert source.tokenizer_source == str(folder)
    assert source.hf_config.vocab_size == len(tokenizer)


def test_the_tokenizer_alone_needs_no_weights(tmp_path, tiny):
    tokenizer = miniature_tokenizer()
    for made in (tokenizer, tiny("llama", vocab_size=400)):
        made.save_pretrained(tmp_path)
    config = ModelConfig(name=str(tmp_path), add_tokens=["<|new|>"])
    found = load_tokenizer(resolve_model(config, with_weights=False), config)
    assert found.encode("a<|new|>") == [*tokenizer.encode("a"), len(tokenizer)]
    bare = ModelConfig(name=str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match=r"model\.tokenizer"):
        load_tokenizer(resolve_model(bare, with_weights=False), bare)


def test_names_that_cannot_be_used(tmp_path, saved, tiny, no_hub):
    for name in ("empty/step-00000050", "bare"):
        (tmp_path / name).mkdir(parents=True)
    tiny("llama").save_pretrained(tmp_path / "bare")
    folder = saved("llama")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    for name, said, options in (
        (None, "got no value", {}),
        ({"model_type": "bart"}, r"an encoder-decoder model \(bart\), whose decoder alone", {}),
        ({"model_type": "lama"}, "Unrecognized model identifier: lama", {}),
        (tmp_path / "empty", r"config\.json[\s\S]*export it first", {}),
        (tmp_path / "bare", f"for random init name {tmp_path / 'bare' / 'config.json'}", {}),
        (folder, "which is quantized", {}),
        (tmp_path / "adapter", r"contains an adapter\n.*\n.*name its base \(some/base\).*lit-fsdp export --merge", {}),
        ("some/model", "configs/model", {"miniature": True}),
        ({"model_type": "mamba"}, r"model\.miniature: got true for mamba", {"miniature": True}),
    ):
        with pytest.raises(ConfigError, match=said):
            _resolve(str(name) if isinstance(name, Path) else name, **options)


# a tensor beside the weight of a layer, which is packed then, or in fp8
QUANTIZED = ("weight.quant_state.bitsandbytes__nf4", "weight.absmax", "SCB", "qweight", "qzeros", "scales", "_blocks")
QUANTIZED += ("weight_packed", "weight_scale_inv", "weight_scale", "weight._data")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_quantized_weights_are_called_so_without_a_word_in_the_config(saved, no_hub, kind):
    folder = saved("llama")
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj."
    for word in QUANTIZED:
        tensors = whole | {f"{name}{word}".replace("proj._", "proj_"): torch.ones(4, dtype=torch.uint8)}
        if "scale_inv" not in word:  # whose weights have their shape
            tensors[f"{name}weight"] = torch.ones(8, 1, dtype=torch.uint8)
        (folder / "model.safetensors").unlink(missing_ok=True)
        if kind == "bin":
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=rf"model\.name: got .*, which is quantized: .*{name[:-1]}"):
            _resolve(str(folder))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 8.0}
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
HALF = {**PLAIN, "partial_rotary_factor": 0.5}
LAYERS = {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 2e4}}
# family; rope_parameters; what a model card adds; the rope_parameters that it means, or None where that is refused
SCALED = (
    ("llama", PLAIN, {"rope_scaling": YARN}, {**PLAIN, **YARN}),
    ("qwen2", PLAIN, {"rope_scaling": {"type": "linear", "factor": 8.0}}, {**PLAIN, **LINEAR}),
    ("llama", {**PLAIN, **LINEAR}, {"rope_scaling": YARN}, {**PLAIN, **YARN}),
    ("llama", PLAIN, {"rope_scaling": YARN, "rope_theta": 7e5}, {**YARN, "rope_theta": 7e5}),
    ("llama", PLAIN, {"rope_theta": 7e5}, None),
    ("llama", PLAIN, {"rope_scaling": {**YARN, "rope_theta": 7e5}}, {**YARN, "rope_theta": 7e5}),
    ("gpt_neox", HALF, {"rope_scaling": YARN}, {**HALF, **YARN}),
    ("gemma3_text", LAYERS, {"rope_scaling": LINEAR}, {**LAYERS, "full_attention": {**PLAIN, **LINEAR}}),
    ("gemma3_text", LAYERS, {"rope_scaling": {"full_attention": LINEAR}}, None),
    ("olmo3", LAYERS, {"rope_scaling": {"type": "linear", "factor": 8.0}}, None),
    ("gemma4_text", LAYERS, {"rope_scaling": LINEAR}, None),
    ("llama", PLAIN, {"rope_scaling": {"factor": 8.0}}, None),
)


def _frequencies(config):
    rotary = AutoModelForCausalLM.from_config(config).base_model.rotary_emb
    return {name: buffer.tolist() for name, buffer in rotary.named_buffers()}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")  # Gemma 4's
@pytest.mark.parametrize("form", ["folder", "json", "mapping", "miniature"])
def test_a_scaling_that_is_added_keeps_the_frequencies_of_the_model(tmp_path, no_hub, form, caplog):
    for family, saved, added, meant in SCALED:
        if family not in CONFIG_MAPPING or (family == "gpt_neox" and "gemma4_text" not in CONFIG_MAPPING):
            continue  # Gemma 4 is of later releases, as is the share of GPT-NeoX's rotary dimensions in rope_parameters
        values = {**families.tiny(family).to_dict(), "rope_parameters": saved}
        values["layer_types"] = ["sliding_attention", "full_attention"] if saved is LAYERS else None
        values["num_hidden_layers"], published = 2, json.loads(json.dumps({**values, **added}))
        (tmp_path / "config.json").write_text(json.dumps(published))
        name = (
            published
            if form in ("mapping", "miniature")
            else str(tmp_path / "config.json" if form == "json" else tmp_path)
        )
        caplog.clear()
        if meant is None:
            wanted = r"with rope_\w+ .* and rope_parameters.*\n.*\n.*write .* into rope_parameters"
            with pytest.raises(ConfigError, match=wanted):
                resolve_architecture(ModelConfig(name=name, miniature=form == "miniature"))
            continue
        found = resolve_architecture(ModelConfig(name=name, miniature=form == "miniature"))
        plain = copy.deepcopy(found)
        plain.rope_parameters = copy.deepcopy(meant)
        assert _frequencies(found) == _frequencies(plain), (family, added)
        says = saved is not LAYERS and "theta" not in str(added)
        assert ("except for {'rope_theta': 500000.0" in caplog.text) == says
