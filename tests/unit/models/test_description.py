"""What a checkpoint keeps of a model beside its tensors."""

from __future__ import annotations

import json

import pytest
from transformers import GenerationConfig

from lit_fsdp.models.description import model_entry, model_files
from lit_fsdp.models.source import ModelSource
from lit_fsdp.models.tokenizers import end_of_turn_id, miniature_tokenizer


class _Module:
    def __init__(self, **values):
        self.generation_config = GenerationConfig(**values)


def _generation(tiny, tokenizer, **values):
    source = ModelSource(tiny("llama", vocab_size=400), None, None, "label")
    files = model_files(source, tokenizer, _Module(**values))
    assert json.loads(files["hf/config.json"])["pad_token_id"] == 5  # the model's own: another would freeze a row
    return json.loads(files["hf/generation_config.json"])


@pytest.mark.parametrize(("given", "kept"), [(314, [314, 316]), ([314, 316], [314, 316]), (None, 316), (316, 316)])
def test_generation_stops_where_the_template_ends_a_turn(tiny, given, kept):
    assert _generation(tiny, miniature_tokenizer(), eos_token_id=given)["eos_token_id"] == kept


def test_end_of_turn():
    tokenizer = miniature_tokenizer()
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    for template in ("{% for m in messages %}{{ m['content'] }} {% endfor %}", "{{ raise_exception('no') }}", None):
        tokenizer.chat_template = template
        assert end_of_turn_id(tokenizer) is None


def test_what_is_kept_with_adapter_an_adapter_is_named(tiny):
    source = ModelSource(tiny("llama"), None, None, "label")
    entry = model_entry(source, {"model.lm_head.weight": "model.model.embed_tokens.weight"}, {"r": 1}, ["a.weight"])
    assert entry["kept_with_adapter"] == ["a.weight"]
    assert entry["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
