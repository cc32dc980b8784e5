"""Answers: padding changes nothing, and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from lit_fsdp.models.generate import answer_batch
from lit_fsdp.models.tokenizers import miniature_tokenizer


@pytest.fixture
def pair(tiny):
    tokenizer = miniature_tokenizer()
    torch.manual_seed(0)
    config = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config), tokenizer


def _user(text):
    return [{"role": "user", "content": text}]


def test_batch_answers_like_single_prompts(pair):
    model, tokenizer = pair
    conversations = [_user("a"), _user("a much longer question than that"), _user("and this")]
    together = answer_batch(model, tokenizer, conversations, 12)
    assert together == [answer_batch(model, tokenizer, [c], 12)[0] for c in conversations]
    assert len(set(together)) == 3


def test_length_is_limited_and_an_end_mark_stops(pair):
    model, tokenizer = pair
    with torch.no_grad():
        model.model.norm.weight.zero_()
    (answer,) = answer_batch(model, tokenizer, [_user("a")], 5)  # all logits equal: always the first token
    assert len(tokenizer(answer)["input_ids"]) == 5
    model.generation_config.eos_token_id = 0  # that first token: the model's own end mark counts too
    assert answer_batch(model, tokenizer, [_user("a")], 5) == [tokenizer.decode([0]).strip()]


def test_settings_of_the_model_itself_are_not_used(pair):
    model, tokenizer = pair
    plain = answer_batch(model, tokenizer, [_user("a")], 12)
    own = model.generation_config = GenerationConfig(repetition_penalty=9.0, no_repeat_ngram_size=1, min_new_tokens=12)
    assert answer_batch(model, tokenizer, [_user("a")], 12) == plain
    assert model.generation_config is own
    model.train()
    answer_batch(model, tokenizer, [_user("a")], 1)
    assert model.training
