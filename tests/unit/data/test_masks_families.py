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
from lit_fsdp.data.chat_template import find_template
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.masks import Encoded
from tests.unit.data import tokenizers
from tests.unit.data.conftest import encoder_of
from tests.unit.data.conversations import encode, say, unmarked

_CALL = {"id": "abc012xyz", "type": "function", "function": {"name": "weather", "arguments": {"city": "Tromsø"}}}
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]
_ASKED = say("u:Cold in Tromsø?", "a:", "t:-3 °C", "a:Yes, -3 °C.")
_ASKED[1]["tool_calls"], _ASKED[2]["tool_call_id"] = [_CALL], _CALL["id"]
FAMILIES = {
    "smollm2": None,
    "qwen": "chatml",
    "mistral": "mistral",
    "deepseek": str(Path(__file__).with_name("deepseek.jinja")),
}
"""Family to what ``data.chat_template`` says."""
_TWO = ("u:Hi.", "a:Hello!", "u:Who wrote Emma?", "a:Jane Austen.")
_CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one_turn": (say("u:What is 12 + 30?", "a:12 + 30 = 42"), {}),
    "multi_turn": (say(*_TWO), {}),
    "system_prompt": (say("s:Be brief.", *_TWO), {}),
    "last_turn": (say(*_TWO), {"supervise": "last"}),
    "flagged": (say(*_TWO, "u:Sure?", "a:Yes.", a1=True, a5=True), {"supervise": "flagged"}),
    "never_learnt": (say(*_TWO, a1=False), {}),
    "train_on_prompt": (say(*_TWO, a1=False), {"train_on_prompt": True}),
    "empty_assistant": (say("s:", "u:Hi.", "a:", "u:Well?", "a:Yes."), {}),
    "unicode": (say("s:S", "u:naïve 日本", "a:Ünï 🙂👩‍👧 ok"), {}),
    "truncated": (say("s:S", "u:Count.", "a:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"), {"max_seq_length": 20}),
    "truncated_start": (
        say("u:Count from one to five, and no further, please.", "a:1 2 3 4 5"),
        {"max_seq_length": 16, "truncation": "start"},
    ),
    "blank_lines": (say("s:S", "u:Hi.", "a:\n\nHello\n\nyou \n"), {}),
    "trailing_user": (say("s:S", "u:Hi.", "a:Hello!", "u:Bye."), {}),
    "end_mark_in_text": (say("s:S", "u:Say it.", "a:<|im_end|></s>"), {}),
    "tools": (_ASKED, {}),
}
"""Messages and options."""


def _template(name: str | None, tokenizer: Any) -> str:
    found = find_template(name, tokenizer)
    assert found is not None
    return found.source


def _written(tokenizer: Any, row: Encoded) -> str:
    """The tokens in lines that end with a line break's token, or where the mask changes."""
    tokens = tokenizer.convert_ids_to_tokens(row.input_ids.tolist())
    ends = [i for i, (a, b) in enumerate(pairwise(row.supervised), 1) if a != b or tokens[i - 1][-1:] in ("Ċ", "ĉ")]
    ends += [i + 1 for i, token in enumerate(tokens) if token == "<0x0A>"]
    borders = [0, *sorted(set(ends) - {len(tokens)}), len(tokens)]
    lines = [("+ " if row.supervised[a] else "  ") + " ".join(tokens[a:b]) for a, b in pairwise(borders)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_as_written_out(root: Path, family: str):
    tokenizer, folder = getattr(tokenizers, family)(), root / "tests" / "golden" / "masks" / family
    encoders: dict[str, RowEncoder] = {}
    own = _template(FAMILIES[family], tokenizer)
    with_tools = _template("chatml", tokenizer) if family == "smollm2" else own  # its own shows none
    for name, (messages, options) in _CASES.items():
        row = {"messages": messages, "tools": _TOOLS if name == "tools" and family != "deepseek" else None}
        source = with_tools if name == "tools" else own
        for template in {unmarked(source)} if options else {unmarked(source), source}:
            key = repr((template, options))  # each is made once, as it takes a while
            if key not in encoders:
                encoders[key] = encoder_of(tokenizer, DataConfig(**options), template)
            (found,) = encoders[key].encode([row], "messages", ["row"])
            (sample,) = found.samples
            assert found.truncated == name.startswith("truncated")
            if os.environ.get("LIT_FSDP_WRITE_GOLDEN"):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{name}.txt").write_text(_written(tokenizer, sample), encoding="utf-8")
            assert _written(tokenizer, sample) == (folder / f"{name}.txt").read_text(encoding="utf-8"), name
    assert not any(encoder.lacks_prompt for encoder in encoders.values())
    assert {file.stem for file in folder.iterdir()} == set(_CASES)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(family: str):
    """Where no token lies across a border, the ids are what transformers itself makes of the conversation."""
    tokenizer = getattr(tokenizers, family)()
    marked, messages = _template(FAMILIES[family] or "chatml", tokenizer), _CASES["system_prompt"][0]
    ours = encode(tokenizer, unmarked(marked), messages)
    wanted = {"return_dict": True, "return_assistant_tokens_mask": True}
    theirs = tokenizer.apply_chat_template(messages, chat_template=marked, **wanted)
    length = len(ours.input_ids)  # without what follows the last token that is supervised
    assert ours.input_ids.tolist() == theirs["input_ids"][:length]
    assert ours.supervised.tolist() == [mask == 1 for mask in theirs["assistant_masks"][:length]]
    assert not any(theirs["assistant_masks"][length:])
