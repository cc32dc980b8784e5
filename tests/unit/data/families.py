"""Real tokenizers with the chat templates of their families, each with generation marks and without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lit_fsdp.data.chat_template import find_template

_SMOLLM2_TURN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
_SMOLLM2_MARKED = (
    "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}"
)
FAMILIES = {
    "smollm2": None,
    "smollm2-tools": "chatml",
    "qwen": "chatml",
    "mistral": "mistral",
    "deepseek": str(Path(__file__).with_name("deepseek.jinja")),
}
"""Family to what ``data.chat_template`` says."""


def with_and_without_marks(family: str, tokenizer: Any) -> tuple[str, str]:
    """The template of a family with generation marks, and the same without."""
    found = find_template(FAMILIES[family], tokenizer)
    assert found is not None
    if FAMILIES[family] is None:
        assert _SMOLLM2_TURN in found.source
        return found.source.replace(_SMOLLM2_TURN, _SMOLLM2_MARKED), found.source
    return found.source, unmarked(found.source)


def unmarked(template: str) -> str:
    """The template with blocks that do nothing in place of its marks, so that it writes the same text."""
    opened = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", opened)
