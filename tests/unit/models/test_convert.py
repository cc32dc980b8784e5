"""Conversion to a folder that can be read shard by shard: .bin files, other names, GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.tokenizers import load_tokenizer, miniature_tokenizer
from tests.unit.models.conftest import fill, opened
from tests.unit.models.families import FAMILIES


def _to_bin(folder, without=""):
    stored = load_file(folder / "model.safetensors")
    torch.save({name: t.bfloat16() for name, t in stored.items() if name != without}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_bin_files_keep_their_values(saved, cache):
    folder = saved("llama")
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    _to_bin(folder)
    source, *both = opened(folder)
    assert source.weights_folder.parent == cache / "models"
    assert source.tokenizer_source == str(folder)
    assert "lm_head.weight" not in load_file(source.weights_folder / "model.safetensors")
    model = fill(*both)
    assert all(torch.equal(t, expected[name].bfloat16().float()) for name, t in model.state_dict().items())


@pytest.mark.skipif("sarvam_moe" not in FAMILIES, reason="of transformers 5.24")
def test_what_transformers_splits_is_kept_in_parts(saved):
    """Queries, keys and values lie in one tensor of the file, and are views of it in the model."""
    folder = saved("sarvam_moe")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    source, *both = opened(folder)
    assert source.weights_folder != folder
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fill(*both).state_dict().items())


def test_conversion_does_not_invent_tensors(saved, cache):
    folder = saved("llama")
    _to_bin(folder, without="model.norm.weight")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing or misshapen: model\.norm\.weight"):
        opened(folder)
    assert not [p for p in (cache / "models").iterdir() if p.is_dir()]


def _write_gguf(file: Path) -> dict[str, np.ndarray]:
    """A llama of one block and 32 wide; returns its values."""
    gguf = pytest.importorskip("gguf")
    tokenizer = json.loads(miniature_tokenizer().backend_tokenizer.to_str())
    vocab = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in {
        **{"context_length": 77, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "head_count": 2},
        **{"head_count_kv": 1, "rope_freq_base": 10000.0, "rope_dimension_count": 16, "layer_norm_rms_eps": 1e-5},
        **{"vocab_size": len(vocab), "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens},
        **{"token_types": [3 if "<|" in token else 1 for token in tokens], "add_bos_token": True},
        **{"token_merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]]},
        **{"bos_token_id": vocab["<|endoftext|>"], "eos_token_id": vocab["<|im_end|>"]},
        "chat_template": "{{ messages[0]['content'] }}",
    }.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (len(vocab), 32), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "output_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32)}
    shapes |= {"blk.0.ffn_down": (32, 64)}
    values = {n: np.random.default_rng(0).normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    for name, value in values.items():
        writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_gguf_becomes_a_model_folder(tmp_path):
    """With what its tokenizer would lack: digits one by one, as SmolLM's own, and the token that a text begins with."""
    file, expected, text = tmp_path / "small.gguf", miniature_tokenizer(), "the assistant is a<|im_end|>\n"
    values = _write_gguf(file)
    source, *both = opened(file)
    model = fill(*both)
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(values["token_embd"]))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "quantization_config" not in json.loads((source.weights_folder / "config.json").read_text())
    tokenizer = load_tokenizer(source, ModelConfig(name=str(file)))
    assert (tokenizer.model_max_length, tokenizer.eos_token) == (77, "<|im_end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert tokenizer(text)["input_ids"][1:] == expected(text)["input_ids"]
    assert tokenizer("12").tokens() == ["<|endoftext|>", "1", "2"]
    trained = AutoModelForCausalLM.from_pretrained(source.weights_folder)
    assert torch.equal(trained.model.embed_tokens.weight, model.model.embed_tokens.weight)
