"""A model loaded shard by shard is the unsharded one, bit for bit, and no rank ever holds much more than its share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, PretrainedConfig

from lit_fsdp.host import size_words
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.benchmarks.loading import MB, above_imports, bound, measure, write_random_llama
from tests.dist.choice_jobs import fingerprint
from tests.dist.forks import on_ranks
from tests.dist.reference import TINY, UNTIED
from tests.runs import MORE

GPT2 = GPT2Config(n_embd=36, n_layer=3, n_head=4, n_positions=64, vocab_size=512)  # 36 rows: not equal shards


@pytest.mark.parametrize(("engine", "ranks"), [("fsdp2", 1), ("fsdp2", 4), ("fsdp1", 2), ("fsdp1", 4)])
def test_files_are_loaded_bit_for_bit(tiny_model: Path, engine: str, ranks: int) -> None:
    whole = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    wanted = {name: fingerprint(tensor) for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]}
    assert any(name.endswith("inv_freq") for name in wanted)
    assert on_ranks("load_and_fingerprint", ranks, model=tiny_model, engine=engine) == [wanted] * ranks


def test_a_model_larger_than_the_host_is_not_loaded(tiny_model: Path) -> None:
    needed = 2 * 4 * sum(param.numel() for param in AutoModelForCausalLM.from_pretrained(tiny_model).parameters())
    assert on_ranks("load_on_a_small_host", 2, model=tiny_model, engine="fsdp2", host_bytes=needed) == ["", ""]
    for engine, part in (("fsdp2", needed // 2), ("ddp", needed)):  # a replica of each rank
        for text in on_ranks("load_on_a_small_host", 2, model=tiny_model, engine=engine, host_bytes=needed - 2):
            assert f"at least {size_words(part)} of parameters and gradients per rank" in text
            assert f"{size_words(needed // 2)}, the memory of this host, divided by its 2 ranks" in text
            assert "lit-fsdp plan --savings" in text


@pytest.mark.parametrize(
    ("config", "engine", "ranks"),
    [
        (TINY, "fsdp2", 4),
        (TINY, "fsdp1", 1),
        (UNTIED, "fsdp2", 1),
        (UNTIED, "fsdp1", 2),
        (GPT2, "fsdp2", 2),
        (GPT2, "fsdp1", 4),
    ],
)
def test_random_weights_equal_those_of_one_process(
    tmp_path: Path, config: PretrainedConfig, engine: str, ranks: int
) -> None:
    config.save_pretrained(tmp_path)
    job = {"model": tmp_path / "config.json"}
    (wanted,) = on_ranks("load_and_fingerprint", 1, engine="single", **job)
    assert len(set(wanted.values())) > 10
    assert on_ranks("load_and_fingerprint", ranks, engine=engine, **job) == [wanted] * ranks


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """137M parameters, 547 MB in fp32."""
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "vocab_size": 8192}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True}
    return write_random_llama(tmp_path_factory.mktemp("large"), {**shape, **heads})


@pytest.mark.long("half a minute for a peak; what is held in 4 bits is counted in test_qlora")
def test_a_base_in_4_bits_is_never_held_in_16(large_model: Path) -> None:
    """Each of two ranks stays under its shard, the scales of all and 110 MB, far from the 257 MB of the layers."""
    records = measure("qlora", large_model, 2)
    shape = json.loads((large_model / "config.json").read_text())
    width, inner, blocks = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    layers = blocks * (4 * width * width + 3 * width * inner)
    scales = layers // 64 * 4
    for record in records:
        assert layers // 4 < record["held_bytes"] < layers // 4 + 12 * MB  # beside it half the embedding, and adapters
        assert above_imports(record) < record["held_bytes"] + scales + 110 * MB


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of 105M parameters under the names it has on the hub, 32 experts to a block, each by itself."""
    shape = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}
    folder = tmp_path_factory.mktemp("experts")
    model = AutoModelForCausalLM.from_config(MixtralConfig(**shape, **heads, num_local_experts=32))
    model.bfloat16().save_pretrained(folder, max_shard_size="30MB")
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.7.block_sparse_moe.experts.31.w2.weight" in names
    miniature_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("engine", "model"), [pytest.param("fsdp2", "many_experts", marks=MORE), ("fsdp1", "large_model")]
)
def test_peak_memory_of_a_rank(request: pytest.FixtureRequest, engine: str, model: str) -> None:
    """Each of two ranks stays under its shard, the largest unit and 120 MB."""
    records = measure(engine, request.getfixturevalue(model), 2)
    assert sum(record["held_bytes"] for record in records) == pytest.approx(4 * records[0]["num_params"], rel=0.01)
    for record in records:
        assert bound(record, 120 * MB) < 4 * record["num_params"]  # or a whole copy on every rank would pass
        assert above_imports(record) <= bound(record, 120 * MB)
