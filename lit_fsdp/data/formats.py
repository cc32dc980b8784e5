"""Rows of the usual shapes: which one they are of, and rows of turns as conversations."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_fsdp.config.data import RowFormat
from lit_fsdp.data.calls import read_calls, read_tools
from lit_fsdp.data.cells import from_json, shown, text_of
from lit_fsdp.errors import DataError

Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
"""In whatever case, with ``-`` for ``_``."""
_SIGNS: dict[RowFormat, tuple[str, ...]] = {  # in this order: the first format whose columns are all there
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "text": ("text",),
}


@dataclass(frozen=True)
class Conversation:
    """What a chat template renders."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call."""


def find_format(columns: set[str], name: str) -> RowFormat:
    """The row format that these columns are the sign of.

    Raises:
        DataError: No format has these columns.
    """
    for form, needed in _SIGNS.items():
        if columns.issuperset(needed):
            return form
    shapes = "; ".join(f"{form}: {', '.join(needed)}" for form, needed in _SIGNS.items())
    raise DataError(
        f"{name}: columns {', '.join(sorted(map(str, columns))) or '(none)'} are of no known row format\n"
        f"  allowed: {shapes}\n  fix:     say which column is which, such as data.columns: {{messages: chat}}"
    )


def to_conversation(
    row: Mapping[str, Any], form: RowFormat, place: str, *, learns_prompt: bool = False
) -> Conversation:
    """The conversation of one row, with its ``system`` and ``tools`` columns where there are such.

    Args:
        row: Column values.
        form: Not ``auto``, ``text`` or ``tokens``, which are no conversations.
        place: Where the row stands, for errors.
        learns_prompt: Otherwise assistant's turns of a ``prompt`` are not learnt, unless they say so themselves.

    Raises:
        DataError: A column is missing, a role is unknown, a content is no text, two system prompts differ, or
            ``tools`` are no schemas.
    """
    assert form not in ("auto", "text", "tokens")
    check_columns(row, form, place)
    messages = _messages(row, form, place, learns_prompt)
    if row.get("system"):
        messages = _with_system(messages, _message("system", row["system"], place), place)
    return Conversation(messages, read_tools(row.get("tools"), place))


def check_columns(row: Mapping[str, Any], form: RowFormat, place: str) -> None:
    """Whether a row has every column of its format.

    Raises:
        DataError: One is missing.
    """
    for column in _SIGNS[form]:
        if column not in row:
            raise DataError(f"{place}: no {column!r}; a row of format {form} has {', '.join(_SIGNS[form])}")


def _with_system(messages: list[Message], system: Message, place: str) -> list[Message]:
    if messages[0]["role"] not in ("system", "developer"):
        return [system, *messages]
    if messages[0]["content"].strip() != system["content"].strip():
        raise DataError(
            f"{place}: a system column and a system message that differ\n"
            "  fix:     keep one of them; data.columns: {system: NAME} reads the system prompt from another column"
        )
    return messages


def _messages(row: Mapping[str, Any], form: RowFormat, place: str, learns_prompt: bool) -> list[Message]:
    if form == "messages":
        return [_turn(turn, f"{place}: message {i}") for i, turn in _turns(row["messages"], place)]
    if form == "instruction":
        asked = text_of(row["instruction"], f"{place}: instruction")
        more = row.get("input")
        prompt = f"{asked}\n\n{text_of(more, f'{place}: input')}" if more else asked
        return [_message("user", prompt, place), _message("assistant", row["output"], place)]
    if form == "prompt_completion":
        prompt, completion = sides_of(row)
        given = _side(prompt, "user", place)
        if not learns_prompt:
            given = [{"train": False, **turn} if turn["role"] == "assistant" else turn for turn in given]
        return [*given, *_side(completion, "assistant", place)]
    return [_turn(turn, f"{place}: turn {i}") for i, turn in _turns(row["conversations"], place)]


def sides_of(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Prompt and completion as they are meant: lists of messages that a CSV file can hold only as JSON text.

    Both have to be such lists; a text to learn may well be JSON.
    """
    given = row.get("prompt"), row.get("completion")
    read = [_listed(side) for side in given]
    return (read[0], read[1]) if all(read) else given


def _listed(value: Any) -> list[Any]:
    """The messages of JSON text; none if it is another text, or none."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return []
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(_is_turn(turn) for turn in found) else []


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and (turn.keys() >= {"role", "content"} or turn.keys() >= {"from", "value"})


def _side(value: Any, role: str, place: str) -> list[Message]:
    if isinstance(value, str):
        return [_message(role, value, place)]
    return [_turn(turn, f"{place}: message {i}") for i, turn in _turns(value, place)]


def _turns(value: Any, place: str) -> list[tuple[int, Any]]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # a cell of a CSV file
        value = from_json(value, f"{place}: messages")
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{place}: a conversation is a list of at least one message, not {shown(value)}")
    return list(enumerate(value))


def _turn(turn: Any, place: str) -> Message:
    """A message, in either way of writing one."""
    if isinstance(turn, Mapping) and "from" in turn and "role" not in turn:
        return _sharegpt_turn(turn, place)
    if not isinstance(turn, Mapping) or "role" not in turn:
        raise DataError(f"{place}: a message has role and content, or from and value, not {shown(turn)}")
    role = "tool" if turn["role"] == "function" else turn["role"]
    if role not in _ROLES:
        raise DataError(f"{place}: role {reprlib.repr(role)}\n  allowed: {', '.join(_ROLES)}")
    own = ("role", "content", "tool_calls", "function_call", "train", "weight")
    more = {key: value for key, value in turn.items() if key not in own and value is not None}
    calls = read_calls(turn.get("tool_calls") or turn.get("function_call"), place)
    more |= {"tool_calls": calls} if calls else {}
    content = turn.get("content")
    message = _message(role, "" if content is None and calls else _joined(content), place)
    return {**message, **more, **_flag(turn, place)}


def _sharegpt_turn(turn: Mapping[str, Any], place: str) -> Message:
    if "value" not in turn:
        raise DataError(f"{place}: a turn has from and value, not {shown(turn)}")
    who = turn["from"].lower().replace("-", "_") if isinstance(turn["from"], str) else ""
    if who not in _SHAREGPT_ROLES:
        raise DataError(f"{place}: from {reprlib.repr(turn['from'])}\n  allowed: {', '.join(_SHAREGPT_ROLES)}")
    if who == "function_call":
        calls = read_calls(text_of(turn["value"], place), place)
        return {"role": "assistant", "content": "", "tool_calls": calls, **_flag(turn, place)}
    return {**_message(_SHAREGPT_ROLES[who], turn["value"], place), **_flag(turn, place)}


def _flag(turn: Mapping[str, Any], place: str) -> dict[str, bool]:
    """``train`` of a message, which ``weight`` 0 or 1 says too; nothing if neither is there."""
    given = {name: turn[name] for name in ("train", "weight") if turn.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            allowed = "true or false" if name == "train" else "0 (not learnt) or 1"
            raise DataError(f"{place}: {name} {shown(value)}\n  allowed: {allowed}")
    found = {bool(value) for value in given.values()}
    if len(found) > 1:
        raise DataError(f"{place}: train {given['train']} and weight {given['weight']}\n  fix:     keep one of them")
    return {"train": found.pop()} if found else {}


def _joined(content: Any) -> Any:
    """The text of a content in parts ``[{type: text, text: …}]``; anything else as it is."""
    if isinstance(content, (list, tuple)) and content and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    return content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _message(role: str, content: Any, place: str) -> Message:
    return {"role": role, "content": text_of(content, f"{place}: {role}")}
