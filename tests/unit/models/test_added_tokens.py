"""Tokens that a recipe adds: their numbers, their rows, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.resolve import resolve_architecture, resolve_model
from lit_fsdp.models.tokenizers import load_tokenizer, miniature_tokenizer
from lit_fsdp.models.weights import headers_of, open_weights

TOKENS = ["<|tool|>", "<|im_end|>", "<|think|>"]
TIGHT = len(miniature_tokenizer())


@pytest.fixture
def base(saved):
    """Writes a tiny model with a tokenizer of 318 tokens."""

    def save(model_type: str = "llama", rows: int = TIGHT, **config: object) -> Path:
        folder = saved(model_type, config={"vocab_size": rows, **config})
        miniature_tokenizer().save_pretrained(folder)
        return folder

    return save


def _grown(folder: Path, fill, **options):
    config = ModelConfig(name=str(folder), add_tokens=TOKENS, **options)
    source = resolve_model(config, 0)
    model = build_on_meta(source.hf_config)
    return source, fill(open_weights(source, model, 0), model)


def test_equal_to_the_plain_model_with_the_mean_in_its_new_rows(base, fill):
    for family in ("llama", "qwen2", "opt", "gpt2"):  # tied, apart, tied with a projection, Conv1D
        folder = base(family)
        source, ours = _grown(folder, fill)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ends = plain.get_input_embeddings(), plain.get_output_embeddings()
        means = [module.weight.detach().double().mean(0) for module in ends]
        plain.resize_token_embeddings(TIGHT + 2, mean_resizing=False)
        for module, mean in zip((plain.get_input_embeddings(), plain.get_output_embeddings()), means, strict=True):
            module.weight.data[TIGHT:] = mean.float()
        ids = torch.tensor([[3, TIGHT, 7, TIGHT + 1]])
        with torch.no_grad():
            assert torch.equal(ours(input_ids=ids).logits, plain.eval()(input_ids=ids).logits), family
        assert source.hf_config.vocab_size == TIGHT + 2
    tokenizer = load_tokenizer(source, ModelConfig(name=str(folder), add_tokens=TOKENS))
    assert tokenizer.convert_tokens_to_ids(["<|tool|>", "<|think|>"]) == [TIGHT, TIGHT + 1]
    assert tokenizer.decode(tokenizer("a<|think|>b")["input_ids"], skip_special_tokens=True) == "ab"


def test_free_rows_are_used_first(base, fill):
    folder = base(rows=TIGHT + 1)
    source, ours = _grown(folder, fill)
    stored = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert source.hf_config.vocab_size == TIGHT + 2
    assert torch.allclose(ours.get_input_embeddings().weight[TIGHT:], stored[:TIGHT].mean(0), atol=1e-7)
    roomy = resolve_model(ModelConfig(name=str(base("qwen2", rows=400)), add_tokens=TOKENS), 0)
    assert roomy.hf_config.vocab_size == 400
    (embedding, _) = headers_of(roomy.overlay.glob("*.safetensors")).values()
    assert (embedding.shape, embedding.read().dtype) == ((400, 64), torch.float32)


def test_known_tokens_change_nothing_and_a_foreign_tokenizer_is_refused(base, caplog):
    config = ModelConfig(name=str(base()), add_tokens=["<|im_end|>"])
    source = resolve_model(config, 0)
    assert (source.overlay, source.hf_config.vocab_size) == (None, TIGHT)
    with caplog.at_level(logging.INFO, logger="lit_fsdp"):
        assert len(load_tokenizer(source, config)) == TIGHT
    assert "under their old numbers: <|im_end|>" in caplog.text
    folder = base("qwen2", rows=300)
    with pytest.raises(ConfigError, match=r"17 tokens beyond the 300 embeddings, which add_tokens does not name"):
        resolve_model(ModelConfig(name=str(folder), add_tokens=TOKENS), 0)


def test_random_init_and_miniature_have_the_rows(base):
    folder = base()
    for name, options in ((folder / "config.json", {"tokenizer": str(folder)}), (folder, {"miniature": True})):
        config = ModelConfig(name=str(name), add_tokens=TOKENS, **options)
        source = resolve_model(config, 0)
        assert (source.overlay, source.hf_config.vocab_size) == (None, TIGHT + 2)
        assert len(load_tokenizer(source, config)) == TIGHT + 2
    assert resolve_architecture(ModelConfig(name=str(folder), add_tokens=TOKENS)).vocab_size == TIGHT + 2
