"""Rows of the usual row formats: which one they are of, and what they hold, as conversation, text or token ids."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lit_fsdp.config.data import RowFormat
from lit_fsdp.errors import DataError

Message = dict[str, Any]

_COLUMNS: dict[RowFormat, tuple[str, ...]] = {  # in this order: the first row format whose columns are all there
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_UNKNOWN = {
    **dict.fromkeys(("training", "train_detail", "loss", "weight"), "train: true or false"),
    "function_call": "tool_calls",
    "tool_responses": "each as a message of the role tool",
}
"""What other programs write into messages and nothing here would heed, and what to write instead."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the thoughts in a message: templates read the first, or, as GPT-OSS, the second."""
_UNKNOWN_MASKS = ("loss_mask", "assistant_masks", "assistant_mask")
_IGNORED = -100


@dataclass(frozen=True)
class Conversation:
    """What a chat template renders: messages, schemas of the tools, and further variables of the template.

    A message has ``role`` and a text as ``content``; ``train`` says whether a turn is supervised.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def find_format(columns: set[str], name: str) -> RowFormat:
    """Name the row format that these columns are the sign of.

    Raises:
        DataError: No row format has these columns.
    """
    for row_format, needed in _COLUMNS.items():
        if columns.issuperset(needed):
            return row_format
    known = "; ".join(f"{row_format}: {', '.join(needed)}" for row_format, needed in _COLUMNS.items())
    raise DataError(
        f"{name}: columns {', '.join(sorted(map(str, columns))) or '(none)'} are of no known row format\n"
        f"  allowed: {known}\n  fix:     say which column is which, such as data.columns: {{messages: chat}}"
    )


def num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items, or characters, the two begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def text_of(row: Mapping[str, Any], column: str, location: str) -> str:
    """A column that holds text, or DataError."""
    if not isinstance(row.get(column), str):
        raise DataError(f"{location}: {column}: text expected, not {_shown(row.get(column))}")
    return str(row[column])


def is_plain(row: Mapping[str, Any]) -> bool:
    """Whether a row is a prompt and a completion in plain text, without messages."""
    return not any(isinstance(row.get(side), (list, tuple)) for side in ("prompt", "completion"))


def read_prompt(row: Mapping[str, Any], location: str) -> tuple[str, str] | None:
    """Prompt and completion in plain text, if they are; DataError beside columns that only a conversation can show."""
    if not is_plain(row):
        return None
    if more := [column for column in ("system", "tools") if row.get(column)]:
        given = f"{more[0]} beside a prompt and a completion in plain text, which stand as they are"
        raise DataError(f"{location}: {given}\n  fix:     write them as lists of messages, which the template renders")
    return text_of(row, "prompt", location), text_of(row, "completion", location)


def preference_sides(row: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Both completions of a row of preferences, each as a row of format ``prompt_completion``; the chosen one first.

    As in TRL a ``prompt`` that is missing, or a text beside messages, is what the two sides begin with.

    Raises:
        DataError: The two are alike, or are not two texts or two lists of messages.
    """
    chosen, rejected, prompt = row.get("chosen"), row.get("rejected"), row.get("prompt")
    kind = str if isinstance(chosen, str) else (list, tuple)
    if not isinstance(chosen, kind) or not isinstance(rejected, kind):
        given = f"chosen is {_shown(chosen)} and rejected {_shown(rejected)}"
        raise DataError(f"{location}: {given}\n  allowed: two texts, or two lists of messages")
    if prompt is None or (isinstance(prompt, str) and kind is not str):
        if chosen == rejected:
            raise DataError(f"{location}: chosen and rejected are alike\n  fix:     leave the row out")
        shared = num_alike(chosen, rejected)
        shared -= chosen[shared - 1 : shared] == " "  # which goes with the word behind it
        said = [one.get("content") for one in chosen[:shared] if isinstance(one, Mapping)]
        if isinstance(prompt, str) and prompt.strip() not in [text.strip() for text in said if isinstance(text, str)]:
            given, fix = "a text that chosen and rejected do not begin with", "write the prompt as a list of messages"
            raise DataError(f"{location}: prompt is {given}\n  fix:     {fix}")
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    more = {name: row[name] for name in ("system", "tools", "chat_template_kwargs") if row.get(name) is not None}
    return [{**more, "prompt": prompt, "completion": completion} for completion in (chosen, rejected)]


def to_conversation(
    row: Mapping[str, Any], row_format: RowFormat, location: str, *, supervises_prompt: bool = False
) -> Conversation:
    """The conversation of one row, with its ``system``, ``tools`` and ``chat_template_kwargs`` where there are such.

    Unless ``supervises_prompt`` assistant turns of a ``prompt`` are not supervised, but for those that say so.

    Raises:
        DataError: A role is unknown, a content is no text, there are two system prompts, or ``tools`` are no schemas.
    """
    if row_format == "instruction":
        prompt = text_of(row, "instruction", location)
        prompt += f"\n\n{text_of(row, 'input', location)}" if row.get("input") else ""
        answer = text_of(row, "output", location)
        messages: list[Message] = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    elif row_format == "prompt_completion":
        messages = _messages(row.get("prompt"), f"{location}: prompt")
        if not supervises_prompt:
            messages = [{"train": False, **turn} if turn["role"] == "assistant" else turn for turn in messages]
        messages += _messages(row.get("completion"), f"{location}: completion")
    else:
        (column,) = _COLUMNS[row_format]
        messages = _messages(_from_json(row.get(column), f"{location}: {column}"), location)
    if row.get("system"):
        if messages[0]["role"] in ("system", "developer"):
            raise DataError(f"{location}: a system column and a system message\n  fix:     keep one of them")
        messages = [{"role": "system", "content": text_of(row, "system", location)}, *messages]
    tools = _from_json(row.get("tools"), f"{location}: tools") or None
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{location}: tools are a list of JSON schemas, not {_shown(tools)}")
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise DataError(f"{location}: chat_template_kwargs are names with values, not {_shown(kwargs)}")
    given = {key: value for key, value in kwargs.items() if value is not None}  # a column of Parquet has every name
    return Conversation(messages, tools, given)


def _messages(value: Any, location: str) -> list[Message]:
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{location}: a conversation is a list of at least one message, not {_shown(value)}")
    return [_message(turn, f"{location}: message {i}") for i, turn in enumerate(value)]


def _message(turn: Any, location: str) -> Message:
    """A message with text as content and objects as the arguments of its calls, and whatever else it has."""
    if isinstance(turn, Mapping) and turn.get("role") is None and turn.keys() >= {"from", "value"}:
        made = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turn = {**made, "role": _SHAREGPT_ROLES.get(str(turn["from"]), turn["from"]), "content": turn["value"]}
    if not isinstance(turn, Mapping) or "role" not in turn:
        raise DataError(f"{location}: a message has role and content, or from and value, not {_shown(turn)}")
    made = {key: value for key, value in turn.items() if value is not None}
    for key, fix in _UNKNOWN.items():
        if key in made:
            raise DataError(f"{location}: {key} of a message is not known here\n  fix:     write {fix}")
    if turn["role"] not in _ROLES:
        raise DataError(f"{location}: role {reprlib.repr(turn['role'])}\n  allowed: {', '.join(_ROLES)}")
    if not isinstance(made.get("train", False), bool):
        raise DataError(f"{location}: train {_shown(made['train'])}\n  allowed: true or false")
    if made.pop("tool_calls", None):
        made = {"content": "", **made, "tool_calls": _calls(turn["tool_calls"], location)}
    if thoughts := [made[key] for key in REASONING if key in made]:  # transformers < 5.21 leaves other names unread
        made = {"thinking": thoughts[0], **made, "reasoning_content": thoughts[0]}
    if isinstance(made.get("content"), (list, tuple)) and made["content"]:
        made["content"] = "".join(_part(part, location) for part in made["content"])
    return {**made, "content": text_of(made, "content", location)}


def _part(part: Any, location: str) -> str:
    """The text of a part of a content; one with a ``train`` of its own would be a message of its own."""
    given = {key for key, value in part.items() if value is not None} if isinstance(part, Mapping) else set()
    if given != {"type", "text"} or part["type"] != "text":
        raise DataError(f"{location}: a part of a content has type: text and text alone, not {_shown(part)}")
    return text_of(part, "text", location)


def _calls(calls: Any, location: str) -> list[dict[str, Any]]:
    """Calls with objects as arguments, which are JSON text in rows of OpenAI's."""
    found = []
    call: Any
    for call in calls if isinstance(calls, (list, tuple)) else [None]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{location}: tool_calls are a list of calls with a function name, not {_shown(calls)}")
        what = f"{location}: arguments of {function['name'][:40]!r}"
        arguments = _from_json(function.get("arguments"), what) or {}
        if not isinstance(arguments, Mapping):
            raise DataError(f"{what} are an object, not {_shown(arguments)}")
        if function is call:  # its name and arguments stand beside its id
            function = {key: value for key, value in call.items() if key not in ("id", "type")}
            call = {"type": "function"} | {key: value for key, value in call.items() if key == "id"}
        found.append({**call, "function": {**function, "arguments": dict(arguments)}})
    return found


def read_tokens(row: Mapping[str, Any], num_ids: int, location: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask of a row of format ``tokens``, int32 and bool, both of shape (T,).

    The mask comes from ``labels`` (-100: not supervised; never shifted) or ``completion_mask`` (0 and 1), if there is
    either; else all tokens are supervised.

    Raises:
        DataError: Ids are no integers below ``num_ids``, a mask is none or of another length, or there is padding.
    """
    ids = _integers(row, "input_ids", location)
    bad = ids[(ids < 0) | (ids >= num_ids)]
    if len(bad):
        fix = "name the tokenizer that the rows were made with; -100 goes into labels"
        raise DataError(f"{location}: token id {bad[0]}\n  allowed: 0 to {num_ids - 1}\n  fix:     {fix}")
    given = [name for name in ("labels", "completion_mask", *_UNKNOWN_MASKS) if row.get(name) is not None]
    if len(given) > 1 or (given and given[0] in _UNKNOWN_MASKS):
        fix = "keep one, labels or completion_mask; data.columns: {completion_mask: NAME} reads another column"
        raise DataError(f"{location}: masks {', '.join(given)}\n  fix:     {fix}")
    mask = np.ones(len(ids), dtype=bool)
    if given:
        values = _integers(row, given[0], location, len(ids))
        is_labels = given[0] == "labels"
        mask = values != (_IGNORED if is_labels else 0)
        if (values[mask] != (ids[mask] if is_labels else 1)).any():
            allowed = "labels: not shifted, the token id at the same position or -100; completion_mask: 0 or 1"
            raise DataError(f"{location}: {given[0]} {_shown(row[given[0]])}\n  allowed: {allowed}")
    if row.get("attention_mask") is not None and (_integers(row, "attention_mask", location, len(ids)) != 1).any():
        raise DataError(f"{location}: attention_mask has padding\n  fix:     write each row without it, however long")
    return ids.astype(np.int32), mask


def _integers(row: Mapping[str, Any], column: str, location: str, length: int | None = None) -> np.ndarray:
    """A column of integers, int64 (T,), as long as ``input_ids``; masks may be true and false."""
    found = np.asarray(None)
    with suppress(ValueError):  # of lists of several lengths
        found = np.asarray(row.get(column))
    is_whole = found.ndim == 1 and length in (None, len(found))
    if not is_whole or (len(found) and found.dtype.kind not in ("iu" if length is None else "biu")):
        wanted = "a list of integers" if length is None else f"a list of {length} integers"
        raise DataError(f"{location}: {column}: {wanted} expected, not {_shown(row.get(column))}")
    return found.astype(np.int64)


def _from_json(value: Any, what: str) -> Any:
    """What JSON text says, nothing if it is blank; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} are not JSON ({error}): {_shown(value)}") from None


def _shown(value: Any) -> str:
    """Type and first characters of a value, for errors."""
    text = value if isinstance(value, str) else reprlib.repr(value)  # which stops where it gets deep
    return f"{type(value).__name__} {text[:40]!r}"
