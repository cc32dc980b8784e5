"""Conversations in short, their tokens, and what of them is supervised."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.masks import Encoded
from tests.unit.data.conftest import encoder_of

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>"),
)
"""Special tokens of all named templates."""

ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
"""What ends a turn; in the other templates it is EOS."""

TRIMS = ("llama3", "gemma")
"""Templates that cut blanks off."""


def say(*turns: str, **flags: bool) -> list[dict[str, Any]]:
    """``u:Hi`` → a user's message; ``a1=True`` → message 1 says ``train: true``."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages: list[dict[str, Any]] = [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]
    for name, value in flags.items():
        messages[int(name[1:])]["train"] = value
    return messages


def encode(tokenizer: Any, template: str | None, messages: Any, *, row: Any = None, **options: Any) -> Encoded:
    """The sample of one conversation, which is row 7 of a file."""
    encoder = encoder_of(tokenizer, DataConfig(**options), template or tokenizer.chat_template)
    (found,) = encoder.encode([{"messages": messages, **(row or {})}], "messages", ["rows.jsonl:7"])
    assert not found.dropped
    return found.samples[0]


def shown(tokenizer: Any, sample: Encoded) -> str:
    """The text of a sample, with what is supervised in ⟦brackets⟧."""
    pairs = zip(sample.supervised.tolist(), sample.input_ids.tolist(), strict=True)
    parts = [(mark, tokenizer.decode([token for _, token in part])) for mark, part in groupby(pairs, lambda p: p[0])]
    return "".join(f"⟦{text}⟧" if mark else text for mark, text in parts)


def supervised(tokenizer: Any, template: str | None, messages: Any, **options: Any) -> list[str]:
    """The texts that are supervised, in one conversation."""
    text = shown(tokenizer, encode(tokenizer, template, messages, **options))
    return [part.partition("⟧")[0] for part in text.split("⟦")[1:]]


def unmarked(template: str) -> str:
    """The template with blocks that do nothing in place of its marks, so that it writes the same text."""
    opened = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", opened)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEMO = (
    "{% set s = messages[0].content if messages[0].role == 'system' else none %}"
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% set asked = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in rest %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}{{ tools | tojson }}{% endif %}"
    "[INST]{{ s ~ '\n\n' if s is not none and loop.last }}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{{ {'content': m.content} | tojson }}"
    "{% else %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}{% endfor %}</s>"
    "{% endif %}{% endfor %}"
)
"""As Mistral's own ones: a system prompt stands before a user's message that is the last one, and nowhere else."""
LETTERS = (
    "{% for m in messages %}<s>{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '<s>' if add_generation_prompt }}"
)
"""Per turn one token, then one per letter, then one for the end of an answer."""
