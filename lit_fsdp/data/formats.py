"""Rows of the usual shapes as conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_fsdp.config.sources import RowFormat
from lit_fsdp.errors import DataError

Message = dict[str, Any]

_ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_SIGNS: dict[RowFormat, tuple[str, ...]] = {  # in this order: the first format whose columns are all there
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


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
        f"  allowed: {shapes}\n  fix:     rename the columns"
    )


def to_conversation(row: Mapping[str, Any], form: RowFormat, place: str) -> Conversation:
    """The conversation of one row, with its ``tools`` column where there is one.

    Args:
        row: Column values.
        form: Not ``auto``.
        place: Where the row stands, for errors.

    Raises:
        DataError: A column is missing, a role is unknown, a content is no text, or ``tools`` are no schemas.
    """
    for column in _SIGNS[form]:
        if column not in row:
            raise DataError(f"{place}: no {column!r}; a {form} row has {', '.join(_SIGNS[form])}")
    return Conversation(_messages(row, form, place), _tools(row.get("tools"), place))


def _messages(row: Mapping[str, Any], form: RowFormat, place: str) -> list[Message]:
    if form == "messages":
        return [_chat_turn(turn, f"{place}: message {i}") for i, turn in _turns(row["messages"], place)]
    system = [_message("system", row["system"], place)] if row.get("system") else []
    if form == "instruction":
        asked = _text(row["instruction"], f"{place}: instruction")
        more = row.get("input")
        prompt = f"{asked}\n\n{_text(more, f'{place}: input')}" if more else asked
        return [*system, _message("user", prompt, place), _message("assistant", row["output"], place)]
    if form == "prompt_completion":
        return [*system, *_side(row["prompt"], "user", place), *_side(row["completion"], "assistant", place)]
    return [*system, *(_sharegpt_turn(turn, f"{place}: turn {i}") for i, turn in _turns(row["conversations"], place))]


def _side(value: Any, role: str, place: str) -> list[Message]:
    if isinstance(value, str):
        return [_message(role, value, place)]
    return [_chat_turn(turn, f"{place}: message {i}") for i, turn in _turns(value, place)]


def _turns(value: Any, place: str) -> list[tuple[int, Any]]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # a cell of a CSV file
        value = _from_json(value, f"{place}: messages")
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{place}: a conversation is a list of at least one message, not {_shown(value)}")
    return list(enumerate(value))


def _chat_turn(turn: Any, place: str) -> Message:
    if not isinstance(turn, Mapping) or "role" not in turn:
        raise DataError(f"{place}: a message has role and content, not {_shown(turn)}")
    if turn["role"] not in _ROLES:
        raise DataError(f"{place}: role {turn['role']!r}\n  allowed: {', '.join(_ROLES)}")
    more = {key: value for key, value in turn.items() if key not in ("role", "content") and value is not None}
    calls = more.get("tool_calls") or []
    if not isinstance(calls, (list, tuple)) or not all(_is_call(call) for call in calls):
        raise DataError(f"{place}: tool_calls are a list of calls with a function name, not {_shown(calls)}")
    content = turn.get("content")
    if content is None and calls:
        return {"role": turn["role"], "content": "", **more}
    return {**_message(turn["role"], content, place), **more}


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _sharegpt_turn(turn: Any, place: str) -> Message:
    if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
        raise DataError(f"{place}: a turn has from and value, not {_shown(turn)}")
    if not isinstance(turn["from"], str) or turn["from"] not in _SHAREGPT_ROLES:
        raise DataError(f"{place}: from {turn['from']!r}\n  allowed: {', '.join(_SHAREGPT_ROLES)}")
    return _message(_SHAREGPT_ROLES[turn["from"]], turn["value"], place)


def _message(role: str, content: Any, place: str) -> Message:
    return {"role": role, "content": _text(content, f"{place}: {role}")}


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: text expected, not {_shown(value)}")
    lone = None if value.isascii() else _LONE_SURROGATE.search(value)
    if lone:
        raise DataError(
            f"{place}: half a character at {lone.start()} (\\u{ord(lone[0]):04x}), which is no text\n"
            "  fix:     write both halves of the pair, or remove it"
        )
    return value


def _tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    """The ``tools`` column: a list of schemas, or JSON text of one, as Parquet files often have it."""
    if isinstance(value, str):
        value = _from_json(value.strip() or "null", f"{place}: tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{place}: tools are a list of JSON schemas, not {_shown(value)}")
    return value


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} are not JSON ({error}): {_shown(text)}") from None


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"
