"""Rows of each format as conversations."""

from __future__ import annotations

from typing import Any

import pytest

from lit_fsdp.data.formats import Conversation, find_format, to_conversation
from lit_fsdp.errors import DataError

HI, YO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
SYSTEM = {"role": "system", "content": "S"}


@pytest.mark.parametrize(
    ("form", "row", "wanted"),
    [
        ("messages", {"messages": [SYSTEM, HI, YO], "id": 3}, [SYSTEM, HI, YO]),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, [HI, YO]),
        ("sharegpt", {"system": "S", "conversations": [{"from": "user", "value": "Hi"}]}, [SYSTEM, HI]),
        ("instruction", {"instruction": "Hi", "input": "", "output": "Yo"}, [HI, YO]),
        ("instruction", {"instruction": "Hi", "input": None, "output": "Yo", "system": "S"}, [SYSTEM, HI, YO]),
        ("prompt_completion", {"prompt": "Hi", "completion": "Yo"}, [HI, YO]),
        ("prompt_completion", {"prompt": [SYSTEM, HI], "completion": [YO]}, [SYSTEM, HI, YO]),
        ("prompt_completion", {"prompt": "Hi", "completion": "Yo", "system": "S"}, [SYSTEM, HI, YO]),
    ],
)
def test_formats(form: Any, row: dict[str, Any], wanted: list[dict[str, str]]):
    assert find_format(set(row), "x") == form
    assert to_conversation(row, form, "x") == Conversation(wanted)


def test_instruction_with_input():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert to_conversation(row, "instruction", "x").messages[0]["content"] == "Add.\n\n1 2"


def test_empty_texts_are_texts():
    row = {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]}
    assert [m["content"] for m in to_conversation(row, "messages", "x").messages] == ["", ""]


def test_tool_calls_and_other_keys_reach_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    made = to_conversation({"messages": [HI, call]}, "messages", "x").messages[1]
    assert made == {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_as_list_or_text(tools: Any):
    assert to_conversation({"messages": [HI], "tools": tools}, "messages", "x").tools == [{"name": "f"}]


def test_no_tools():
    for tools in (None, [], "", " "):
        assert to_conversation({"messages": [HI], "tools": tools}, "messages", "x").tools is None


@pytest.mark.parametrize(
    ("form", "row", "message"),
    [
        ("messages", {"text": "a"}, "no 'messages'; a messages row has messages"),
        ("messages", {"messages": []}, "a list of at least one message, not list '"),
        ("messages", {"messages": "Hi"}, "a list of at least one message, not str 'Hi'"),
        ("messages", {"messages": [HI, "Yo"]}, "message 1: a message has role and content, not str 'Yo'"),
        ("messages", {"messages": [{"role": "bot", "content": "x"}]}, "message 0: role 'bot'\n  allowed: system, user"),
        ("messages", {"messages": [{"role": "user"}]}, "message 0: user: text expected, not NoneType"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "message 0: user: text expected, not int '3'"),
        ("messages", {"messages": [{"role": "user", "content": "a\ud83d"}]}, r"half a character at 1 .\\ud83d"),
        ("messages", {"messages": [HI], "tools": "[{"}, "tools are not JSON"),
        ("messages", {"messages": [HI], "tools": [1]}, "tools are a list of JSON schemas"),
        ("sharegpt", {"conversations": [{"from": "human"}]}, "turn 0: a turn has from and value"),
        ("sharegpt", {"conversations": [{"from": "alien", "value": "x"}]}, "turn 0: from 'alien'\n  allowed: system"),
        ("instruction", {"instruction": "a"}, "no 'output'; a instruction row has instruction, output"),
        ("instruction", {"instruction": "a", "output": None}, "assistant: text expected"),
        ("instruction", {"instruction": "a", "input": 5, "output": "b"}, "input: text expected"),
        ("prompt_completion", {"prompt": "a", "completion": 1}, "a list of at least one message, not int"),
    ],
)
def test_a_bad_row_is_named(form: Any, row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=rf"^rows\.jsonl:3: .*{message}"):
        to_conversation(row, form, "rows.jsonl:3")


@pytest.mark.parametrize("columns", [{"text"}, set(), {"instruction"}, {"prompt", "response"}])
def test_unknown_columns(columns: set[str]):
    with pytest.raises(DataError, match=r"are of no known row format\n  allowed: messages: messages; sharegpt: conv"):
        find_format(columns, "rows.jsonl:1")
