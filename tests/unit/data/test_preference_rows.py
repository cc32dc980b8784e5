"""Rows of preferences: both completions behind one prompt, to the token; one sample is a pair, wherever it is read."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp import CausalLMDataModule
from lit_fsdp.config.data import DataConfig, TurnsConfig
from lit_fsdp.data.encode import CUT, EncodedRow
from lit_fsdp.data.formats import find_format, map_turns, preference_sides, unread_columns
from lit_fsdp.data.stream import SampleStream, prepare_samples
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import byte_level_tokenizer, encoder_of, metaspace_tokenizer, write_rows
from tests.unit.data.conversations import say
from tests.unit.data.test_encode import CHATML, _encode, _shown

HI, YO, NO = say("u:hi", "a:yo", "a:no")


def test_masks_of_both_completions_written_out():
    chat = "<|im_start|> u s e r Ċ h i <|im_end|> Ċ <|im_start|> a s s i s t a n t Ċ {} +<|im_end|>"
    for row, template, wanted in [
        ({"prompt": "ab", "chosen": "cd", "rejected": "e"}, None, ["<s> a b C D +</s>", "<s> a b E +</s>"]),
        ({"chosen": "ab: cd", "rejected": "ab: ed"}, None, ["<s> a b : +Ġ C D +</s>", "<s> a b : +Ġ E D +</s>"]),
        ({"prompt": [HI], "chosen": [YO], "rejected": [NO]}, CHATML, [chat.format("Y O"), chat.format("N O")]),
        ({"chosen": [HI, YO], "rejected": [HI, NO]}, CHATML, [chat.format("Y O"), chat.format("N O")]),
        ({"prompt": "hi", "chosen": [HI, YO], "rejected": [HI, NO]}, CHATML, [chat.format("Y O"), chat.format("N O")]),
    ]:
        tokenizer = None if template is None else byte_level_tokenizer()
        samples = _encode(row, "preference", tokenizer, template).samples
        assert [_shown(sample) for sample in samples] == wanted, row
    row = {"prompt": "ab", "chosen": "cd", "rejected": "efghij"}
    found = _encode(row, "preference", max_seq_length=6)
    assert (found.truncated, [len(sample.input_ids) for sample in found.samples]) == (True, [6, 6])
    assert _encode(row, "preference", max_seq_length=3) == EncodedRow([], 0, (CUT,), is_plain=True)


def test_both_sides_are_cut_behind_the_same_tokens():
    """By the longer one, of which more is cut only where its completion alone is too long."""
    row = {"prompt": "0123456789", "chosen": "ab", "rejected": "cdefgh"}
    for truncation, limit, wanted in [
        ("start", 18, ["<s> 0 1 2 3 4 5 6 7 8 9 A B +</s>", "<s> 0 1 2 3 4 5 6 7 8 9 C D E F G H +</s>"]),
        ("start", 13, ["<s> 5 6 7 8 9 A B +</s>", "<s> 5 6 7 8 9 C D E F G H +</s>"]),
        ("start", 9, ["<s> 9 A B +</s>", "<s> 9 C D E F G H +</s>"]),
        ("start", 5, ["<s> A B +</s>", "<s> +F +G +H +</s>"]),
        ("end", 13, ["<s> 0 1 2 3 4 5 6 7 8 9 A B", "<s> 0 1 2 3 4 5 6 7 8 9 C D"]),
        ("drop", 14, []),
    ]:
        for one, other, sides in (("chosen", "rejected", wanted), ("rejected", "chosen", wanted[::-1])):
            turned = {"prompt": row["prompt"], one: row["chosen"], other: row["rejected"]}
            found = _encode(turned, "preference", max_seq_length=limit, truncation=truncation)
            assert [_shown(side).replace("+", "") for side in found.samples] == [s.replace("+", "") for s in sides]
            assert (found.truncated, bool(found.dropped)) == (limit < 18 and bool(sides), not sides)
    for equal, limit in (({"prompt": "0", "chosen": "ab", "rejected": "ab"}, 9), ({**row, "rejected": "abcd"}, 13)):
        found = _encode(equal, "preference", max_seq_length=limit, truncation="end")
        assert (found.samples, found.dropped) == ([], ("with equal completions",))
    blank = {"prompt": "a b a b ", "chosen": "a", "rejected": "[ b b"}  # which goes with the word behind it, if it can
    for limit in (8, 7, 6):
        found = _encode(blank, "preference", metaspace_tokenizer(), max_seq_length=limit, truncation="start")
        prompts = [side.input_ids[~side.supervised].tolist() for side in found.samples]
        assert prompts[0] == prompts[1][: len(prompts[0])], limit
        assert len(prompts[0]) == limit - 5


def test_preferences_as_openai_has_them():
    columns = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
    row = {"input": {"messages": [HI], "tools": []}, "preferred_output": [YO], "non_preferred_output": [NO]}
    shown = re.escape("chosen: preferred_output, rejected: non_preferred_output, prompt: input")
    with pytest.raises(DataError, match=rf"set data\.columns: {{{shown}}}"):
        _encode(row, "preference", template=CHATML)
    with pytest.raises(DataError, match=rf"data\.columns: {{{shown}}}"):
        find_format(set(row), "x")
    mapped = {ours: row[theirs] for ours, theirs in columns.items()}
    plain = {"prompt": [HI], "chosen": [YO], "rejected": [NO]}
    found, wanted = (_encode(one, "preference", template=CHATML).samples for one in (mapped, plain))
    assert [side.input_ids.tolist() for side in found] == [side.input_ids.tolist() for side in wanted]
    mapped["prompt"] = {"messages": [HI], "tools": [{"name": "f"}]}
    assert [side["tools"] for side in preference_sides(mapped, "x")] == [[{"name": "f"}]] * 2
    with pytest.raises(DataError, match="prompt: a conversation must be a non-empty list"):
        _encode({**mapped, "tools": [{"name": "g"}]}, "preference", template=CHATML)
    theirs = {"prompt": {"messages": [{"who": "user", "says": "hi"}]}, "chosen": [YO], "rejected": [NO]}
    assert map_turns(theirs, TurnsConfig(role="who", content="says"))["prompt"] == [HI]


def test_preferences_as_ms_swift_has_them():
    row = {"messages": [HI, YO], "rejected_response": "no", "tools": None}
    plain = {"prompt": [HI], "chosen": [YO], "rejected": [NO]}
    found, wanted = (_encode(one, "preference", template=CHATML).samples for one in (row, plain))
    assert [side.input_ids.tolist() for side in found] == [side.input_ids.tolist() for side in wanted]
    null = {"prompt": None, "chosen": None, "rejected": None}  # as Parquet files of several formats have it
    assert preference_sides({**row, **null}, "x") == preference_sides(row, "x")
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    sides = preference_sides({"messages": [HI, calls], "rejected_response": "no"}, "x")
    assert [side["completion"] for side in sides] == [[calls], [{"role": "assistant", "content": "no"}]]
    assert unread_columns({*row, "images"}, "preference") == ["images"]
    theirs = {"messages": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]}
    assert preference_sides(theirs | {"rejected_response": "no"}, "x")[1]["completion"][0]["value"] == "no"


def test_bad_rows_are_named_in_one_sentence():
    for row, message in [
        ({"prompt": "a", "chosen": "b", "rejected": None}, "chosen is str 'b' and rejected NoneType"),
        ({"chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ({"question": "q", "chosen": "A b", "rejected": "A c"}, "no prompt, but question"),
        ({"instruction": "q", "input": "x", "chosen": "b", "rejected": "c"},
         "no prompt, but instruction, input\n  fix:     write instruction and input as one column prompt"),
        ({"conversations": [HI], "chosen": YO, "rejected": NO},
         "no prompt, but conversations\n  fix:     map it: data.columns: {prompt: conversations}"),
        ({"chosen": "a", "rejected": [YO]}, "chosen is str 'a' and rejected list"),
        ({"chosen": 1, "rejected": 2}, "chosen is int '1' and rejected int '2'"),
        ({"input": "a", "chosen": 1, "rejected": "b"}, r"chosen .*\n  allowed: two texts, or two lists of messages$"),
        ({"prompt": [HI], "chosen": [HI], "rejected": []}, "rejected: completion: a conversation must be"),
        ({"chosen": [YO], "rejected": [NO]}, "chosen: prompt: a conversation must be a non-empty list"),
        ({"prompt": "what?", "chosen": [HI, YO], "rejected": [HI, NO]}, "prompt is not a common prefix"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=rf"^rows\.jsonl:3: {message}"):
            _encode(row, "preference", template=CHATML)
    with pytest.raises(ConfigError, match=r"data\.train_on_prompt"):
        _encode({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", train_on_prompt=True)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Nine rows, three to a global batch."""
    pairs = [{"prompt": f"{i}: ", "chosen": "y" * (i % 3 + 1), "rejected": "n" * (i % 4 + 1)} for i in range(9)]
    train = write_rows(tmp_path / "rows.jsonl", pairs)
    return {"train": train, "cache_dir": str(tmp_path / "cache"), "global_batch_size": 3}


def test_validation_takes_whole_pairs_and_a_stream_gives_the_same_pairs(given: dict[str, Any]):
    tokenizer = byte_level_tokenizer()
    config = DataConfig(**given, val_split=3)
    found = prepare_samples(config, ["train", "val"], encoder_of(tokenizer, config))
    assert [len(found[split]) for split in ("train", "val")] == [6, 3]
    for samples in found.values():
        numbers = samples.rows.numbers[samples.row_ids].reshape(-1, 2)
        assert np.array_equal(numbers[:, 0], numbers[:, 1])
    config = DataConfig(**given, shuffle=False, streaming=True)
    stream = SampleStream(config, encoder_of(tokenizer, config), 0)
    assert stream.pairs
    pairs = [item for items, _ in islice(stream.global_batches(), 3) for _, item in items]
    shown = [[tokenizer.decode(ids) for ids, _ in pair] for pair in pairs]
    assert shown == [[f"{i}: {'y' * (i % 3 + 1)}</s>", f"{i}: {'n' * (i % 4 + 1)}</s>"] for i in range(9)]


def test_what_cannot_be_mixed_packed_or_trained_on_is_refused(tmp_path: Path, given: dict[str, Any]):
    plain = write_rows(tmp_path / "plain.jsonl", [{"prompt": "a", "completion": "b"}])
    for options, is_preference, error in [
        ({"train": [given["train"], plain]}, None, "data.train: got sources of formats preference, prompt_completion"),
        ({"packing": True}, None, "data.packing: got true"),
        ({}, False, "PreferenceModule"),
        ({"streaming": True}, False, "PreferenceModule"),
        ({"train": plain}, True, "plain.jsonl:1: no columns chosen and rejected, only prompt, completion"),
        ({"train": [{"source": plain, "format": "prompt_completion"}]}, True, "one completion"),
    ]:
        data = CausalLMDataModule(**{**given, **options})
        data.attach(byte_level_tokenizer(), 0, is_preference=is_preference)
        with pytest.raises((ConfigError, DataError), match=error):
            data.prepare(["train"])
