"""Rows of the usual row formats: which one they are of, and what they hold, as conversation, text or token ids."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
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
_SHAREGPT_ROLES = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("gpt", "chatgpt", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation"), "tool"),
    "human": "user",
}
"""In whatever case, with ``-`` for ``_``."""
_FOREIGN_FLAGS = ("training", "train_detail", "loss")
"""What other programs call ``train``."""
_FOREIGN_MASKS = ("loss_mask", "assistant_masks", "assistant_mask")
"""What other programs call ``completion_mask``."""
_IGNORED = -100
_LARGEST_ID = 2**31 - 1


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


def check_columns(row: Mapping[str, Any], row_format: RowFormat, location: str) -> None:
    """Raise DataError unless a row has every column of its row format."""
    needed = _COLUMNS[row_format]
    for column in needed:
        if column not in row:
            raise DataError(f"{location}: no {column!r}; a row of format {row_format} has {', '.join(needed)}")


def is_plain(row: Mapping[str, Any]) -> bool:
    """Whether a row is a prompt and a completion in plain text, without messages."""
    return not any(isinstance(row.get(side), (list, tuple)) for side in ("prompt", "completion"))


def read_text(row: Mapping[str, Any], location: str) -> str:
    """The document of a row of format ``text``, or DataError if there is none."""
    check_columns(row, "text", location)
    return text_of(row["text"], f"{location}: text")


def read_prompt(row: Mapping[str, Any], location: str) -> tuple[str, str]:
    """Prompt and completion of a row of plain texts.

    Raises:
        DataError: A column is missing or holds no text, or there are columns that only a conversation can show.
    """
    check_columns(row, "prompt_completion", location)
    for column in ("system", "tools"):
        if row.get(column):
            raise DataError(
                f"{location}: {column} beside a prompt and a completion in plain text, which stand as they are\n"
                "  fix:     write them as lists of messages, which the chat template renders"
            )
    return text_of(row["prompt"], f"{location}: prompt"), text_of(row["completion"], f"{location}: completion")


def preference_sides(row: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Both completions of a row of preferences, each as a row of format ``prompt_completion``; the chosen one first.

    Without a ``prompt`` it is what the two begin with: whole messages, or text up to the first word that differs.

    Raises:
        DataError: A column is missing, the two are alike, or one is text and the other messages.
    """
    check_columns({name: value for name, value in row.items() if value is not None}, "preference", location)
    chosen: Any = row["chosen"]
    rejected: Any = row["rejected"]
    prompt = row.get("prompt")
    is_text = isinstance(chosen, str)
    if not isinstance(rejected, str if is_text else (list, tuple)) or not isinstance(chosen, (str, list, tuple)):
        given = f"chosen is {_shown(chosen)} and rejected {_shown(rejected)}"
        raise DataError(f"{location}: {given}\n  allowed: two texts, or two lists of messages")
    if prompt is None or (isinstance(prompt, str) and not is_text):
        if chosen == rejected:
            raise DataError(f"{location}: chosen and rejected are alike\n  fix:     leave the row out")
        both = enumerate(zip(chosen, rejected, strict=False))
        shared = next((i for i, (a, b) in both if a != b), min(len(chosen), len(rejected)))
        if isinstance(chosen, str) and isinstance(rejected, str):
            shared = _word_start(chosen, rejected, shared)
        if prompt is not None and not any(
            isinstance(t, Mapping) and t.get("content") == prompt for t in chosen[:shared]
        ):
            raise DataError(
                f"{location}: prompt is text that no message shared by chosen and rejected holds\n"
                "  fix:     write the prompt as a list of messages"
            )
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    more = {name: row[name] for name in ("system", "tools", "chat_template_kwargs") if row.get(name) is not None}
    return [{**more, "prompt": prompt, "completion": completion} for completion in (chosen, rejected)]


def _word_start(chosen: str, rejected: str, end: int) -> int:
    """Where the word begins, blank before it included, at whose character ``end`` two texts part."""
    while end and chosen[end - 1].isalnum() and (chosen[end : end + 1] + rejected[end : end + 1]).isalnum():
        end -= 1
    return end - 1 if end and chosen[end - 1] == " " else end


def to_conversation(
    row: Mapping[str, Any], row_format: RowFormat, location: str, *, supervises_prompt: bool = False
) -> Conversation:
    """The conversation of one row, with its ``system``, ``tools`` and ``chat_template_kwargs`` where there are such.

    Args:
        row: Column values.
        row_format: Not ``auto``, ``text`` or ``tokens``, which are no conversations.
        location: Where the row stands, for errors.
        supervises_prompt: Otherwise assistant turns of a ``prompt`` are not, unless they say so themselves.

    Raises:
        DataError: A column is missing, a role is unknown, a content is no text, two system prompts differ, or
            ``tools`` are no schemas.
    """
    assert row_format not in ("auto", "text", "tokens")
    check_columns(row, row_format, location)
    if row_format == "instruction":
        prompt = text_of(row["instruction"], f"{location}: instruction")
        if row.get("input"):
            prompt = f"{prompt}\n\n{text_of(row['input'], f'{location}: input')}"
        messages = [{"role": "user", "content": prompt}, _message("assistant", row["output"], location)]
    elif row_format == "prompt_completion":
        messages = _messages(row["prompt"], f"{location}: prompt")
        if not supervises_prompt:
            messages = [{"train": False, **turn} if turn["role"] == "assistant" else turn for turn in messages]
        messages += _messages(row["completion"], f"{location}: completion")
    else:
        column = "messages" if row_format == "messages" else "conversations"
        messages = _messages(_from_json(row[column], f"{location}: {column}"), location)
    if row.get("system"):
        system = _message("system", row["system"], location)
        if messages[0]["role"] not in ("system", "developer"):
            messages = [system, *messages]
        elif messages[0]["content"].strip() != system["content"].strip():
            raise DataError(
                f"{location}: a system column and a system message that differ\n"
                "  fix:     keep one of them; data.columns: {system: NAME} reads the system prompt from another column"
            )
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise DataError(f"{location}: chat_template_kwargs are names with values, not {_shown(kwargs)}")
    given = {key: value for key, value in kwargs.items() if value is not None}  # a column of Parquet has every name
    return Conversation(messages, _tools(row.get("tools"), location), given)


def _messages(value: Any, location: str) -> list[Message]:
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{location}: a conversation is a list of at least one message, not {_shown(value)}")
    return [_turn(turn, f"{location}: message {i}") for i, turn in enumerate(value)]


def _turn(turn: Any, location: str) -> Message:
    """A message, in either way of writing one."""
    if not isinstance(turn, Mapping) or not ("role" in turn or turn.keys() >= {"from", "value"}):
        raise DataError(f"{location}: a message has role and content, or from and value, not {_shown(turn)}")
    for key in (*_FOREIGN_FLAGS, "tool_responses"):
        if turn.get(key) is not None:
            fix = "train: true or false" if key in _FOREIGN_FLAGS else "each as a message of the role tool"
            raise DataError(f"{location}: {key} of a message is not known here\n  fix:     write {fix}")
    if "role" not in turn:
        turn = _from_sharegpt(turn, location)
    role = "tool" if turn["role"] == "function" else turn["role"]
    if role not in _ROLES:
        raise DataError(f"{location}: role {reprlib.repr(role)}\n  allowed: {', '.join(_ROLES)}")
    own = ("role", "content", "tool_calls", "function_call", "train", "weight")
    more = {key: value for key, value in turn.items() if key not in own and value is not None}
    calls = _calls(turn.get("tool_calls") or turn.get("function_call"), location)
    content = "" if turn.get("content") is None and calls else _joined(turn.get("content"), location)
    made = {**_message(role, content, location), **more, **_flag(turn, location)}
    return {**made, "tool_calls": calls} if calls else made


def _from_sharegpt(turn: Mapping[str, Any], location: str) -> dict[str, Any]:
    """A message with role and content of one with ``from`` and ``value``."""
    who = turn["from"].lower().replace("-", "_") if isinstance(turn["from"], str) else ""
    if who not in _SHAREGPT_ROLES:
        raise DataError(f"{location}: from {reprlib.repr(turn['from'])}\n  allowed: {', '.join(_SHAREGPT_ROLES)}")
    flags = {name: turn[name] for name in ("train", "weight") if name in turn}
    said = "function_call" if who == "function_call" else "content"
    return {"role": _SHAREGPT_ROLES[who], said: turn["value"], **flags}


def _flag(turn: Mapping[str, Any], location: str) -> dict[str, bool]:
    """``train`` of a message, which ``weight`` 0 or 1 says too; nothing if neither is there."""
    given = {name: turn[name] for name in ("train", "weight") if turn.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            allowed = "true or false" if name == "train" else "0 (not supervised) or 1"
            raise DataError(f"{location}: {name} {_shown(value)}\n  allowed: {allowed}")
    found = {bool(value) for value in given.values()}
    if len(found) > 1:
        raise DataError(f"{location}: train {given['train']} and weight {given['weight']}\n  fix:     keep one of them")
    return {"train": found.pop()} if found else {}


def _joined(content: Any, location: str) -> Any:
    """The text of a content in parts ``[{type: text, text: …}]``; anything else as it is."""
    if not isinstance(content, (list, tuple)) or not content:
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            return content
        if any(part.get(key) is not None for key in ("train", "weight", *_FOREIGN_FLAGS)):
            raise DataError(
                f"{location}: a part of a content that says whether it is supervised\n"
                "  allowed: train: true or false on whole messages\n  fix:     write the part as a message of its own"
            )
    return "".join(part["text"] for part in content)


def _message(role: str, content: Any, location: str) -> Message:
    return {"role": role, "content": text_of(content, f"{location}: {role}")}


def _tools(value: Any, location: str) -> list[dict[str, Any]] | None:
    """A list of schemas, or JSON text of one, as Parquet files often have it."""
    value = _from_json(value, f"{location}: tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{location}: tools are a list of JSON schemas, not {_shown(value)}")
    return value


def _calls(value: Any, location: str) -> list[dict[str, Any]]:
    """A list of calls, one call, JSON text of either, or nothing."""
    value = _from_json(value, f"{location}: tool_calls")
    calls = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(calls, (list, tuple)):
        raise DataError(f"{location}: tool_calls are a list of calls with a function name, not {_shown(value)}")
    return [_call(call, location) for call in calls]


def _call(call: Any, location: str) -> dict[str, Any]:
    """One call, in either way; arguments that are JSON text, as OpenAI gives them, become the object of templates."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{location}: tool_calls are a list of calls with a function name, not {_shown(call)}")
    what = f"{location}: arguments of {function['name'][:40]!r}"
    arguments = _from_json(function.get("arguments"), what)
    if not isinstance(arguments, (Mapping, type(None))):
        raise DataError(f"{what} are an object, not {_shown(arguments)}")
    made = {**function, "arguments": dict(arguments or {})}
    return {**call, "function": made} if "function" in call else made


def read_tokens(row: Mapping[str, Any], location: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Token ids and mask of a row of format ``tokens``.

    The mask comes from ``labels`` (-100: not supervised; never shifted) or from ``completion_mask`` (0 and 1).

    Returns:
        int32 ids and bool mask, both of shape (T,); ``None`` for the mask if no column has one. The ids are not
        compared with a vocabulary here.

    Raises:
        DataError: Ids are no integers from 0 on, a mask is no mask or of another length, two masks disagree, or there
            is padding.
    """
    check_columns(row, "tokens", location)
    ids = _integers(row["input_ids"], f"{location}: input_ids")
    bad = np.flatnonzero((ids < 0) | (ids > _LARGEST_ID))
    if len(bad):
        raise DataError(
            f"{location}: input_ids[{bad[0]}] is {ids[bad[0]]}, which is no token id\n"
            "  fix:     token ids begin at 0; put -100 into labels, not here"
        )
    for name in _FOREIGN_MASKS:
        if row.get(name) is not None:
            fix = f"set data.columns: {{completion_mask: {name}}}"
            raise DataError(f"{location}: the mask {name} is not known here\n  fix:     {fix}")
    masks = [
        read(row[name], ids, name, location)
        for name, read in (("completion_mask", _mask), ("labels", _mask_of_labels))
        if row.get(name) is not None
    ]
    if len(masks) == 2 and not np.array_equal(masks[0], masks[1]):
        said = "completion_mask and labels differ in what is supervised"
        raise DataError(f"{location}: {said}\n  fix:     keep one of them")
    seen = row.get("attention_mask")
    if seen is not None and not _mask(seen, ids, "attention_mask", location).all():
        raise DataError(f"{location}: attention_mask has padding\n  fix:     write each row without it, however long")
    return ids.astype(np.int32), masks[0] if masks else None


def _mask_of_labels(value: Any, ids: np.ndarray, name: str, location: str) -> np.ndarray:
    labels = _integers(value, f"{location}: {name}", len(ids))
    wrong = np.flatnonzero((labels != ids) & (labels != _IGNORED))
    if len(wrong):
        i = wrong[0]
        raise DataError(
            f"{location}: labels[{i}] is {labels[i]}, but input_ids[{i}] is {ids[i]}\n  fix:     labels are not "
            "shifted: each is the token id at the same position, or -100 where nothing is supervised"
        )
    return labels != _IGNORED


def _mask(value: Any, ids: np.ndarray, name: str, location: str) -> np.ndarray:
    found = _integers(value, f"{location}: {name}", len(ids))
    if not np.isin(found, (0, 1)).all():
        raise DataError(f"{location}: {name}: a list of 0 and 1 expected, not {_shown(value)}")
    return found.astype(bool)


def _integers(value: Any, what: str, length: int | None = None) -> np.ndarray:
    """A column of integers, shape (T,), as long as ``input_ids``."""
    try:
        found = np.asarray(value if isinstance(value, (list, tuple, np.ndarray)) else None)
    except (ValueError, OverflowError):
        found = np.asarray(None)
    allowed = "iu" if length is None else "biu"  # masks may be true and false
    if found.ndim != 1 or (len(found) and found.dtype.kind not in allowed):
        raise DataError(f"{what}: a list of integers expected, not {_shown(value)}")
    if length not in (None, len(found)):
        raise DataError(f"{what}: {len(found)} values for {length} input_ids\n  fix:     write one per token")
    return found if found.dtype.kind == "u" else found.astype(np.int64)


def text_of(value: Any, what: str) -> str:
    """The value if it is text, else DataError that ``what`` begins."""
    if not isinstance(value, str):
        raise DataError(f"{what}: text expected, not {_shown(value)}")
    return value


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
