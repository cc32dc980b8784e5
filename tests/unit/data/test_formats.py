"""Rows of each format as conversations and token ids, and what is said of a bad one."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.data.formats import Conversation, find_format, read_tokens, to_conversation
from lit_fsdp.data.readers import read_file
from lit_fsdp.errors import DataError

HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
SYSTEM, DEVELOPER = {"role": "system", "content": "S"}, {"role": "developer", "content": "S"}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}
PART = {"type": "text", "text": "Yo"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def test_formats():
    table: list[tuple[Any, dict[str, Any], list[dict[str, str]]]] = [
        ("messages", {"messages": [SYSTEM, HI, YO], "id": 3}, [SYSTEM, HI, YO]),
        ("messages", {"system": "S", "messages": [HI, YO]}, [SYSTEM, HI, YO]),
        ("messages", {"messages": [DEVELOPER, {"role": "assistant", "content": [PART, PART]}]},
         [DEVELOPER, {"role": "assistant", "content": "YoYo"}]),
        ("sharegpt", {"conversations": [{"from": "system", "value": "S"}, HUMAN, GPT, {**YO, "from": None}]},
         [SYSTEM, HI, YO, YO]),
        ("instruction", {"instruction": "Hi", "input": None, "output": "Yo", "system": "S"}, [SYSTEM, HI, YO]),
        ("instruction", {"instruction": "Add.", "input": "1", "output": "Yo"},
         [{"role": "user", "content": "Add.\n\n1"}, YO]),
        ("prompt_completion", {"prompt": [SYSTEM, HI, YO, {**YO, "train": True}, HI], "completion": [YO]},
         [SYSTEM, HI, {**YO, "train": False}, {**YO, "train": True}, HI, YO]),  # what was said in a prompt is given
    ]  # fmt: skip
    for form, row, wanted in table:
        assert find_format(set(row), "x") == form
        assert to_conversation(row, form, "x") == Conversation(wanted), row
    assert find_format({"text", "id"}, "x") == "text"
    assert find_format({"text", "input_ids"}, "x") == "tokens"
    assert find_format({"text", "prompt", "completion"}, "x") == "prompt_completion"
    for columns in ({"content"}, set[str](), {"instruction"}, {"prompt", "response"}):
        with pytest.raises(DataError, match=r"of no known row format\n  allowed: messages(?s:.*)\{messages: chat\}"):
            find_format(columns, "rows.jsonl:1")


def test_calls_and_tools():
    def said(*turns: Any) -> list[dict[str, Any]]:
        return to_conversation({"messages": list(turns)}, "messages", "x").messages

    wanted = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for arguments in ({"a": 1}, '{"a": 1}'):
        function = {"name": "f", "arguments": arguments}
        for call in ({**CALL, "function": function}, function):
            assert said(HI, {"role": "assistant", "content": None, "tool_calls": [call]})[1] == wanted
    flat = {"id": "c1", **CALL["function"]}
    assert said(HI, {**YO, "tool_calls": [flat]})[1]["tool_calls"] == [{**CALL, "id": "c1"}]
    answer = {"role": "tool", "content": "2", "name": "f"}
    assert said({**YO, "tool_calls": [], "train": None}, {**answer, "tool_call_id": None}) == [YO, answer]
    for name in ("reasoning_content", "thinking", "reasoning"):  # as transformers names them from 5.21 on
        thought = said({**YO, name: "why"})[0]
        assert thought.keys() == {*YO, "reasoning_content", "thinking", name}
        assert (thought["reasoning_content"], thought["thinking"]) == ("why", "why")
    assert said({**YO, "reasoning": "2", "thinking": "1", "reasoning_content": None})[0]["reasoning_content"] == "1"
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


def test_a_bad_row_is_named():
    known, calls = "of a message is not known here", "tool_calls are a list of calls with a function name"
    either, part = "a message has role and content, or from and value", "a part of a content has type: text and text"
    flags = ("training", "train_detail", "loss", "weight")
    turns: list[tuple[Any, str]] = [  # message 0 of a conversation
        ("Yo", f"{either}, not str 'Yo'"),
        ({"from": "human"}, either),
        ({"from": "alien", "value": "x"}, "role 'alien'\n  allowed: system"),
        ({"role": "user"}, "content: text expected, not NoneType"),
        ({"role": "user", "content": [{"type": "image_url"}]}, part),
        ({**YO, "train": "yes"}, "train str 'yes'\n  allowed: true or false"),
        *(({**YO, key: 0}, f"{key} {known}\n.*write train: ") for key in flags),
        ({**YO, "function_call": CALL}, f"function_call {known}\n.*write tool_calls"),
        ({**YO, "tool_responses": []}, f"tool_responses {known}\n.*a message of the role tool"),
        ({**YO, "content": [{**PART, "train": False}]}, part),
        ({**YO, "tool_calls": 3}, calls),
        ({**YO, "tool_calls": [{"name": "f", "arguments": "{"}]}, "arguments of 'f' are not JSON"),
        ({**YO, "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "arguments of 'f' are an object, not list"),
    ]
    table: list[tuple[Any, dict[str, Any], str]] = [
        ("messages", {"messages": [turn]}, f"message 0: {said}") for turn, said in turns
    ]
    conversation = "a conversation is a list of at least one message, not"
    table += [
        ("messages", {"text": "a"}, f"{conversation} NoneType"),
        ("messages", {"messages": []}, f"{conversation} list '"),
        ("messages", {"messages": [HI], "tools": "[" * 5000}, "tools are not JSON"),
        ("messages", {"messages": [HI], "tools": [1]}, "tools are a list of JSON schemas"),
        ("messages", {"messages": [HI], "chat_template_kwargs": "x"}, "chat_template_kwargs are names with values"),
        ("messages", {"messages": [SYSTEM, HI], "system": "S"}, "a system column and a system message"),
        ("instruction", {"instruction": "a", "input": 5, "output": "b"}, "input: text expected"),
        ("prompt_completion", {"prompt": [HI], "completion": "a"}, f"completion: {conversation} str"),
    ]
    for form, row, message in table:
        with pytest.raises(DataError, match=rf"^rows\.jsonl:3: {message}"):
            to_conversation(row, form, "rows.jsonl:3")


def test_token_ids_and_masks():
    for ids in ([5, 6, 7], (5, 6, 7), np.array([5, 6, 7], dtype=np.uint16)):
        for column, value in (
            ("attention_mask", [1, 1, 1]),
            ("completion_mask", [0, 1, 1]),
            ("completion_mask", np.array([False, True, True])),
            ("labels", [-100, 6, 7]),
        ):
            found, mask = read_tokens({"input_ids": ids, column: value}, 8, "x")
            assert (found.dtype, found.tolist()) == (np.int32, [5, 6, 7])
            assert (mask.dtype, mask.tolist()) == (bool, [column == "attention_mask", True, True])
    integers, both = "input_ids: a list of integers expected", {"completion_mask": [0, 1], "labels": [-100, 6]}
    for row, message in [
        ({}, f"{integers}, not NoneType"),
        *(({"input_ids": ids}, integers) for ids in ([10**30], [1.0], [float("nan")], [True], [[1], [2, 3]], [[1]])),
        *(({"input_ids": [0, bad]}, rf"token id {bad}\n  allowed: 0 to 7\n") for bad in (-1, 8, 2**31)),
        ({"input_ids": [5, 6], "labels": [5]}, "labels: a list of 2 integers expected"),
        ({"input_ids": [5, 6], "labels": [6, 7]}, "labels list .*not shifted"),
        ({"input_ids": [5, 6], "completion_mask": [0, 2]}, "completion_mask list .*0 or 1"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1]}, "masks loss_mask\n.*{completion_mask: NAME}"),
        ({"input_ids": [5, 6], **both}, "masks labels, completion_mask\n.*keep one"),
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "attention_mask has padding"),
    ]:
        with pytest.raises(DataError, match=rf"(?s)^rows\.parquet: row 3: {message}"):
            read_tokens(row, 8, "rows.parquet: row 3")
