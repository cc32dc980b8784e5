"""Answers end where they must, and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from lit_fsdp.models.generate import answer_batch
from lit_fsdp.models.tokenizers import miniature_tokenizer


@pytest.fixture
def ask(tiny):
    """A model, its tokenizer, and a way to ask it something."""
    tokenizer = miniature_tokenizer()
    torch.manual_seed(0)
    config = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config)
    talk = [[{"role": "user", "content": "a"}]]
    return model, tokenizer, lambda length: answer_batch(model, tokenizer, talk, length)[0]


def test_length_is_limited_and_an_end_mark_stops(ask):
    model, tokenizer, answer = ask
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert len(tokenizer(answer(5))["input_ids"]) == 5  # all logits equal: always the first token
    model.generation_config.eos_token_id = 0  # that first token: the model's own end mark counts too
    assert answer(5) == tokenizer.decode([0]).strip()


def test_settings_of_the_model_itself_are_not_used(ask):
    model, _, answer = ask
    model.train()
    plain = answer(12)
    own = model.generation_config = GenerationConfig(repetition_penalty=9.0, no_repeat_ngram_size=1, min_new_tokens=12)
    assert answer(12) == plain
    assert model.generation_config is own
    assert model.training
