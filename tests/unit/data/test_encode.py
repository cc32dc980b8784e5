"""Rows of every format as samples: BOS and EOS once, cut to length, and why a row is dropped."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import CUT, EMPTY, NOTHING_LEFT, TOO_LONG, EncodedRow
from lit_fsdp.data.masks import Encoded
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import byte_level_tokenizer, encoder_of
from tests.unit.data.conversations import CHATML

TURN = {"role": "user", "content": "a"}


def _encode(row: dict[str, Any], form: Any, tokenizer: Any = None, template: Any = None, **options: Any) -> EncodedRow:
    encoder = encoder_of(tokenizer or byte_level_tokenizer("<s> $A"), DataConfig(**options), template)
    return encoder.encode([row], form, ["rows.jsonl:3"])[0]


def _shown(row: Encoded) -> str:
    """Supervised tokens in capitals, or behind ``+`` where they have none."""
    tokens = byte_level_tokenizer().convert_ids_to_tokens(row.input_ids.tolist())
    marked = [
        token if not mark else f"+{token}" if token == token.upper() or len(token) > 1 else token.upper()
        for token, mark in zip(tokens, row.supervised.tolist(), strict=True)
    ]
    return " ".join(marked)


def test_a_text_has_bos_and_eos_once_and_token_ids_stay_as_they_are():
    """BOS where the tokenizer puts one, EOS always; all but the first token are supervised."""
    for adds, text, wanted in [
        (None, "abc", "a B C +</s>"),
        ("<s> $A", "abc", "<s> A B C +</s>"),
        ("<s> $A </s>", "abc", "<s> A B C +</s>"),
        ("<s> $A", "<s>abc</s>", "<s> A B C +</s>"),
        ("<s> $A", "ab</s>c", "<s> A B +</s> C +</s>"),
        ("<s> $A </s>", "  ", "<s> +Ġ +Ġ +</s>"),
    ]:
        found = _encode({"text": text}, "text", byte_level_tokenizer(adds))
        assert ([_shown(row) for row in found.samples], found.truncated, found.dropped) == ([wanted], 0, ()), text
    assert _encode({"text": ""}, "text") == EncodedRow([], 0, (EMPTY,))
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="without an EOS token"):
        _encode({"text": "abc"}, "text", tokenizer)
    ids = tokenizer.convert_tokens_to_ids(list("abcd"))
    labels = [-100, -100, *ids[2:]]
    assert [_shown(s) for s in _encode({"input_ids": ids, "labels": labels}, "tokens").samples] == ["a b C D"]
    cut = _encode({"input_ids": ids, "labels": labels}, "tokens", max_seq_length=2)
    assert cut == EncodedRow([], 0, (CUT,))
    assert _encode({"input_ids": ids, "labels": [-100] * 4}, "tokens").dropped == (NOTHING_LEFT,)


def test_a_long_text_is_split_and_nothing_is_lost():
    """Whatever is to be done with long conversations."""
    tokenizer, draw = byte_level_tokenizer("<s> $A"), random.Random(1)
    for truncation in ("end", "error"):
        for length in range(1, 40):
            text = "".join(draw.choices("abc \n", k=length))
            whole = _encode({"text": text}, "text", tokenizer).samples[0]
            found = _encode({"text": text}, "text", tokenizer, max_seq_length=7, truncation=truncation)
            assert [t for row in found.samples for t in row.input_ids.tolist()] == whole.input_ids.tolist()
            assert all(2 <= len(row.input_ids) <= 7 for row in found.samples)
            assert all(row.supervised.tolist() == [False] + [True] * (len(row.supervised) - 1) for row in found.samples)
            assert (found.truncated, found.dropped) == (0, ())


def test_truncation():
    """What is cut at the start is not BOS."""
    row = {"prompt": "", "completion": "abcde"}
    for truncation, wanted, truncated, dropped in [
        ("end", ["<s> A B C"], 1, ()),
        ("start", ["<s> D E +</s>"], 1, ()),
        ("drop", [], 0, (TOO_LONG,)),
    ]:
        found = _encode(row, "prompt_completion", max_seq_length=4, truncation=truncation)
        assert [_shown(sample) for sample in found.samples] == wanted
        assert (found.truncated, found.dropped) == (truncated, dropped)
    short = _encode(row, "prompt_completion", max_seq_length=7, truncation="error")
    assert ([_shown(sample) for sample in short.samples], short.truncated) == (["<s> A B C D E +</s>"], False)
    with pytest.raises(DataError, match=r"(?s)^rows\.jsonl:3: 7 tokens\n.*max_seq_length 4.*max_seq_length: 7"):
        _encode({"prompt": "ab", "completion": "cde"}, "prompt_completion", max_seq_length=4, truncation="error")


def test_plain_prompts_and_completions_stand_as_they_are():
    """With a chat template too, which renders messages alone; the completion is supervised, and EOS follows."""
    row, turn = {"prompt": "ab\n", "completion": "\ncd"}, {"role": "assistant", "content": "b"}
    for template in (None, CHATML):
        found = _encode(row, "prompt_completion", template=template).samples
        assert [_shown(s) for s in found] == ["<s> a b Ċ +Ċ C D +</s>"]
    found = _encode(row, "prompt_completion", train_on_prompt=True).samples
    assert [_shown(s) for s in found] == ["<s> A B +ĊĊ C D +</s>"]
    encoder = encoder_of(byte_level_tokenizer("<s> $A"), DataConfig(), CHATML)
    chat = {"prompt": [TURN], "completion": [turn]}
    mixed = encoder.encode([row, chat, row], "prompt_completion", ["1", "2", "3"])
    assert [_shown(each.samples[0])[:14] for each in mixed] == ["<s> a b Ċ +Ċ C", "<|im_start|> u", "<s> a b Ċ +Ċ C"]


def test_answers_without_text_are_marked_and_trained_on_as_before():
    """Where all that is supervised is special tokens and blanks; a call is text, and so is one of two answers."""
    head = "<|im_start|> u s e r Ċ a <|im_end|> Ċ <|im_start|> a s s i s t a n t Ċ"

    def talk(*answers: str) -> dict[str, Any]:
        return {"messages": [one for text in answers for one in (TURN, {"role": "assistant", "content": text})]}

    for row, form, wanted, lacks in [
        ({"prompt": "a", "completion": ""}, "prompt_completion", ["<s> a +</s>"], True),
        ({"prompt": "a", "completion": " "}, "prompt_completion", ["<s> a +Ġ +</s>"], True),
        ({"prompt": "a", "completion": "0"}, "prompt_completion", ["<s> a +0 +</s>"], False),
        ({"instruction": "a", "output": ""}, "instruction", [f"{head} +<|im_end|>"], True),
        (talk(""), "messages", [f"{head} +<|im_end|>"], True),
        (talk("<think>\n</think>"), "messages", [f"{head} +<think> +Ċ +</think> +<|im_end|>"], True),
        (talk("b"), "messages", [f"{head} B +<|im_end|>"], False),
        (talk("", "b"), "messages", [f"{head} +<|im_end|> +Ċ {head} B +<|im_end|>".replace("+Ċ", "Ċ")], False),
        ({"text": "  "}, "text", ["<s> +Ġ +Ġ +</s>"], False),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "tokens", None, False),
    ]:  # fmt: skip
        template = None if form in ("text", "tokens") else CHATML
        found = _encode(row, form, template=template)
        assert found.lacks_text is lacks, row
        assert wanted is None or [_shown(one) for one in found.samples] == wanted, row
    assert _encode(talk("", "b"), "messages", template=CHATML, split_turns=True).lacks_text
    assert _encode({"prompt": "a", "completion": "  b"}, "prompt_completion", max_seq_length=3).lacks_text is False
    empty = {"prompt": "abc", "completion": ""}
    assert _encode(empty, "prompt_completion", max_seq_length=3) == EncodedRow([], 0, (CUT,), is_plain=True)


def test_a_bad_row_of_a_base_model_is_named():
    with pytest.raises(ConfigError, match=r"^data\.chat_template: (?s:.*)fix:     set data\.chat_template: chatml$"):
        _encode({"messages": [TURN]}, "messages")
    for row, message in [
        ({"prompt": "hi"}, "completion: text expected, not NoneType"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "system has no effect on a plain-text prompt"),
        ({"prompt": "a", "completion": [TURN]}, "prompt: a conversation must be a non-empty list of messages, not str"),
        ({"prompt": "\ud800 hi", "completion": "a"}, "text with an unpaired surrogate"),
    ]:
        with pytest.raises(DataError, match=rf"^rows\.jsonl:3: {message}"):
            _encode(row, "prompt_completion", template=CHATML)
