"""A model loaded shard by shard is the unsharded one, bit for bit, and no rank ever holds much more than its share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, PretrainedConfig

from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.models.weights import ModelSource, open_weights
from tests.benchmarks.loading import MB, above_imports, bound, measure, write_random_llama
from tests.dist.choice_jobs import fingerprint
from tests.dist.forks import on_ranks
from tests.dist.reference import TINY, UNTIED

SEED = 11
CONFIGS: dict[str, PretrainedConfig] = {
    "llama_tied": TINY,
    "llama_untied": UNTIED,
    "gpt2": GPT2Config(n_embd=36, n_layer=3, n_head=4, n_positions=64, vocab_size=512),  # 36 rows: not equal shards
}


def fingerprints(model: torch.nn.Module) -> dict[str, str]:
    """Of every parameter under its first name, and every buffer."""
    return {name: fingerprint(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def check(found: list[dict[str, str]], wanted: dict[str, str]) -> None:
    """Every rank has gathered exactly this; a tied weight may be there under its other name too."""
    for rank in found:
        assert {name: rank.get(name) for name in wanted} == wanted
        assert set(rank) - set(wanted) <= {"lm_head.weight"}
        if "lm_head.weight" in set(rank) - set(wanted):
            assert rank["lm_head.weight"] in wanted.values()


@pytest.mark.parametrize(("engine", "ranks"), [("fsdp2", 1), ("fsdp2", 4), ("fsdp1", 2), ("fsdp1", 4)])
def test_files_are_loaded_bit_for_bit(tiny_model: Path, engine: str, ranks: int) -> None:
    whole = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    wanted = fingerprints(whole)
    assert any(name.endswith("inv_freq") for name in wanted)
    check(on_ranks("load_and_fingerprint", ranks, model=tiny_model, engine=engine), wanted)


@pytest.mark.parametrize(
    ("name", "engine", "ranks"),
    [
        ("llama_tied", "fsdp2", 4),
        ("llama_tied", "fsdp1", 1),
        ("llama_untied", "fsdp2", 1),
        ("llama_untied", "fsdp1", 2),
        ("gpt2", "fsdp2", 2),
        ("gpt2", "fsdp1", 4),
    ],
)
def test_random_weights_equal_those_of_one_process(tmp_path: Path, engine: str, ranks: int, name: str) -> None:
    """The reference is built on meta and initialized module by module, in this process, with the same seed."""
    config = CONFIGS[name]
    config.save_pretrained(tmp_path)
    model = build_on_meta(config)
    weights = open_weights(ModelSource(config, None, None), model, SEED)
    names = {id(module): path for path, module in model.named_modules()}
    model.to_empty(device="cpu").tie_weights()
    for module in model.modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                tensor.data.copy_(weights.read(names[id(module)], module, attribute))
    wanted = fingerprints(model)
    assert len(set(wanted.values())) > 10
    check(on_ranks("load_and_fingerprint", ranks, model=tmp_path / "config.json", engine=engine, seed=SEED), wanted)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """137M parameters, 547 MB in fp32."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "vocab_size": 8192}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True}
    return write_random_llama(tmp_path_factory.mktemp("large"), {**shape, **heads})


def test_a_base_in_4_bits_is_never_held_in_16(large_model: Path) -> None:
    """Each of two ranks stays under its shard, the scales of all and 110 MB, far from the 257 MB of the layers."""
    records = measure("qlora", large_model, 2)
    shape = json.loads((large_model / "config.json").read_text())
    width, inner, blocks = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    layers = blocks * (4 * width * width + 3 * width * inner)
    scales = layers // 64 * 4
    assert 2 * layers > 250 * MB
    for record in records:
        assert layers // 4 < record["held_bytes"] < layers // 4 + 12 * MB  # beside it half the embedding, and adapters
        assert above_imports(record) < record["held_bytes"] + scales + 110 * MB


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of 105M parameters under the names it has on the hub, 32 experts to a block, each by itself."""
    shape = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
    config = MixtralConfig(**shape, **heads, num_local_experts=32)
    folder = tmp_path_factory.mktemp("experts")
    config.save_pretrained(folder)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in build_on_meta(config).state_dict().items():
        stored = {name.replace(".mlp.", ".block_sparse_moe."): tensor.shape}
        if ".experts." in name:
            owner, words = next(iter(stored)).rpartition(".")[0], {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
            parts = words[name.rpartition(".")[2]]
            rows, width = tensor.shape[1] // len(parts), tensor.shape[2]
            stored = {f"{owner}.{i}.{part}.weight": (rows, width) for i in range(32) for part in parts}
        if name != "lm_head.weight":
            made = {key: (torch.randn(size) * 0.02).bfloat16() for key, size in stored.items()}
            files.setdefault(f"{name.split('.')[2]}.safetensors", {}).update(made)
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    miniature_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("engine", "model"), [("fsdp2", "many_experts"), ("fsdp1", "large_model")])
def test_peak_memory_of_a_rank(request: pytest.FixtureRequest, engine: str, model: str) -> None:
    """Each of two ranks stays under its shard, the largest unit and 120 MB."""
    records = measure(engine, request.getfixturevalue(model), 2)
    assert sum(record["held_bytes"] for record in records) == pytest.approx(4 * records[0]["num_params"], rel=0.01)
    for record in records:
        assert bound(record, 120 * MB) < 4 * record["num_params"]  # or a whole copy on every rank would pass
        assert above_imports(record) <= bound(record, 120 * MB)
