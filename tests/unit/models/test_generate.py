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


def _asked(pair, *texts, length=12):
    return answer_batch(*pair, [[{"role": "user", "content": text}] for text in texts], length)


def test_batch_answers_like_single_prompts(pair):
    texts = ("a", "a much longer question than that", "and this")
    together = _asked(pair, *texts)
    assert together == [_asked(pair, text)[0] for text in texts]
    assert len(set(together)) == 3


def test_length_is_limited_and_an_end_mark_stops(pair):
    model, tokenizer = pair
    with torch.no_grad():
        model.model.norm.weight.zero_()
    (answer,) = _asked(pair, "a", length=5)  # all logits equal: always the first token
    assert len(tokenizer(answer)["input_ids"]) == 5
    model.generation_config.eos_token_id = 0  # that first token: the model's own end mark counts too
    assert _asked(pair, "a", length=5) == [tokenizer.decode([0]).strip()]


def test_settings_of_the_model_itself_are_not_used(pair):
    model, plain = pair[0].train(), _asked(pair, "a")
    own = model.generation_config = GenerationConfig(repetition_penalty=9.0, no_repeat_ngram_size=1, min_new_tokens=12)
    assert _asked(pair, "a") == plain
    assert model.generation_config is own
    assert model.training
