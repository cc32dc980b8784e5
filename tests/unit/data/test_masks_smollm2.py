"""The real SmolLM2 tokenizer and template, token by token: ``+`` is learnt, the texts in tests/golden/masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.cache import prepare_rows
from lit_fsdp.data.templates import ChatTemplate

_CASES: dict[str, tuple[list[tuple[str, str]], dict[str, Any]]] = {
    "one_turn": ([("user", "What is 12 + 30?"), ("assistant", "12 + 30 = 42")], {}),
    "multi_turn": (
        [("user", "Hi."), ("assistant", "Hello!"), ("user", "Who wrote Emma?"), ("assistant", "Jane Austen.")],
        {},
    ),
    "last_turn": (
        [("user", "Hi."), ("assistant", "Hello!"), ("user", "Bye."), ("assistant", "Bye!")],
        {"supervise": "last"},
    ),
    "system_prompt": ([("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello!")], {}),
    "empty_assistant": (
        [("system", ""), ("user", "Hi."), ("assistant", ""), ("user", "Well?"), ("assistant", "Yes.")],
        {},
    ),
    "trailing_user": ([("system", "S"), ("user", "Hi."), ("assistant", "Hello!"), ("user", "Bye.")], {}),
    "blank_lines": ([("system", "S"), ("user", "Hi."), ("assistant", "\n\nHello\n\nyou \n")], {}),
    "unicode": ([("system", "S"), ("user", "naïve 日本"), ("assistant", "Ünï 🙂 ok")], {}),
    "end_mark_in_text": ([("system", "S"), ("user", "Say it."), ("assistant", "<|im_end|>")], {}),
    "truncated": (
        [("system", "S"), ("user", "Count."), ("assistant", "1 2 3 4 5 6")],
        {"max_seq_length": 20},
    ),
}


def _golden(root: Path, name: str) -> list[str]:
    return (root / "tests" / "golden" / "masks" / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def _lines(tokenizer: Any, ids: np.ndarray, supervised: np.ndarray) -> list[str]:
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    return [f"{'+' if learnt else ' '} {token}" for token, learnt in zip(tokens, supervised, strict=True)]


@pytest.mark.parametrize("name", sorted(_CASES))
def test_mask_is_as_written_out(smollm2: Any, root: Path, tmp_path: Path, name: str):
    """Through a file, the cache and back, as in a run."""
    turns, options = _CASES[name]
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    config = DataConfig(**options)
    rows = prepare_rows(str(source), config, ChatTemplate(smollm2, None, config.supervise))
    assert len(rows) == 1
    assert _lines(smollm2, *rows.row(0)) == _golden(root, name)


def test_every_golden_file_is_compared(root: Path):
    assert {path.stem for path in (root / "tests" / "golden" / "masks").iterdir()} == set(_CASES)


def test_ids_are_those_of_the_template(smollm2: Any):
    """Where no token lies across a border, the ids are what transformers itself makes of the conversation."""
    messages = [{"role": "user", "content": "What is 2024 in words?"}, {"role": "assistant", "content": "Many."}]
    from lit_fsdp.data.formats import Conversation

    encoded = ChatTemplate(smollm2, None).encode([Conversation(messages)], ["x"])[0]
    assert encoded.input_ids.tolist() == smollm2.apply_chat_template(messages, return_dict=False)
    prompt = smollm2.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert int(encoded.supervised.argmax()) == len(prompt)
    assert smollm2.decode(encoded.input_ids[encoded.supervised]) == "Many.<|im_end|>"
