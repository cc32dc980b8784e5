"""Detect common row formats, and read their rows as conversations, text or token ids."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lit_fsdp.config.data import CALL, NEEDED_COLUMNS, OPTIONAL_COLUMNS, ROLES, RowFormat, TurnsConfig
from lit_fsdp.errors import DataError

Message = dict[str, Any]

_ROLE_KEYS, _CONTENT_KEYS = ("role", "from", "speaker", "author"), ("content", "value", "text")
_PLAIN = {"role", "content"}
_FLAGS = ("train", "weight", "loss", "training")
"""Keys that mark a turn as supervised: of this project, OpenAI and SlimOrca, ms-swift, axolotl."""
_OTHER_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "function", "ipython"), "tool"),
    "tool_call": CALL,
}
"""Roles of ShareGPT, LLaMA-Factory, ms-swift, OpenAI functions, Gemma and Llama 3."""
_UNKNOWN = {"train_detail": "train: true or false", "tool_responses": "each as a message of the role tool"}
"""Message keys of other programs that are not supported, and what to write instead."""
_SAY_WHICH = "map the keys, for example data.turns: {role: speaker, content: utterance}"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Message keys for reasoning text: templates read the first, or (GPT-OSS) the second."""
_ANSWERS = ("answer", "response", "reply", "solution", "output")
_LIKELY = {
    "messages": ("chat", "dialog", "dialogue", "conversation", "turns"),
    "instruction": ("question", "query", "problem"),
    "output": _ANSWERS,
    "completion": _ANSWERS,
    "input": ("context",),
    "system": ("system_prompt", "system_message"),
    "prompt": ("input",),
    "chosen": ("preferred_output",),
    "rejected": ("non_preferred_output",),
}
"""Common names of our columns in other data."""
_QUESTIONS = ("instruction", "question", "query", "input", "messages", "conversations")
"""Columns of pairs without ``prompt`` that belong to the prompt."""
_OF_SWIFT = ("messages", "rejected_response")
"""Columns of ms-swift's pairs: a conversation, and another text of its last message."""
_UNKNOWN_MASKS = ("loss_mask", "assistant_masks", "assistant_mask")
_IGNORED = -100


@dataclass(frozen=True)
class Conversation:
    """Input of a chat template: messages, tool schemas, and further template variables.

    A message has ``role`` and ``content`` (text); the key ``train`` marks whether a turn is supervised.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def find_format(columns: set[str], name: str) -> RowFormat:
    """Detect the row format from column names.

    Raises:
        DataError: No row format has these columns.
    """
    for row_format, needed in NEEDED_COLUMNS.items():
        if columns.issuperset(needed):
            return row_format
    known = "; ".join(f"{row_format}: {', '.join(needed)}" for row_format, needed in NEEDED_COLUMNS.items())
    shown = ", ".join(f"{ours}: {theirs}" for ours, theirs in _likely(set(map(str, columns))).items())
    example = f"for example data.columns: {{{shown}}}" if shown else "as data.columns: {OURS: YOURS}"
    raise DataError(
        f"{name}: cannot detect the row format from columns {', '.join(sorted(map(str, columns))) or '(none)'}\n"
        f"  allowed: {known}\n  fix:     map our columns to yours, {example}"
    )


def unread_columns(columns: set[str], row_format: RowFormat) -> list[str]:
    """Return the columns that a row format does not read, sorted."""
    read = {*NEEDED_COLUMNS[row_format], *OPTIONAL_COLUMNS[row_format]}
    if row_format == "preference" and columns.issuperset(_OF_SWIFT):
        read.update(_OF_SWIFT)
    return sorted(columns - read)


def _likely(columns: set[str]) -> dict[str, str]:
    """Suggest ``data.columns`` by common names of other columns; empty if there are none."""
    if {"input", "output"} <= columns:
        return {"instruction": "input"}
    for row_format, needed in NEEDED_COLUMNS.items():
        names = (*needed, *OPTIONAL_COLUMNS[row_format])
        found = {ours: name for ours in names for name in sorted(columns) if name in _LIKELY.get(ours, ())}
        if found and columns.union(found).issuperset(needed):
            return found
    return {}


def num_alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix, in items or characters."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def text_of(row: Mapping[str, Any], column: str, location: str) -> str:
    """Return a text column, or raise DataError."""
    if not isinstance(row.get(column), str):
        fix = f"write {column} as text, or remove the row (data.on_bad_row: drop)"
        raise DataError(f"{location}: {column}: text expected, not {_shown(row.get(column))}\n  fix:     {fix}")
    return str(row[column])


def is_plain(row: Mapping[str, Any]) -> bool:
    """Whether the prompt and completion of a row are plain text, not messages."""
    return not any(isinstance(row.get(side), (list, tuple)) for side in ("prompt", "completion"))


def read_prompt(row: Mapping[str, Any], location: str) -> tuple[str, str] | None:
    """Return a plain-text prompt and completion, else ``None``; DataError if other columns need a conversation."""
    if not is_plain(row):
        return None
    if more := [column for column in ("system", "tools", "functions") if row.get(column)]:
        given = f"{more[0]} has no effect on a plain-text prompt and completion"
        raise DataError(f"{location}: {given}\n  fix:     write them as lists of messages, which the template renders")
    return text_of(row, "prompt", location), text_of(row, "completion", location)


def preference_sides(row: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    """Return both completions of a preference row as rows of format ``prompt_completion``, the chosen one first.

    As in TRL, if ``prompt`` is missing, or is text while the sides are messages, the prompt is their common prefix.

    Raises:
        DataError: The two sides are equal, or are not two texts or two lists of messages.
    """
    row = _with_our_columns(row)
    sides = (row.get("chosen"), row.get("rejected"))
    chosen, rejected = ([side] if isinstance(side, Mapping) else side for side in sides)  # as in LLaMA-Factory
    prompt = row.get("prompt")
    kind = str if isinstance(chosen, str) else (list, tuple)
    if not isinstance(chosen, kind) or not isinstance(rejected, kind):
        likely = _likely(set(map(str, row)))
        columns = ", ".join(f"{ours}: {theirs}" for ours, theirs in likely.items())
        columns = columns if {"chosen", "rejected"} & likely.keys() else ""
        given = f"chosen is {_shown(chosen)} and rejected {_shown(rejected)}"
        if not {"chosen", "rejected"} & row.keys():
            given = f"no columns chosen and rejected, only {', '.join(map(str, row))}"
            columns = columns or "chosen: COLUMN, rejected: COLUMN"
        fix = f"\n  fix:     set data.columns: {{{columns}}}" if columns else ""
        raise DataError(f"{location}: {given}\n  allowed: two texts, or two lists of messages{fix}")
    if prompt is None or (isinstance(prompt, str) and kind is not str):
        if chosen == rejected:
            raise DataError(f"{location}: chosen and rejected are equal\n  fix:     remove the row")
        shared = num_alike(chosen, rejected)
        shared -= chosen[shared - 1 : shared] == " "  # belongs to the following word
        questions = [name for name in _QUESTIONS if row.get(name)]
        if prompt is None and questions and (kind is str or not shared):
            one = f"map it: data.columns: {{prompt: {questions[0]}}}"
            fix = f"write {' and '.join(questions)} as one column prompt" if questions[1:] else one
            raise DataError(f"{location}: no prompt, but {', '.join(questions)}\n  fix:     {fix}")
        lead = [_first(one, _CONTENT_KEYS)[1] for one in chosen[:shared] if isinstance(one, Mapping)]
        if isinstance(prompt, str) and prompt.strip() not in [text.strip() for text in lead if isinstance(text, str)]:
            given, fix = "not a common prefix of chosen and rejected", "write the prompt as a list of messages"
            raise DataError(f"{location}: prompt is {given}\n  fix:     {fix}")
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    names = ("system", "tools", "functions", "chat_template_kwargs")
    more = {name: row[name] for name in names if row.get(name) is not None}
    return [{**more, "prompt": prompt, "completion": completion} for completion in (chosen, rejected)]


def _with_our_columns(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert pairs of OpenAI (``prompt`` is a mapping) and ms-swift (``rejected_response`` for the last message)."""
    prompt, messages, worse = row.get("prompt"), row.get("messages"), row.get("rejected_response")
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping) and isinstance(worse, str):
        rest = {key: value for key, value in row.items() if key not in _OF_SWIFT}
        last, both = messages[-1], (_ROLE_KEYS, _CONTENT_KEYS)
        role, content = (next((key for key in keys if key in last), keys[0]) for keys in both)
        rejected = {role: last.get(role), content: worse}
        return {**rest, "prompt": messages[:-1], "chosen": messages[-1:], "rejected": [rejected]}
    if not isinstance(prompt, Mapping) or "messages" not in prompt or (row.get("tools") and prompt.get("tools")):
        return row  # the last is rejected: a prompt is no mapping
    tools = {"tools": prompt["tools"]} if prompt.get("tools") else {}
    return {**row, **tools, "prompt": prompt["messages"]}


def to_conversation(
    row: Mapping[str, Any], row_format: RowFormat, location: str, *, supervises_prompt: bool = False
) -> Conversation:
    """Return the conversation of one row, with its ``system``, ``tools`` and ``chat_template_kwargs``, if any.

    Unless ``supervises_prompt`` is set, assistant turns of a ``prompt`` are supervised only if they are marked so.

    Raises:
        DataError: A role is unknown, a content is not text, two system prompts exist, or ``tools`` are not schemas.
    """
    if row_format == "instruction":
        prompt = text_of(row, "instruction", location)
        if row.get("input"):
            prompt = (f"{prompt}\n\n" if prompt else "") + text_of(row, "input", location)
        answer = text_of(row, "output", location)
        told = _from_json(row.get("history"), f"{location}: history") or []
        if not isinstance(told, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in told):
            raise DataError(f"{location}: history must be a list of (question, answer) pairs, not {_shown(told)}")
        texts = [text for pair in [*told, (prompt, answer)] for text in pair]
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        messages = _messages(turns, location)
    elif row_format == "prompt_completion":
        messages = _messages(row.get("prompt"), f"{location}: prompt")
        if not supervises_prompt:
            messages = [{"train": False, **turn} if turn["role"] == "assistant" else turn for turn in messages]
        messages += _messages(row.get("completion"), f"{location}: completion")
    else:
        (column,) = NEEDED_COLUMNS[row_format]
        messages = _messages(_from_json(row.get(column), f"{location}: {column}"), location)
    if row.get("system"):
        if messages[0]["role"] in ("system", "developer"):
            raise DataError(f"{location}: both a system column and a system message\n  fix:     keep one of them")
        messages = [{"role": "system", "content": text_of(row, "system", location)}, *messages]
    tools, functions = (_from_json(row.get(name), f"{location}: {name}") for name in ("tools", "functions"))
    if tools and functions:
        raise DataError(f"{location}: both tools and functions\n  fix:     keep one of them")
    tools = tools or functions or None
    schemas: list[Any] = tools if isinstance(tools, list) else [None]
    if tools and not all(isinstance(tool, dict) and isinstance(tool.get("function") or {}, dict) for tool in schemas):
        raise DataError(f"{location}: tools must be a list of JSON schemas, not {_shown(tools)}")
    tools = tools and [_schema(tool) for tool in schemas]
    kwargs = row.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise DataError(f"{location}: chat_template_kwargs must be a mapping, not {_shown(kwargs)}")
    given = {key: value for key, value in kwargs.items() if value is not None}  # Parquet columns have every name
    return Conversation(messages, tools, given)


def map_turns(row: Mapping[str, Any], turns: TurnsConfig) -> dict[str, Any]:
    """Return the row with the keys and roles of its messages, in any column, renamed by ``data.turns``."""
    found, gone, roles = dict(_with_our_columns(row)), {*turns.keys, *turns.keys.values()}, turns.roles or {}
    for column in ("messages", "conversations", "prompt", "completion", "chosen", "rejected"):
        value = found.get(column)
        if column in ("messages", "conversations"):
            with suppress(DataError):  # raised later, when the row is read
                value = _from_json(value, column)
        mapped: list[Any] = [value] if isinstance(value, Mapping) else [*value] if isinstance(value, list) else []
        for number, turn in enumerate(mapped):
            if isinstance(turn, Mapping):
                made = {key: part for key, part in turn.items() if key not in gone}
                made |= {ours: turn[theirs] for ours, theirs in turns.keys.items() if theirs in turn}
                key, role = _first(made, _ROLE_KEYS)
                mapped[number] = {**made, key: roles[str(role)]} if str(role) in roles else made
                found[column] = mapped
    return found


def _first(turn: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, Any]:
    """Return the first of these keys that a message has, and its value; else the last key and ``None``."""
    return next(((key, turn[key]) for key in keys if turn.get(key) is not None), (keys[-1], None))


def _messages(value: Any, location: str) -> list[Message]:
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"{location}: a conversation must be a non-empty list of messages, not {_shown(value)}")
    found: list[Message] = []
    for number, turn in enumerate(value):
        made = _message(turn, f"{location}: message {number + 1}")
        if made["role"] == CALL:  # an assistant turn, or a continuation of the previous one
            made["role"], last = "assistant", found[-1] if found else {}
            if last.get("role") == "assistant" and last.get("train") == made.get("train"):
                calls, text = [*last.get("tool_calls", []), *made["tool_calls"]], last["content"] + made["content"]
                made = {**found.pop(), **made, "content": text, "tool_calls": calls}
        found.append(made)
    return found


def _message(turn: Any, location: str) -> Message:
    """Normalize a message: text as content, objects as call arguments, other keys unchanged."""
    if isinstance(turn, dict) and turn.keys() == _PLAIN and turn["role"] in ROLES and isinstance(turn["content"], str):
        return {"role": turn["role"], "content": turn["content"]}  # the common case, five times faster
    made = {key: value for key, value in turn.items() if value is not None} if isinstance(turn, Mapping) else {}
    (role_key, given), (content_key, content) = _first(made, _ROLE_KEYS), _first(made, _CONTENT_KEYS)
    calls = [made[key] for key in ("tool_calls", CALL) if made.get(key) and made[key] != "[]"]
    if given is None or (content is None and not calls):
        problem = f"a message must have role and content, or from and value, not {_shown(turn)}"
        raise DataError(f"{location}: {problem}\n  fix:     {_SAY_WHICH}")
    role = _OTHER_ROLES.get(str(given).lower(), str(given).lower())
    if role not in (*ROLES, CALL):
        fix = f"map the role, for example data.turns: {{roles: {{{str(given)[:40]}: assistant}}}}"
        allowed = ", ".join((*ROLES, CALL, *_OTHER_ROLES))
        raise DataError(f"{location}: role {reprlib.repr(given)}\n  allowed: {allowed}\n  fix:     {fix}")
    for key, fix in _UNKNOWN.items():
        if key in made:
            raise DataError(f"{location}: message key {key} is not supported\n  fix:     write {fix}")
    flags = {key: made[key] for key in _FLAGS if key in made}
    if any(flag not in (0, 1) for flag in flags.values()) or len({*flags.values()}) > 1:
        flagged = ", ".join(f"{key} {_shown(flag)}" for key, flag in flags.items())
        raise DataError(f"{location}: {flagged}\n  allowed: true or false, or 1 or 0; turns cannot be weighted")
    if role == CALL:  # JSON, after the reasoning text, if any
        content, end, call = content.rpartition("</think>") if isinstance(content, str) else ("", "", content)
        calls, content = [*calls, call], content + end
    made = {key: made[key] for key in made if key not in (role_key, content_key, *_FLAGS, "tool_calls", CALL)}
    made |= {"role": role, **({"train": bool(max(flags.values()))} if flags else {})}
    if thoughts := [made[key] for key in REASONING if key in made]:  # transformers < 5.21 ignores other names
        made = {"thinking": thoughts[0], **made, "reasoning_content": thoughts[0]}
    if len(calls) > 1:
        raise DataError(f"{location}: both tool_calls and {CALL}\n  fix:     keep one of them")
    if calls:
        made["tool_calls"], content = _calls(_from_json(calls[0], f"{location}: {CALL}"), location), content or ""
    if isinstance(content, (list, tuple)) and content:
        content = "".join(_part(part, location) for part in content)
    return {**made, "content": text_of({"content": content}, "content", location)}


def _part(part: Any, location: str) -> str:
    """Return the text of a content part; a part cannot have its own ``train``, because only messages can."""
    given = {key for key, value in part.items() if value is not None} if isinstance(part, Mapping) else set()
    if given != {"type", "text"} or part["type"] != "text":
        raise DataError(f"{location}: a content part must have only type: text and text, not {_shown(part)}")
    return text_of(part, "text", location)


def _calls(calls: Any, location: str) -> list[dict[str, Any]]:
    """Return calls with objects as arguments, which are JSON text in OpenAI rows."""
    found = []
    call: Any
    for call in calls if isinstance(calls, (list, tuple)) and calls else [calls]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{location}: tool_calls must be a list of calls with function names, not {_shown(calls)}")
        what = f"{location}: arguments of {function['name'][:40]!r}"
        key, given = _first(function, ("arguments", "parameters"))
        arguments = _from_json(_from_json(given, what), what) or {}  # also JSON text inside JSON text
        if not isinstance(arguments, Mapping):
            fix = "write {name: value}, or remove the row (data.on_bad_row: drop)"
            raise DataError(f"{what} must be an object, not {_shown(arguments)}\n  fix:     {fix}")
        if function is call:  # name and arguments are on the same level as the id
            function = {key: value for key, value in call.items() if key not in ("id", "type")}
            call = {"type": "function"} | {key: value for key, value in call.items() if key == "id"}
        function = {"arguments" if name == key else name: value for name, value in function.items()}
        found.append({**call, "function": {**function, "arguments": dict(arguments)}})
    return found


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool to the schema of templates; OpenAI functions and LLaMA-Factory have the name at the top level."""
    if tool.get("function") or not isinstance(tool.get("name"), str):
        return tool
    function = {key: value for key, value in tool.items() if key not in ("type", "function")}
    return {"type": "function", "function": function}


def read_tokens(row: Mapping[str, Any], num_ids: int, location: str) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and mask of a row of format ``tokens``, int32 and bool, both of shape (T,).

    The mask comes from ``labels`` (-100: not supervised; never shifted) or ``completion_mask`` (0 and 1). Without
    these columns all tokens are supervised.

    Raises:
        DataError: Ids are not integers below ``num_ids``, a mask is invalid or has another length, or rows are padded.
    """
    ids = _integers(row, "input_ids", location)
    bad = ids[(ids < 0) | (ids >= num_ids)]
    if len(bad):
        fix = "set the tokenizer that the rows were made with; use -100 only in labels"
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
        raise DataError(f"{location}: attention_mask has padding\n  fix:     write each row without padding")
    return ids.astype(np.int32), mask


def _integers(row: Mapping[str, Any], column: str, location: str, length: int | None = None) -> np.ndarray:
    """Return a column of integers, int64 (T,), as long as ``input_ids``; masks may be boolean."""
    found = np.asarray(None)
    with suppress(ValueError):  # ragged lists
        found = np.asarray(row.get(column))
    is_whole = found.ndim == 1 and length in (None, len(found))
    if not is_whole or (len(found) and found.dtype.kind not in ("iu" if length is None else "biu")):
        wanted = "a list of integers" if length is None else f"a list of {length} integers"
        raise DataError(f"{location}: {column}: {wanted} expected, not {_shown(row.get(column))}")
    return found.astype(np.int64)


def _from_json(value: Any, what: str) -> Any:
    """Parse JSON text (``None`` if blank); return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what}: invalid JSON ({error}): {_shown(value)}") from None


def _shown(value: Any) -> str:
    """Format the type and first characters of a value, for errors."""
    text = value if isinstance(value, str) else reprlib.repr(value)  # limits the depth
    return f"{type(value).__name__} {text[:40]!r}"
