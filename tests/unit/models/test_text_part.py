"""Gemma 3 with its eyes shut: the text part of a multimodal folder, alone, computes what the whole does on text."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.weights import open_weights

TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "max_position_embeddings": 64},
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
IDS = torch.arange(4, 28).reshape(2, 12)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3") / "tiny-gemma-3"
    torch.manual_seed(0)
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_logits_of_text_are_those_of_the_whole_model(whole, fill, caplog):
    with caplog.at_level(logging.INFO, logger="lit_fsdp"):
        source = resolve_model(ModelConfig(name=str(whole)), 1)
    assert "tiny-gemma-3 sees images too (gemma3): its text part is used alone (gemma3_text)" in caplog.text
    assert source.weights_folder == whole, "nothing needs to be converted"
    model = build_on_meta(source.hf_config, "eager")
    caplog.clear()
    filled = fill(open_weights(source, model, 1), model)
    assert "vision_tower" in caplog.text, "what is left out is named"
    assert "language_model" not in caplog.text
    both = Gemma3ForConditionalGeneration.from_pretrained(whole, attn_implementation="eager").eval()
    assert torch.equal(filled.eval()(IDS, use_cache=False).logits, both(IDS, use_cache=False).logits)
