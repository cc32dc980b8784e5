"""The generated tokenizer, and loading the model's own."""

from __future__ import annotations

import logging

import pytest

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.tokenizers import load_tokenizer, miniature_tokenizer, pad_id
from lit_fsdp.models.weights import ModelSource


def _source(tiny, folder, **changes):
    return ModelSource(tiny("llama", **{"vocab_size": 512, **changes}), None, str(folder) if folder else None, "label")


def test_every_text_comes_back():
    tokenizer = miniature_tokenizer()
    text = "".join(map(chr, range(256))) + " the king's é 漢字 🙂\n\n  end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 512
    assert tokenizer(" the")["input_ids"] == [tokenizer.convert_tokens_to_ids("Ġthe")]


def test_saved_and_loaded_it_is_the_same(tmp_path, tiny):
    tokenizer = miniature_tokenizer()
    text = "the assistant says: 12  34\n"
    for family in ("llama", "mistral"):  # mistral-common may be there without its dependencies
        tokenizer.save_pretrained(tmp_path)
        tiny(family).save_pretrained(tmp_path)
        loaded = load_tokenizer(_source(tiny, tmp_path), ModelConfig(name="x"))
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert (loaded.chat_template, loaded.pad_token) == (tokenizer.chat_template, "<|pad|>")


def test_no_token_to_pad_with(tmp_path, tiny):
    tokenizer = miniature_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"an eos or pad token(.|\n)*set model\.pad_token"):
        load_tokenizer(_source(tiny, tmp_path), ModelConfig(name="x"))
    loaded = load_tokenizer(_source(tiny, tmp_path), ModelConfig(name="x", pad_token="<|endoftext|>"))
    assert pad_id(loaded) == loaded.convert_tokens_to_ids("<|endoftext|>")


def test_a_pad_token_of_the_recipes_own(tmp_path, tiny, caplog):
    miniature_tokenizer().save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="lit_fsdp"):
        loaded = load_tokenizer(_source(tiny, tmp_path), ModelConfig(name="x", pad_token="<|im_start|>"))
    assert (loaded.pad_token, len(loaded)) == ("<|im_start|>", len(miniature_tokenizer()))
    assert "has <|pad|> pad token: padding with <|im_start|>" in caplog.text
    with pytest.raises(ConfigError, match=r"'<pad>', which .* does not have(.|\n)*add_tokens: \['<pad>'\]"):
        load_tokenizer(_source(tiny, tmp_path), ModelConfig(name="x", pad_token="<pad>"))
    added = load_tokenizer(_source(tiny, tmp_path), ModelConfig(name="x", pad_token="<pad>", add_tokens=["<pad>"]))
    assert pad_id(added) == len(added) - 1


def test_tokenizers_that_cannot_be_used(tmp_path, tiny):
    plain = miniature_tokenizer()
    plain.save_pretrained(tmp_path / "whole")
    tiny("llama").save_pretrained(tmp_path / "none")
    for folder, changes, said in (
        ("whole", {"vocab_size": 100}, "at most the 100 embeddings of label"),
        ("none", {}, r"model\.tokenizer"),
        (None, {}, r"model\.tokenizer: got None"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_tokenizer(_source(tiny, folder and tmp_path / folder, **changes), ModelConfig(name="x"))
