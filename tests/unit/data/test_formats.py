"""Rows of each format as conversations."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lit_fsdp.data.formats import Conversation, find_format, read_text, read_tokens, to_conversation
from lit_fsdp.errors import DataError

HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
SYSTEM = {"role": "system", "content": "S"}
PART = {"type": "text", "text": "Yo"}
DEVELOPER = {"role": "developer", "content": "S"}


def _calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("form", "row", "wanted"),
    [
        ("messages", {"messages": [SYSTEM, HI, YO], "id": 3}, [SYSTEM, HI, YO]),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, [HI, YO]),
        ("messages", {"system": "S", "messages": [HI, YO]}, [SYSTEM, HI, YO]),
        ("messages", {"system": None, "messages": [HI, YO]}, [HI, YO]),
        ("messages", {"system": "S\n", "messages": [SYSTEM, HI, YO]}, [SYSTEM, HI, YO]),  # said twice alike
        ("messages", {"system": "S", "messages": [DEVELOPER, HI]}, [DEVELOPER, HI]),
        ("sharegpt", {"system": "S", "conversations": [{"from": "user", "value": "Hi"}]}, [SYSTEM, HI]),
        ("sharegpt", {"conversations": [{"from": "Human", "value": "Hi"}, {"from": "model", "value": "Yo"}]}, [HI, YO]),
        ("instruction", {"instruction": "Hi", "input": "", "output": "Yo"}, [HI, YO]),
        ("instruction", {"instruction": "Hi", "input": None, "output": "Yo", "system": "S"}, [SYSTEM, HI, YO]),
        ("prompt_completion", {"prompt": [SYSTEM, HI], "completion": [YO]}, [SYSTEM, HI, YO]),
        ("prompt_completion", {"prompt": [HI], "completion": [YO], "system": "S"}, [SYSTEM, HI, YO]),
    ],
)
def test_formats(form: Any, row: dict[str, Any], wanted: list[dict[str, str]]):
    assert find_format(set(row), "x") == form
    assert to_conversation(row, form, "x") == Conversation(wanted)


@pytest.mark.parametrize("form", ["messages", "conversations", "prompt"])
def test_two_system_prompts_are_refused(form: str):
    row: dict[str, Any] = {"system": "S", form: [{"role": "system", "content": "other"}, HI], "completion": [YO]}
    kind: Any = {"conversations": "sharegpt", "prompt": "prompt_completion"}.get(form, form)
    with pytest.raises(DataError, match=r"^x: a system column and a system message that differ\n  fix: "):
        to_conversation(row, kind, "x")


def test_turns_of_a_prompt_are_supervised_only_if_they_say_so():
    """What the assistant said before is given, as everything else in a prompt."""
    row = {"prompt": [HI, YO, HI, {**YO, "train": True}, HI], "completion": [YO]}
    flags = [turn.get("train") for turn in to_conversation(row, "prompt_completion", "x").messages]
    assert flags == [None, False, None, True, None, None]
    flags = [
        turn.get("train") for turn in to_conversation(row, "prompt_completion", "x", supervises_prompt=True).messages
    ]
    assert flags == [None, None, None, True, None, None]


@pytest.mark.parametrize("who", ["function-response", "Function", "TOOL", "observation"])
def test_results_of_tools_under_their_many_names(who: str):
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": who, "value": "3"}]}
    assert to_conversation(row, "sharegpt", "x").messages == [HI, {"role": "tool", "content": "3"}]


@pytest.mark.parametrize("arguments", [[("a", 1), ("b", "c")], {"a": 1, "b": "c"}, '{"a": 1, "b": "c"}'])
def test_arguments_of_a_call_may_be_a_map(arguments: Any):
    """Parquet and Arrow give a map as a list of pairs."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    made = to_conversation({"messages": [HI, call]}, "messages", "x").messages[1]
    assert made["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": "c"}


def test_instruction_with_input():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert to_conversation(row, "instruction", "x").messages[0]["content"] == "Add.\n\n1 2"


def test_empty_texts_are_texts():
    row = {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]}
    assert [m["content"] for m in to_conversation(row, "messages", "x").messages] == ["", ""]


def test_tool_calls_and_other_keys_reach_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    made = to_conversation({"messages": [HI, call]}, "messages", "x").messages[1]
    assert made == {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    "calls",
    [
        [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        '[{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]',
    ],
)
def test_arguments_of_a_call_as_object_or_text(calls: Any):
    answer = {"role": "tool", "content": "2", "name": "f"}
    made = to_conversation({"messages": [HI, {"role": "assistant", "tool_calls": calls}, answer]}, "messages", "x")
    wanted = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert made.messages[1:] == [{"role": "assistant", "content": "", "tool_calls": wanted}, answer]


def test_older_ways_of_calling():
    called = {"name": "f", "arguments": {"a": 1}}
    openai = [{"role": "assistant", "content": None, "function_call": called}, {"role": "function", "content": "2"}]
    made = to_conversation({"messages": openai}, "messages", "x").messages
    assert [(m["role"], m.get("tool_calls")) for m in made] == [("assistant", [called]), ("tool", None)]
    sharegpt = [{"from": "function_call", "value": json.dumps(called)}, {"from": "observation", "value": "2"}]
    assert to_conversation({"conversations": sharegpt}, "sharegpt", "x").messages == made


def test_turns_may_be_written_in_either_way():
    mixed = [SYSTEM, {"from": "human", "value": "Hi"}, YO]
    for form, column in (("messages", "messages"), ("sharegpt", "conversations")):
        assert to_conversation({column: mixed}, form, "x").messages == [SYSTEM, HI, YO]  # type: ignore[arg-type]


def test_a_content_in_text_parts():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert to_conversation({"messages": [{"role": "user", "content": parts}]}, "messages", "x").messages == [HI]
    image = [{"type": "image_url", "image_url": {}}]
    with pytest.raises(DataError, match="user: text expected, not list"):
        to_conversation({"messages": [{"role": "user", "content": image}]}, "messages", "x")


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        ({"train": True}, True),
        ({"train": 0}, False),
        ({"weight": 0}, False),
        ({"weight": 1.0}, True),
        ({"train": False, "weight": 0}, False),
        ({"train": None, "weight": None}, None),
    ],
)
def test_flags_of_a_turn(flag: dict[str, Any], wanted: bool | None):
    turns: dict[str, Any] = {
        "messages": [HI, {**YO, **flag}],
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo", **flag}],
    }
    for form, column in (("messages", "messages"), ("sharegpt", "conversations")):
        last = to_conversation(turns, form, "x").messages[1]  # type: ignore[arg-type]
        assert column in turns
        assert last.get("train") is wanted
        assert "weight" not in last


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_as_list_or_text(tools: Any):
    assert to_conversation({"messages": [HI], "tools": tools}, "messages", "x").tools == [{"name": "f"}]


def test_no_tools():
    for tools in (None, [], "", " "):
        assert to_conversation({"messages": [HI], "tools": tools}, "messages", "x").tools is None


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("messages", {"text": "a"}, "no 'messages'; a row of format messages has messages"),
        ("messages", {"messages": []}, "a list of at least one message, not list '"),
        ("messages", {"messages": "Hi"}, "a list of at least one message, not str 'Hi'"),
        (
            "messages",
            {"messages": [HI, "Yo"]},
            "message 1: a message has role and content, or from and value, not str 'Yo'",
        ),
        (
            "messages",
            {"messages": [{"role": "bot", "content": "x"}]},
            "message 0: role 'bot'\n  allowed: system, developer, user",
        ),
        ("messages", {"messages": [{"role": "user"}]}, "message 0: user: text expected, not NoneType"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "message 0: user: text expected, not int '3'"),
        ("messages", {"messages": [{"role": "user", "content": "a\ud83d"}]}, r"half a character at 1 .\\ud83d"),
        ("messages", {"messages": [HI], "tools": "[{"}, "tools are not JSON"),
        ("messages", {"messages": [{**YO, "train": "yes"}]}, "message 0: train str 'yes'\n  allowed: true or false"),
        (
            "messages",
            {"messages": [{**YO, "weight": 0.5}]},
            "message 0: weight float '0.5'\n  allowed: 0 .not supervised",
        ),
        (
            "messages",
            {"messages": [{**YO, "train": True, "weight": 0}]},
            "train True and weight 0\n  fix: .*keep one",
        ),
        ("messages", {"messages": [{**YO, "tool_calls": 3}]}, "tool_calls are a list of calls with a function name"),
        ("messages", {"messages": [{**YO, "tool_calls": [{"id": 1}]}]}, "tool_calls are a list of calls"),
        ("messages", {"messages": [_calling("{")]}, "message 0: arguments of 'f' are not JSON"),
        ("messages", {"messages": [_calling("[1]")]}, "message 0: arguments of 'f' are an object, not list"),
        ("messages", {"messages": [HI], "tools": [1]}, "tools are a list of JSON schemas"),
        (
            "sharegpt",
            {"conversations": [{"from": "human"}]},
            "message 0: a message has role and content, or from and value",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "alien", "value": "x"}]},
            "message 0: from 'alien'\n  allowed: system",
        ),
        ("instruction", {"instruction": "a"}, "no 'output'; a row of format instruction has instruction, output"),
        ("instruction", {"instruction": "a", "output": None}, "assistant: text expected"),
        ("instruction", {"instruction": "a", "input": 5, "output": "b"}, "input: text expected"),
        ("prompt_completion", {"prompt": [HI], "completion": "a"}, "completion: a conversation is a list of .*not str"),
        ("messages", {"messages": [{**YO, "training": False}]}, "message 0: training of a message .*\n.*write train: "),
        ("messages", {"messages": [{**YO, "train_detail": []}]}, "message 0: train_detail of a message is not known"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "a", "loss": True}]}, "message 0: loss of a message"),
        ("messages", {"messages": [{**YO, "tool_responses": []}]}, "tool_responses .*\n.*a message of the role tool"),
        ("messages", {"messages": [{**YO, "content": [{**PART, "train": False}]}]}, "a part of a content that says"),
        ("messages", {"messages": [{**YO, "content": [PART, {**PART, "weight": 0}]}]}, "a part of a content that says"),
        (
            "messages",
            {"messages": [HI], "chat_template_kwargs": "x"},
            "chat_template_kwargs are names with values, not",
        ),
        ("sharegpt", {"conversations": [{"from": ["gpt"], "value": "x"}]}, r"message 0: from \['gpt'\]"),
        ("messages", {"messages": [HI], "tools": "[" * 5000}, "tools are not JSON"),
        ("messages", {"messages": [{**YO, "tool_calls": ["f"]}]}, "tool_calls are a list of calls with a function"),
    ],
)
def test_a_bad_row_is_named(form: Any, row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=rf"^rows\.jsonl:3: .*{message}"):
        to_conversation(row, form, "rows.jsonl:3")


@pytest.mark.parametrize("columns", [{"content"}, set(), {"instruction"}, {"prompt", "response"}])
def test_unknown_columns(columns: set[str]):
    with pytest.raises(DataError, match="are of no known row format") as refused:
        find_format(columns, "rows.jsonl:1")
    assert "allowed: messages: messages; sharegpt: conversations; " in str(refused.value)
    assert "data.columns: {messages: chat}" in str(refused.value)


def test_formats_by_their_columns():
    assert find_format({"text", "id"}, "x") == "text"
    assert find_format({"text", "input_ids"}, "x") == "tokens"
    assert find_format({"text", "prompt", "completion"}, "x") == "prompt_completion"


def test_text():
    assert read_text({"text": "a\nb"}, "x") == "a\nb"
    for row, message in [
        ({}, "no 'text'"),
        ({"text": None}, "text expected, not NoneType"),
        ({"text": "\ud83d"}, "half"),
    ]:
        with pytest.raises(DataError, match=f"^rows:1: .*{message}"):
            read_text(row, "rows:1")


@pytest.mark.parametrize("ids", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7], dtype=np.uint16)])
def test_ids_alone(ids: Any):
    found, mask = read_tokens({"input_ids": ids}, "x")
    assert found.tolist() == [5, 6, 7]
    assert found.dtype == np.int32
    assert mask is None


@pytest.mark.parametrize("column", ["completion_mask", "labels"])
def test_masks(column: str):
    value: Any = [-100, 6, 7] if column == "labels" else [0, 1, 1]
    for form in (value, np.array(value)):
        mask = read_tokens({"input_ids": [5, 6, 7], column: form}, "x")[1]
        assert mask is not None
        assert mask.dtype == bool
        assert mask.tolist() == [False, True, True]


def test_padding_is_left_out():
    row = {"input_ids": [0, 5, 6, 0, 0], "attention_mask": [0, 1, 1, 0, 0], "labels": [-100, -100, 6, -100, -100]}
    ids, mask = read_tokens(row, "x")
    assert mask is not None
    assert (ids.tolist(), mask.tolist()) == ([5, 6], [False, True])
    assert read_tokens({"input_ids": [0], "attention_mask": [0]}, "x")[0].tolist() == []


def test_no_ids():
    assert read_tokens({"input_ids": []}, "x")[0].tolist() == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no 'input_ids'"),
        ({"input_ids": [5, -1]}, r"input_ids\[1\] is -1, which is no token id"),
        ({"input_ids": [2**31]}, r"input_ids\[0\] is 2147483648"),
        ({"input_ids": [2**63]}, r"input_ids\[0\] is 9223372036854775808"),
        ({"input_ids": [10**30]}, "a list of integers expected, not list"),
        ({"input_ids": [1.0]}, "a list of integers expected"),
        ({"input_ids": [float("nan")]}, "a list of integers expected"),
        ({"input_ids": [True]}, "a list of integers expected"),
        ({"input_ids": [[1], [2, 3]]}, "a list of integers expected"),
        ({"input_ids": [[1]]}, "a list of integers expected"),
        ({"input_ids": "[1, 2]"}, "a list of integers expected, not str"),
        ({"input_ids": None}, "a list of integers expected, not NoneType"),
        ({"input_ids": [5, 6], "labels": [5]}, "labels: 1 values for 2 input_ids"),
        ({"input_ids": [5, 6], "labels": [6, 7]}, r"labels\[0\] is 6, but input_ids\[0\] is 5\n.*not shifted"),
        ({"input_ids": [5, 6], "completion_mask": [0, 2]}, "a list of 0 and 1 expected"),
        ({"input_ids": [5, 6], "completion_mask": [0]}, "completion_mask: 1 values for 2 input_ids"),
        ({"input_ids": [5, 6], "completion_mask": [0.5, 1]}, "a list of integers expected"),
        (
            {"input_ids": [5, 6], "loss_mask": [0, 1]},
            "the mask loss_mask is not known here\n.*{completion_mask: loss_mask}",
        ),
        ({"input_ids": [5, 6], "completion_mask": [0, 1], "labels": [5, 6]}, "completion_mask and labels differ"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "attention_mask leaves out tokens in the middle"),
    ],
)
def test_a_bad_row_of_tokens_is_named(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=rf"^rows\.parquet: row 3: .*{message}"):
        read_tokens(row, "rows.parquet: row 3")
