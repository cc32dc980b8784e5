"""The tokenizer of a recipe for commands that are about data alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.tokenizer_alone import tokenizer_alone
from lit_fsdp.models.tokenizers import miniature_tokenizer


def test_the_tokenizer_alone_needs_no_weights(tmp_path: Path):
    folder = tmp_path / "model"
    tokenizer = miniature_tokenizer()
    tokenizer.save_pretrained(folder)
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "vocab_size": 400}))
    found = tokenizer_alone(ModelConfig(name=str(folder), add_tokens=["<|new|>"]))
    assert found.encode("a<|new|>") == [*tokenizer.encode("a"), len(tokenizer)]
    with pytest.raises(ConfigError, match=r"model\.tokenizer"):
        tokenizer_alone(ModelConfig(name=str(folder / "config.json")))
