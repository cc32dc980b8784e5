"""Rows of each format as conversations."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.data.formats import Conversation, find_format, read_text, read_tokens, to_conversation
from lit_fsdp.data.readers import read_file
from lit_fsdp.errors import DataError

HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
SYSTEM = {"role": "system", "content": "S"}
PART = {"type": "text", "text": "Yo"}
DEVELOPER = {"role": "developer", "content": "S"}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}


def _messages(*turns: Any, form: Any = "messages", **row: Any) -> list[dict[str, Any]]:
    return to_conversation({"messages": list(turns), **row}, form, "x").messages


def test_formats():
    table: list[tuple[Any, dict[str, Any], list[dict[str, str]]]] = [
        ("messages", {"messages": [SYSTEM, HI, YO], "id": 3}, [SYSTEM, HI, YO]),
        ("messages", {"system": "S", "messages": [HI, YO]}, [SYSTEM, HI, YO]),
        ("messages", {"system": "S\n", "messages": [SYSTEM, HI, YO]}, [SYSTEM, HI, YO]),  # said twice alike
        ("messages", {"system": "S", "messages": [DEVELOPER, HI]}, [DEVELOPER, HI]),
        ("messages", {"messages": [{"role": "assistant", "content": [PART]}]}, [YO]),
        ("messages", {"messages": [SYSTEM, HUMAN, YO]}, [SYSTEM, HI, YO]),
        ("sharegpt", {"conversations": [HUMAN, GPT]}, [HI, YO]),
        (
            "sharegpt",
            {"conversations": [{"from": "Human", "value": "Hi"}, {"from": "Function", "value": "3"}]},
            [HI, {"role": "tool", "content": "3"}],
        ),
        ("instruction", {"instruction": "Hi", "input": None, "output": "Yo", "system": "S"}, [SYSTEM, HI, YO]),
        (
            "instruction",
            {"instruction": "Add.", "input": "1", "output": "Yo"},
            [{"role": "user", "content": "Add.\n\n1"}, YO],
        ),
        ("prompt_completion", {"prompt": [SYSTEM, HI], "completion": [YO]}, [SYSTEM, HI, YO]),
    ]
    for form, row, wanted in table:
        assert find_format(set(row), "x") == form
        assert to_conversation(row, form, "x") == Conversation(wanted), row
    assert find_format({"text", "id"}, "x") == "text"
    assert find_format({"text", "input_ids"}, "x") == "tokens"
    assert find_format({"text", "prompt", "completion"}, "x") == "prompt_completion"
    for columns in ({"content"}, set[str](), {"instruction"}, {"prompt", "response"}):
        with pytest.raises(
            DataError, match=r"are of no known row format\n  allowed: messages(?s:.*)\{messages: chat\}"
        ):
            find_format(columns, "rows.jsonl:1")


def test_which_turns_say_that_they_are_supervised():
    """By ``train`` and ``weight``; what the assistant said in a prompt is given, as everything else in it."""
    for flag, wanted in (({"train": 0}, False), ({"weight": 0}, False), ({"weight": 1}, True), ({"train": None}, None)):
        for turn in (YO, GPT):
            (last,) = _messages({**turn, **flag})
            assert last.get("train") is wanted
            assert "weight" not in last
    row = {"prompt": [HI, YO, HI, {**YO, "train": True}, HI], "completion": [YO]}
    found = to_conversation(row, "prompt_completion", "x").messages
    assert [turn.get("train") for turn in found] == [None, False, None, True, None, None]


def test_calls_and_tools():
    wanted = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    for arguments in ({"a": 1}, '{"a": 1}'):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        for given in (calls, calls[0], json.dumps(calls)):
            assert _messages(HI, {"role": "assistant", "tool_calls": given})[1] == wanted
    answer = {"role": "tool", "content": "2", "name": "f"}
    assert _messages(HI, answer)[1] == answer
    called = {"name": "f", "arguments": {"a": 1}}
    older = _messages({"role": "assistant", "content": None, "function_call": called}, {**answer, "role": "function"})
    assert older == [{"role": "assistant", "content": "", "tool_calls": [called]}, answer]
    said = {"from": "function_call", "value": json.dumps(called)}
    assert _messages(said, {"from": "observation", "value": "2"})[0] == older[0]
    for tools, schemas in (([{"name": "f"}], [{"name": "f"}]), ('[{"name": "f"}]', [{"name": "f"}]), ("", None)):
        assert to_conversation({"messages": [HI], "tools": tools}, "messages", "x").tools == schemas


def test_messages_are_json_text_in_a_csv_file(tmp_path: Path):
    turns = [HI, {**YO, "train": False}]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages", "id"], [json.dumps(turns), "1"], ["[{", "2"]])
    (where, row), (other, broken) = read_file(str(tmp_path / "rows.csv"))
    assert to_conversation(row, "messages", where).messages == turns
    with pytest.raises(DataError, match=r"rows\.csv: row 1: messages are not JSON"):
        to_conversation(broken, "messages", other)
    alone = {"conversations": json.dumps([{"from": "human", "value": "a"}])}
    assert to_conversation(alone, "sharegpt", "x").messages == [{"role": "user", "content": "a"}]


def test_a_bad_row_is_named():
    call: Any = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}

    def calling(arguments: Any) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    known, calls = "of a message is not known here", "tool_calls are a list of calls with a function name"
    either, part = "a message has role and content, or from and value", "a part of a content that says"
    turns: list[tuple[Any, str]] = [  # message 0 of a conversation
        ("Yo", f"{either}, not str 'Yo'"),
        ({"from": "human"}, either),
        ({"from": "alien", "value": "x"}, "from 'alien'\n  allowed: system"),
        ({"role": "bot", "content": "x"}, "role 'bot'\n  allowed: system, developer, user"),
        ({"role": "user"}, "user: text expected, not NoneType"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "user: text expected, not list"),
        ({**YO, "train": "yes"}, "train str 'yes'\n  allowed: true or false"),
        ({**YO, "weight": 0.5}, "weight float '0.5'\n  allowed: 0 .not supervised"),
        ({**YO, "train": True, "weight": 0}, "train True and weight 0\n  fix: .*keep one"),
        ({**YO, "training": False}, f"training {known}\n.*write train: "),
        ({**YO, "train_detail": []}, f"train_detail {known}"),
        ({**YO, "tool_responses": []}, f"tool_responses {known}\n.*a message of the role tool"),
        ({**YO, "content": [{**PART, "train": False}]}, part),
        ({**YO, "content": [PART, {**PART, "weight": 0}]}, part),
        ({**YO, "tool_calls": 3}, calls),
        (calling("{"), "arguments of 'f' are not JSON"),
        (calling("[1]"), "arguments of 'f' are an object, not list"),
    ]
    table: list[tuple[Any, dict[str, Any], str]] = [
        ("messages", {"messages": [turn]}, f"message 0: .*{said}" if said[0] == "h" else f"message 0: {said}")
        for turn, said in turns
    ]
    table += [
        ("messages", {"text": "a"}, "no 'messages'; a row of format messages has messages"),
        ("messages", {"messages": []}, "a conversation is a list of at least one message, not list '"),
        ("messages", {"messages": [HI], "tools": "[" * 5000}, "tools are not JSON"),
        ("messages", {"messages": [HI], "tools": [1]}, "tools are a list of JSON schemas"),
        ("messages", {"messages": [HI], "chat_template_kwargs": "x"}, "chat_template_kwargs are names with values"),
        ("messages", {"messages": [{**SYSTEM, "content": "T"}, HI], "system": "S"}, "a system column and a system mes"),
        ("instruction", {"instruction": "a"}, "no 'output'; a row of format instruction has instruction, output"),
        ("instruction", {"instruction": "a", "input": 5, "output": "b"}, "input: text expected"),
        ("prompt_completion", {"prompt": [HI], "completion": "a"}, "completion: a conversation is a list of .*not str"),
    ]
    assert to_conversation({"messages": [call]}, "messages", "x").messages
    for form, row, message in table:
        with pytest.raises(DataError, match=rf"^rows\.jsonl:3: {message}"):
            to_conversation(row, form, "rows.jsonl:3")
    assert read_text({"text": "a\nb"}, "x") == "a\nb"
    for row, message in (
        ({}, "no 'text'"),
        ({"text": None}, "text: text expected"),
    ):
        with pytest.raises(DataError, match=f"^rows:1: {message}"):
            read_text(row, "rows:1")


def test_token_ids_and_masks():
    for ids in ([5, 6, 7], (5, 6, 7), np.array([5, 6, 7], dtype=np.uint16)):
        found, mask = read_tokens({"input_ids": ids, "attention_mask": [1, 1, 1]}, "x")
        assert (found.tolist(), mask) == ([5, 6, 7], None)
    for column, value in (
        ("completion_mask", [0, 1, 1]),
        ("completion_mask", [False, True, True]),
        ("labels", [-100, 6, 7]),
    ):
        for form in (value, np.array(value)):
            mask = read_tokens({"input_ids": [5, 6, 7], column: form}, "x")[1]
            assert mask is not None
            assert (mask.dtype, mask.tolist()) == (bool, [False, True, True])
    integers = "input_ids: a list of integers expected"
    for row, message in [
        ({}, "no 'input_ids'"),
        *(({"input_ids": ids}, integers) for ids in ([10**30], [1.0], [float("nan")], [True], [[1], [2, 3]], [[1]])),
        *(({"input_ids": [0, bad]}, r"input_ids\[1\] is -?\d+, which is no token id") for bad in (-1, 2**31)),
        ({"input_ids": [5, 6], "labels": [5]}, "labels: 1 values for 2 input_ids"),
        ({"input_ids": [5, 6], "labels": [6, 7]}, r"labels\[0\] is 6, but input_ids\[0\] is 5\n.*not shifted"),
        ({"input_ids": [5, 6], "completion_mask": [0, 2]}, "completion_mask: a list of 0 and 1 expected"),
        ({"input_ids": [5, 6], "completion_mask": [0]}, "completion_mask: 1 values for 2 input_ids"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1]}, "the mask loss_mask is not known here\n.*{completion_mask: loss"),
        ({"input_ids": [5, 6], "completion_mask": [0, 1], "labels": [5, 6]}, "completion_mask and labels differ"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 2]}, "attention_mask: a list of 0 and 1 expected"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 0]}, "attention_mask has padding"),
    ]:
        with pytest.raises(DataError, match=rf"^rows\.parquet: row 3: {message}"):
            read_tokens(row, "rows.parquet: row 3")
