"""Rows of each format as conversations and token ids, and what is said of a bad one."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig, SourceConfig, TurnsConfig
from lit_fsdp.config.sections import build
from lit_fsdp.data.formats import Conversation, find_format, read_tokens, to_conversation, unread_columns
from lit_fsdp.data.readers import read_file
from lit_fsdp.data.sources import find_sources
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import encoder_of, write_rows

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
    for beside in ("messages", "conversations", "prompt"):  # what was said before, or the chosen side again
        assert find_format({beside, "chosen", "rejected"}, "x") == "preference"
    assert unread_columns({"instruction", "output", "context", "input", "id"}, "instruction") == ["context", "id"]
    assert find_format({"text", "input_ids"}, "x") == "tokens"
    assert find_format({"text", "prompt", "completion"}, "x") == "prompt_completion"
    for columns in ({"content"}, set[str](), {"instruction"}, {"prompt", "id"}):
        with pytest.raises(
            DataError,
            match=r"cannot detect the row format from columns .*\n  allowed: pref(?s:.*)data.columns: {OURS: YOURS}",
        ):
            find_format(columns, "rows.jsonl:1")
    for columns, shown in (
        ({"id", "question", "answer"}, "{instruction: question, output: answer}"),
        ({"prompt", "response"}, "{completion: response}"),
        ({"dialog", "id"}, "{messages: dialog}"),
        ({"instruction", "context", "response", "category"}, "{output: response, input: context}"),
        ({"system_prompt", "question", "response"}, "{instruction: question, output: response, system: system_prompt}"),
        ({"input", "output"}, "{instruction: input}"),
    ):
        with pytest.raises(DataError, match=re.escape(f"data.columns: {shown}")):
            find_format(columns, "rows.jsonl:1")


def test_calls_and_tools():
    def said(*turns: Any) -> list[dict[str, Any]]:
        return to_conversation({"messages": list(turns)}, "messages", "x").messages

    wanted = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    for arguments in ({"a": 1}, '{"a": 1}', json.dumps('{"a": 1}')):
        function = {"name": "f", "arguments": arguments}
        for call in ({**CALL, "function": function}, function):
            assert said(HI, {"role": "assistant", "content": None, "tool_calls": [call]})[1] == wanted
    flat = {"id": "c1", **CALL["function"]}
    assert said(HI, {**YO, "tool_calls": [flat]})[1]["tool_calls"] == [{**CALL, "id": "c1"}]
    answer = {"role": "tool", "content": "2", "name": "f"}
    for none in ([], "[]", ""):
        assert said({**YO, "tool_calls": none, "train": None}, {**answer, "tool_call_id": None}) == [YO, answer]
    for name in ("reasoning_content", "thinking", "reasoning"):  # as transformers names them from 5.21 on
        thought = said({**YO, name: "why"})[0]
        assert thought.keys() == {*YO, "reasoning_content", "thinking", name}
        assert (thought["reasoning_content"], thought["thinking"]) == ("why", "why")
    assert said({**YO, "reasoning": "2", "thinking": "1", "reasoning_content": None})[0]["reasoning_content"] == "1"
    schema = [{"type": "function", "function": {"name": "f"}}]
    for tools, schemas in (([{"name": "f"}], schema), ('[{"name": "f"}]', schema), (schema, schema), ("", None)):
        assert to_conversation({"messages": [HI], "tools": tools}, "messages", "x").tools == schemas


def _talk(*turns: str, keys: str = "from value") -> list[dict[str, str]]:
    """``human:Hi`` → a turn with these keys."""
    return [dict(zip(keys.split(), turn.split(":", 1), strict=True)) for turn in turns]


def test_every_dialect_is_its_plain_twin(small: Any, tmp_path: Path):
    """In tokens and mask, as published: OpenAI, SlimOrca, ShareGPT, LLaMA-Factory, ms-swift, axolotl, and as mapped."""
    text, told, no = json.dumps(CALL["function"]), {"role": "tool", "content": "2"}, {**YO, "content": "No"}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    never, always, thoughts = {**YO, "train": False}, {**YO, "train": True}, "<think>\n[why]\n</think>"
    flat: list[Any] = [{"name": "f", "parameters": {"a": {}}}]
    tools = {"tools": [{"type": "function", "function": flat[0]}]}
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    bot: list[dict[str, Any]] = [*_talk("2:Hi", "bot:Yo", "bot:Yo", keys="speaker utterance")]
    bot[1]["ok"] = 0
    maps = {"role": "speaker", "content": "utterance", "train": "ok", "roles": {"bot": "assistant", "2": "user"}}
    mapped, call = {"turns": maps}, f"function_call:{text}"
    names = ("human chatgpt", "user bard", "User Assistant", "prompter model")
    keys = ("from value", "speaker text", "role text", "role value", "author content")
    table: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [  # a row, its twin or the messages of that, and options
        *(({"messages": [HI, {**YO, key: 0}, HI, {**YO, key: one}]}, [HI, never, HI, always], {})
          for key in ("weight", "loss", "training", "train") for one in (1, 1.0, True)),
        ({"messages": [HI, legacy, {**told, "role": "function", "name": "f"}, {**YO, "function_call": None}],
          "functions": flat, "parallel_tool_calls": False},
         {"messages": [HI, called, {**told, "name": "f"}, YO], **tools}, {}),
        ({"messages": [HI, {**called, "content": "So.", "weight": 0}, told, YO], "tools": flat},
         {"messages": [HI, {**called, "content": "So.", "train": False}, told, YO], **tools}, {}),
        ({"conversations": [{"from": "system", "value": "S", "weight": None}, {**HUMAN, "weight": 0.0},
                            {**GPT, "weight": 1.0}]}, [SYSTEM, HI, YO], {}),
        ({"conversations": _talk("human:Hi", call, "observation:2", "gpt:Yo"), "tools": json.dumps(flat),
          "system": "S"}, {"messages": [SYSTEM, HI, called, told, YO], **tools}, {}),
        ({"conversations": _talk("human:Hi", f"function_call:{thoughts}\n[{text}, {text}]", "function_response:2")},
         [HI, {**called, "content": thoughts, "tool_calls": [CALL, CALL]}, told], {}),
        ({"messages": [HI, YO, *_talk(*[f"tool_call:{text}"] * 2, "tool_response:2"), {**YO, "loss": False}]},
         [HI, {**YO, "tool_calls": [CALL, CALL]}, told, never], {}),
        *(({"conversations": _talk(f"{name.split()[0]}:Hi", f"{name.split()[1]}:Yo", keys=key)}, [HI, YO], {})
          for name in names for key in keys),
        ({"instruction": "Hi", "output": "Yo", "history": [["Hi", "Yo"]]}, [HI, YO, HI, YO], {}),
        ({"instruction": "", "input": "Hi", "output": "Yo"}, [HI, YO], {}),
        ({"messages": [HI, YO], "label": True}, [HI, YO], {}),  # of KTO
        ({"prompt": [HUMAN, GPT, HUMAN], "completion": [GPT]}, [HI, never, HI, YO], {}),
        ({"prompt": [HUMAN], "chosen": GPT, "rejected": {**GPT, "value": "No"}, "functions": flat},
         {"prompt": [HI], "chosen": [YO], "rejected": [no], **tools}, {}),
        ({"prompt": "Hi", "chosen": [HUMAN, GPT], "rejected": [HUMAN, {**GPT, "value": "No"}]},
         {"prompt": [HI], "chosen": [YO], "rejected": [no]}, {}),
        ({"messages": bot}, [HI, never, YO], mapped),
        ({"chat": json.dumps(bot)}, [HI, never, YO], {**mapped, "columns": {"messages": "chat"}}),
        ({"prompt": bot[:1], "chosen": bot[1:], "rejected": bot[2:]},
         {"prompt": [HI], "chosen": [never, YO], "rejected": [YO]}, mapped),
        ({"messages": _talk("SYSTEM:Yo")}, [YO], {"turns": {"roles": {"SYSTEM": "assistant"}}}),
        ({"messages": _talk(f"api:{text}")}, [called], {"turns": {"roles": {"api": "function_call"}}}),
    ]  # fmt: skip
    encoder = encoder_of(small, DataConfig(chat_template="chatml"))
    for number, (row, twin, options) in enumerate(table):
        found = []
        for name, written, more in (
            ("a", row, options),
            ("b", {"messages": twin} if isinstance(twin, list) else twin, {}),
        ):
            path = write_rows(tmp_path / f"{number}{name}.jsonl", [written])
            (source,) = find_sources(path, build(DataConfig, more, "data") if more else None)
            (encoded,) = encoder.encode([*dict(source.rows()).values()], source.row_format, [path])
            found.append([(one.input_ids.tolist(), one.supervised.tolist()) for one in encoded.samples])
        assert found[0]
        assert found[0] == found[1], row


def test_a_wrong_map_of_turns_is_refused(tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [{"speaker": "bot", "text": "Hi"}, YO]}])
    for key in ("role", "content", "train", "tool_calls"):
        config = DataConfig(turns=TurnsConfig(**{key: "spaeker"}))
        with pytest.raises(
            DataError, match=rf"a\.jsonl: no message has the key 'spaeker'.*{key!r}\n  allowed: .*'speaker'"
        ):
            _ = find_sources(path, config)[0].row_format
    entry = SourceConfig(source=path, turns=TurnsConfig(roles={"bot": "user"}))
    ((_, row),) = find_sources([entry], DataConfig(turns=TurnsConfig(role="x")))[0].rows()
    assert row == {"messages": [{"speaker": "user", "text": "Hi"}, YO]}
    sets = build(DataConfig, {"val": {"easy": {"source": path, "turns": {"roles": {"bot": "user"}}}}}, "data").val
    assert sets is not None
    assert [source.turns for source in find_sources(sets)] == [entry.turns]
    for bad, said in [
        ({"roles": {"bot": "asistant"}}, r"roles\.bot: .*asistant.*\n  allowed: one of system"),
        ({"roles": {"assistant": "bot"}}, r"roles\.assistant: (?s:.*)write {bot: assistant}"),
    ]:
        with pytest.raises(ConfigError, match=said):
            TurnsConfig(**bad)


def test_messages_are_json_text_in_a_csv_file(tmp_path: Path):
    turns = [HI, {**YO, "train": False}]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages", "id"], [json.dumps(turns), "1"], ["[{", "2"]])
    (where, row), (other, broken) = read_file(str(tmp_path / "rows.csv"))
    assert to_conversation(row, "messages", where).messages == turns
    with pytest.raises(DataError, match=r"rows\.csv:3: messages: invalid JSON"):
        to_conversation(broken, "messages", other)


def test_a_bad_row_is_named():
    known, calls = "is not supported", "tool_calls must be a list of calls with function names"
    either, part = "a message must have role and content, or from and value", "a content part must have only type: text"
    flags = ("training", "loss", "weight")
    turns: list[tuple[Any, str]] = [  # message 1 of a conversation
        ("Yo", f"{either}, not str 'Yo'"),
        ({"from": "human"}, either),
        ({"from": "alien", "value": "x"}, r"role 'alien'\n  allowed: system.*\n.*data\.turns: {roles: {alien: ass"),
        ({"role": "user"}, either),
        ({"role": "user", "content": 5}, "content: text expected, not int"),
        ({"role": "user", "utterance": "x"}, rf"{either}.*\n.*data\.turns: {{role: speaker"),
        ({"role": "user", "content": [{"type": "image_url"}]}, part),
        ({**YO, "train": "yes"}, "train str 'yes'\n  allowed: true or false"),
        *(({**YO, key: 0.5}, f"{key} float '0.5'\n  allowed: true or false, or 1 or 0; ") for key in flags),
        ({**YO, "train": True, "weight": 0}, "train bool 'True', weight int '0'\n"),
        ({**YO, "train_detail": []}, f"message key train_detail {known}\n.*write train: "),
        ({**YO, "function_call": 3}, calls),
        ({**YO, "function_call": CALL, "tool_calls": [CALL]}, "both tool_calls and function_call\n.*keep one"),
        ({"from": "function_call", "value": "f(1)"}, "function_call: invalid JSON"),
        *(({"from": "function_call", "value": value}, calls) for value in ("", "[]", "3")),
        ({**YO, "tool_responses": []}, f"message key tool_responses {known}\n.*a message of the role tool"),
        ({**YO, "content": [{**PART, "train": False}]}, part),
        ({**YO, "tool_calls": 3}, calls),
        ({**YO, "tool_calls": [{"name": "f", "arguments": "{"}]}, "arguments of 'f': invalid JSON"),
        ({**YO, "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "arguments of 'f' must be an object, not list"),
    ]
    table: list[tuple[Any, dict[str, Any], str]] = [
        ("messages", {"messages": [turn]}, f"message 1: {said}") for turn, said in turns
    ]
    conversation = "a conversation must be a non-empty list of messages, not"
    table += [
        ("messages", {"text": "a"}, f"{conversation} NoneType"),
        ("messages", {"messages": []}, f"{conversation} list '"),
        ("messages", {"messages": [HI], "tools": "[" * 5000}, "tools: invalid JSON"),
        ("messages", {"messages": [HI], "tools": [1]}, "tools must be a list of JSON schemas"),
        ("messages", {"messages": [HI], "chat_template_kwargs": "x"}, "chat_template_kwargs must be a mapping"),
        ("messages", {"messages": [SYSTEM, HI], "system": "S"}, "both a system column and a system message"),
        ("messages", {"messages": [HI], "tools": [{}], "functions": [{}]}, "both tools and functions\n.*keep one"),
        ("instruction", {"instruction": "a", "output": "b", "history": ["c"]}, "history must be a list of"),
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
