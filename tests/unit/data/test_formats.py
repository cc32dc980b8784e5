"""Rows of each format as conversations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lit_fsdp.data.formats import Conversation, find_format, to_conversation
from lit_fsdp.errors import DataError

HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
SYSTEM = {"role": "system", "content": "S"}
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
        ("prompt_completion", {"prompt": "Hi", "completion": "Yo"}, [HI, YO]),
        ("prompt_completion", {"prompt": [SYSTEM, HI], "completion": [YO]}, [SYSTEM, HI, YO]),
        ("prompt_completion", {"prompt": "Hi", "completion": "Yo", "system": "S"}, [SYSTEM, HI, YO]),
        ("prompt_completion", {"prompt": json.dumps([SYSTEM, HI]), "completion": json.dumps([YO])}, [SYSTEM, HI, YO]),
        (  # a text to learn, which happens to be JSON
            "prompt_completion",
            {"prompt": "Hi", "completion": json.dumps([YO])},
            [HI, {"role": "assistant", "content": json.dumps([YO])}],
        ),
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


def test_turns_of_a_prompt_are_learnt_only_if_they_say_so():
    """What the assistant said before is given, as everything else in a prompt."""
    row = {"prompt": [HI, YO, HI, {**YO, "train": True}, HI], "completion": [YO]}
    flags = [turn.get("train") for turn in to_conversation(row, "prompt_completion", "x").messages]
    assert flags == [None, False, None, True, None, None]
    flags = [turn.get("train") for turn in to_conversation(row, "prompt_completion", "x", learns_prompt=True).messages]
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
        ("messages", {"messages": [{**YO, "weight": 0.5}]}, "message 0: weight float '0.5'\n  allowed: 0 .not learnt"),
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
        ("sharegpt", {"conversations": [{"from": "human"}]}, "turn 0: a turn has from and value"),
        ("sharegpt", {"conversations": [{"from": "alien", "value": "x"}]}, "turn 0: from 'alien'\n  allowed: system"),
        ("instruction", {"instruction": "a"}, "no 'output'; a row of format instruction has instruction, output"),
        ("instruction", {"instruction": "a", "output": None}, "assistant: text expected"),
        ("instruction", {"instruction": "a", "input": 5, "output": "b"}, "input: text expected"),
        ("prompt_completion", {"prompt": "a", "completion": 1}, "a list of at least one message, not int"),
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
