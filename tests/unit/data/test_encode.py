"""Rows of every format as samples: BOS and EOS once, cut to length, and why a row is dropped."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import CUT, EMPTY, NO_TURN, NOTHING_LEFT, TOO_LONG, EncodedRow, RowEncoder
from lit_fsdp.data.masks import Encoded
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import byte_level_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TURN = {"role": "user", "content": "a"}


def _tokenizer(single: str | None = None) -> Any:
    """The small tokenizer, which puts around a text what ``single`` says."""
    tokenizer = byte_level_tokenizer()
    if single:
        ends = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in ("<s>", "</s>")]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    return tokenizer


def _encode(row: dict[str, Any], form: Any, tokenizer: Any = None, template: Any = None, **options: Any) -> EncodedRow:
    encoder = RowEncoder(tokenizer or _tokenizer("<s> $A"), DataConfig(**options), template)
    return encoder.encode([row], form, ["rows.jsonl:3"])[0]


def _shown(row: Encoded) -> str:
    """Learnt tokens in capitals, or behind ``+`` where they have none."""
    tokens = byte_level_tokenizer().convert_ids_to_tokens(row.input_ids.tolist())
    marked = [
        token if not mark else f"+{token}" if token == token.upper() or len(token) > 1 else token.upper()
        for token, mark in zip(tokens, row.supervised.tolist(), strict=True)
    ]
    return " ".join(marked)


@pytest.mark.parametrize(
    ("adds", "text", "wanted"),
    [
        (None, "abc", "a B C +</s>"),
        ("<s> $A", "abc", "<s> A B C +</s>"),
        ("<s> $A </s>", "abc", "<s> A B C +</s>"),
        ("$A </s>", "abc", "a B C +</s>"),
        ("<s> $A", "<s>abc</s>", "<s> A B C +</s>"),
        ("<s> $A", "ab</s>c", "<s> A B +</s> C +</s>"),
        ("<s> $A", "\nabc ", "<s> +Ċ A B C +Ġ +</s>"),
        (None, "   abc", "Ġ +Ġ +Ġ A B C +</s>"),
        ("<s> $A </s>", "  ", "<s> +Ġ +Ġ +</s>"),
    ],
)
def test_a_text_has_bos_and_eos_once(adds: str | None, text: str, wanted: str):
    """BOS where the tokenizer puts one, EOS always; all but the first token are supervised."""
    found = _encode({"text": text}, "text", _tokenizer(adds))
    assert ([_shown(row) for row in found.samples], found.truncated, found.dropped) == ([wanted], False, None)


def test_a_long_text_is_split_and_nothing_is_lost():
    """Whatever is to be done with long conversations."""
    tokenizer, draw = _tokenizer("<s> $A"), random.Random(1)
    for truncation in ("end", "start", "drop", "error"):
        for length in range(1, 40):
            text = "".join(draw.choices("abc \n", k=length))
            whole = _encode({"text": text}, "text", tokenizer).samples[0]
            found = _encode({"text": text}, "text", tokenizer, max_seq_length=7, truncation=truncation)
            assert [t for row in found.samples for t in row.input_ids.tolist()] == whole.input_ids.tolist()
            assert all(2 <= len(row.input_ids) <= 7 for row in found.samples)
            assert all(row.supervised.tolist() == [False] + [True] * (len(row.supervised) - 1) for row in found.samples)
            assert (found.truncated, found.dropped) == (False, None)


def test_what_is_left_of_a_text_without_tokens():
    assert _encode({"text": ""}, "text") == EncodedRow([], False, EMPTY)
    with pytest.raises(DataError, match=r"^rows\.jsonl:3: text: text expected, not int"):
        _encode({"text": 3}, "text")
    tokenizer = _tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="without an EOS token"):
        _encode({"text": "abc"}, "text", tokenizer)


@pytest.mark.parametrize(
    ("truncation", "wanted", "truncated", "dropped"),
    [
        ("end", ["<s> A B C"], True, None),
        ("start", ["<s> D E +</s>"], True, None),
        ("drop", [], False, TOO_LONG),
    ],
)
def test_truncation(truncation: Any, wanted: list[str], truncated: bool, dropped: str | None):
    """What is cut at the start is not BOS."""
    row = {"prompt": "", "completion": "abcde"}
    found = _encode(row, "prompt_completion", max_seq_length=4, truncation=truncation)
    assert ([_shown(sample) for sample in found.samples], found.truncated, found.dropped) == (
        wanted,
        truncated,
        dropped,
    )
    short = _encode(row, "prompt_completion", max_seq_length=7, truncation=truncation)
    assert ([_shown(sample) for sample in short.samples], short.truncated) == (["<s> A B C D E +</s>"], False)


def test_a_row_that_is_too_long_stops_the_run_where_it_is_asked_to():
    with pytest.raises(DataError, match=r"(?s)^rows\.jsonl:3: 7 tokens\n.*max_seq_length 4.*max_seq_length: 7"):
        _encode({"prompt": "ab", "completion": "cde"}, "prompt_completion", max_seq_length=4, truncation="error")


@pytest.mark.parametrize(
    ("turns", "options", "dropped"),
    [
        ([("user", "abc")], {}, NO_TURN),
        ([("user", "abc"), ("assistant", "d")], {"max_seq_length": 8}, CUT),
        ([("user", "a"), ("assistant", "bcdef")], {"max_seq_length": 2, "truncation": "start"}, None),
        ([("user", "abc"), ("assistant", "d")], {"supervise": "flagged"}, NOTHING_LEFT),
        ([("user", "abc")], {"train_on_prompt": True}, None),
    ],
)
def test_why_a_conversation_is_dropped(turns: Any, options: dict[str, Any], dropped: str | None):
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    found = _encode(row, "messages", template=CHATML, **options)
    assert (found.dropped, len(found.samples)) == (dropped, int(dropped is None))


def test_plain_prompts_and_completions_stand_as_they_are():
    """With a chat template too, which renders messages alone; the completion is supervised, and EOS follows."""
    row, turn = {"prompt": "ab\n", "completion": "\ncd"}, {"role": "assistant", "content": "b"}
    chat = {"prompt": [{"role": "user", "content": "a"}], "completion": [turn]}
    for template in (None, CHATML):
        assert [_shown(s) for s in _encode(row, "prompt_completion", template=template).samples] == [
            "<s> a b Ċ +Ċ C D +</s>"
        ]
    everything = _encode(row, "prompt_completion", train_on_prompt=True)
    assert [_shown(s) for s in everything.samples] == ["<s> A B +ĊĊ C D +</s>"]
    encoder = RowEncoder(_tokenizer("<s> $A"), DataConfig(), CHATML)
    mixed = encoder.encode([row, chat, row], "prompt_completion", ["1", "2", "3"])
    assert [_shown(each.samples[0])[:14] for each in mixed] == ["<s> a b Ċ +Ċ C", "<|im_start|> u", "<s> a b Ċ +Ċ C"]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"instruction": "a", "output": "b"}, "instruction"),
        ({"prompt": [TURN], "completion": [TURN]}, "prompt_completion"),
    ],
)
def test_conversations_without_a_template_are_refused(row: dict[str, Any], form: Any):
    with pytest.raises(ConfigError) as caught:
        _encode(row, form)
    assert caught.value.field == "data.chat_template"
    assert str(caught.value).endswith("fix:     set data.chat_template: chatml")


def test_what_a_base_model_may_add():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0, "</s>": 1}, merges=[])))
    tokenizer.eos_token = "</s>"
    with pytest.raises(ConfigError, match=r"set data.chat_template: chatml with model\.add_tokens: \['<\|im_start"):
        _encode({"messages": [{"role": "user", "content": "a"}]}, "messages", tokenizer)


def test_token_ids():
    tokenizer = _tokenizer("<s> $A")
    ids = tokenizer.convert_tokens_to_ids(list("abcd"))
    assert [_shown(s) for s in _encode({"input_ids": ids}, "tokens").samples] == ["a B C D"]
    labels = [-100, -100, *ids[2:]]
    assert [_shown(s) for s in _encode({"input_ids": ids, "labels": labels}, "tokens").samples] == ["a b C D"]
    cut = _encode({"input_ids": ids, "labels": labels}, "tokens", max_seq_length=2)
    assert (cut.dropped, cut.truncated) == (CUT, True)
    assert _encode({"input_ids": ids, "labels": [-100] * 4}, "tokens").dropped == NOTHING_LEFT
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: token id {len(tokenizer)}\n.*0 to {len(tokenizer) - 1}"):
        _encode({"input_ids": [0, len(tokenizer)]}, "tokens")


def test_the_fingerprint_is_of_all_that_ids_and_masks_depend_on():
    tokenizer = _tokenizer()
    options = [{}, {"supervise": "last"}, {"train_on_prompt": True}, {"max_seq_length": 9}, {"truncation": "drop"}]
    texts = {RowEncoder(tokenizer, DataConfig(**each), CHATML).text for each in options}
    texts |= {RowEncoder(tokenizer, DataConfig(), template).text for template in (None, CHATML + " ")}
    texts |= {RowEncoder(_tokenizer("<s> $A"), DataConfig(), CHATML).text}
    assert len(texts) == len(options) + 3
    other = RowEncoder(tokenizer, DataConfig(cache_dir="x", num_workers=3), CHATML).text
    assert other in texts


def test_an_encoder_survives_being_sent():
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    encoder = RowEncoder(_tokenizer("<s> $A"), DataConfig(), CHATML)
    encoder.encode([row], "messages", ["row"])
    sent = pickle.loads(pickle.dumps(encoder))
    assert sent.text == encoder.text
    (before,), (after,) = (each.encode([row], "messages", ["row"])[0].samples for each in (encoder, sent))
    assert after.input_ids.tolist() == before.input_ids.tolist()


def test_everything_is_supervised_or_some_turns_are():
    with pytest.raises(ConfigError, match=r"^train_on_prompt: got true with supervise: last"):
        DataConfig(train_on_prompt=True, supervise="last")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi"}, "no 'completion'; a row of format prompt_completion has prompt, completion"),
        ({"prompt": "hi", "completion": None}, "completion: text expected, not NoneType"),
        ({"prompt": 3, "completion": "a"}, "prompt: text expected, not int '3'"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "system beside a prompt and a completion in plain text"),
        ({"prompt": "a", "completion": [TURN]}, "prompt: a conversation is a list of at least one message, not str"),
        ({"prompt": "\ud800 hi", "completion": "a"}, "prompt: half a character at 0"),
    ],
)
def test_a_bad_row_of_a_base_model_is_named(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=rf"^rows\.jsonl:3: {message}"):
        _encode(row, "prompt_completion")


def test_of_a_prompt_with_turns_the_completion_alone_is_supervised():
    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    row = {"prompt": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]}
    row["completion"] = [turn("assistant", "d")]
    for options, wanted in (({}, ["d", "<|im_end|>"]), ({"supervise": "last"}, ["d", "<|im_end|>"])):
        (sample,) = _encode(row, "prompt_completion", template=CHATML, **options).samples
        tokens = byte_level_tokenizer().convert_ids_to_tokens(sample.input_ids[sample.supervised.astype(bool)].tolist())
        assert tokens == wanted
    (sample,) = _encode(row, "prompt_completion", template=CHATML, train_on_prompt=True).samples
    assert sample.supervised[1:].all()
