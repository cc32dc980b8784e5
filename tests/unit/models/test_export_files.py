"""What a checkpoint keeps of a model beside its tensors."""

from __future__ import annotations

import json

from transformers import GenerationConfig

from lit_fsdp.models.export_files import model_files
from lit_fsdp.models.tokenizers import end_of_turn_id, miniature_tokenizer
from lit_fsdp.models.weights import ModelSource


class _Module:
    def __init__(self, **values):
        self.generation_config = GenerationConfig(**values)


def _generation(tiny, tokenizer, **values):
    source = ModelSource(tiny("llama", vocab_size=400), None, None, "label")
    files = model_files(source, tokenizer, _Module(**values))
    assert json.loads(files["hf/config.json"])["pad_token_id"] == 5  # the model's own: another would freeze a row
    return json.loads(files["hf/generation_config.json"])


def test_generation_stops_where_the_template_ends_a_turn(tiny):
    for given, kept in ((314, [314, 316]), ([314, 316], [314, 316]), (None, 316), (316, 316)):
        assert _generation(tiny, miniature_tokenizer(), eos_token_id=given)["eos_token_id"] == kept


def test_end_of_turn():
    tokenizer = miniature_tokenizer()
    assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    for template in ("{% for m in messages %}{{ m['content'] }} {% endfor %}", "{{ raise_exception('no') }}", None):
        tokenizer.chat_template = template
        assert end_of_turn_id(tokenizer) is None
