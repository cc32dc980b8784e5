"""Real tokenizers and the templates of their families, token by token, as written in tests/golden/masks.

A line of a golden file begins with ``+`` where its tokens are supervised. The files were read by eye; with
``LIT_FSDP_WRITE_GOLDEN=1`` they are written anew, to be read again.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.masks import Encoded
from tests.unit.data.conftest import encoder_of
from tests.unit.data.conversations import say
from tests.unit.data.families import with_and_without_marks

_CALL = {"id": "abc012xyz", "type": "function", "function": {"name": "weather", "arguments": {"city": "Tromsø"}}}
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]


FAMILIES = ("smollm2", "qwen", "mistral", "deepseek")
_TWO = ("u:Hi.", "a:Hello!", "u:Who wrote Emma?", "a:Jane Austen.")
_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one_turn": ({"messages": say("u:What is 12 + 30?", "a:12 + 30 = 42")}, {}),
    "multi_turn": ({"messages": say(*_TWO)}, {}),
    "system_prompt": ({"messages": say("s:Be brief.", *_TWO)}, {}),
    "last_turn": ({"messages": say(*_TWO)}, {"supervise": "last"}),
    "flagged": ({"messages": say(*_TWO, "u:Sure?", "a:Yes.", a1=True, a5=True)}, {"supervise": "flagged"}),
    "never_learnt": ({"messages": say(*_TWO, a1=False)}, {}),
    "train_on_prompt": ({"messages": say(*_TWO, a1=False)}, {"train_on_prompt": True}),
    "empty_assistant": ({"messages": say("s:", "u:Hi.", "a:", "u:Well?", "a:Yes.")}, {}),
    "unicode": ({"messages": say("s:S", "u:naïve 日本", "a:Ünï 🙂👩‍👧 ok")}, {}),
    "truncated": (
        {"messages": say("s:S", "u:Count.", "a:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16")},
        {"max_seq_length": 20},
    ),
    "truncated_start": (
        {"messages": say("u:Count from one to five, and no further, please.", "a:1 2 3 4 5")},
        {"max_seq_length": 16, "truncation": "start"},
    ),
    "blank_lines": ({"messages": say("s:S", "u:Hi.", "a:\n\nHello\n\nyou \n")}, {}),
    "trailing_user": ({"messages": say("s:S", "u:Hi.", "a:Hello!", "u:Bye.")}, {}),
    "end_mark_in_text": ({"messages": say("s:S", "u:Say it.", "a:<|im_end|></s>")}, {}),
    "tools": (
        {
            "messages": [
                {"role": "user", "content": "Cold in Tromsø?"},
                {"role": "assistant", "content": "", "tool_calls": [_CALL]},
                {"role": "tool", "content": "-3 °C", "tool_call_id": "abc012xyz"},
                {"role": "assistant", "content": "Yes, -3 °C."},
            ],
            "tools": _TOOLS,
        },
        {},
    ),
}
_GOLDEN = Path("tests", "golden", "masks")


def _encoded(encoders: dict[str, RowEncoder], tokenizer: Any, template: str, name: str) -> Encoded:
    row, options = _CASES[name]
    key = repr((template, options))  # each is made once, as it takes a while
    if key not in encoders:
        encoders[key] = encoder_of(tokenizer, DataConfig(**options), template)
    (found,) = encoders[key].encode([row], "messages", ["row"])
    assert (found.dropped, len(found.samples)) == (None, 1)
    assert found.truncated == name.startswith("truncated")
    return found.samples[0]


def _written(tokenizer: Any, row: Encoded) -> str:
    """The tokens in lines that end with a line break's token, or where the mask changes."""
    tokens = tokenizer.convert_ids_to_tokens(row.input_ids.tolist())
    ends = [i for i, (a, b) in enumerate(pairwise(row.supervised), 1) if a != b or tokens[i - 1][-1:] in ("Ċ", "ĉ")]
    ends += [i + 1 for i, token in enumerate(tokens) if token == "<0x0A>"]
    borders = [0, *sorted(set(ends) - {len(tokens)}), len(tokens)]
    lines = [("+ " if row.supervised[a] else "  ") + " ".join(tokens[a:b]) for a, b in pairwise(borders)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_as_written_out(request: pytest.FixtureRequest, root: Path, family: str):
    tokenizer, folder = request.getfixturevalue(family), root / _GOLDEN / family
    encoders: dict[str, RowEncoder] = {}
    for name, (_, options) in _CASES.items():
        # SmolLM2's own template shows no tools, for which it has ours of ChatML here
        templates = with_and_without_marks(
            "smollm2-tools" if (family, name) == ("smollm2", "tools") else family, tokenizer
        )
        marked, derived = (
            _encoded(encoders, tokenizer, text, name) for text in (templates[bool(options)], templates[1])
        )
        assert derived.input_ids.tolist() == marked.input_ids.tolist()
        assert derived.supervised.tolist() == marked.supervised.tolist()
        file = folder / f"{name}.txt"
        if os.environ.get("LIT_FSDP_WRITE_GOLDEN"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_written(tokenizer, derived), encoding="utf-8")
        assert _written(tokenizer, derived) == file.read_text(encoding="utf-8"), file
    assert {file.stem for file in folder.iterdir()} == set(_CASES)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(request: pytest.FixtureRequest, family: str):
    """Where no token lies across a border, the ids are what transformers itself makes of the conversation."""
    tokenizer = request.getfixturevalue(family)
    marked, derived = with_and_without_marks(family, tokenizer)
    talk = say("s:Be brief.", *_TWO)
    encoder = encoder_of(tokenizer, DataConfig(), derived)
    encoded = encoder.encode([{"messages": talk}], "messages", ["row"])[0].samples[0]
    theirs = tokenizer.apply_chat_template(
        talk, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    length = len(encoded.input_ids)  # without what follows the last token that is supervised
    assert encoded.input_ids.tolist() == theirs["input_ids"][:length]
    assert [*encoded.supervised, *[False] * (len(theirs["input_ids"]) - length)] == [
        bool(value) for value in theirs["assistant_masks"]
    ]
