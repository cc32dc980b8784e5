"""The text of one turn: a placeholder as what it says, whether a text shows what it says, and what ends it."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from lit_fsdp.data.formats import Message

MARK_IT = "give data.chat_template with {% generation %} … {% endgeneration %} around what the assistant says"
"""What to do where a turn cannot be told from the rest of the text."""
_MAX_SHAPES = 4096


def placeholder(index: int) -> str:
    """A word that stands for what message ``index`` says."""
    return f"qzx{index}xzq"


def with_word(message: Message, word: str) -> Message:
    """The turn with its last call named ``word``, as templates may show a text in another place; a text is ``word``."""
    calls = message.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": word}
    last = {**calls[-1], "function": {**calls[-1]["function"], "name": word}} if "function" in calls[-1] else None
    return {**message, "tool_calls": [*calls[:-1], last or {**calls[-1], "name": word}]}


def shows(text: str, message: Message) -> bool:
    """Whether a turn's text has its content, but for blanks around it and thoughts, and its calls of tools."""
    if message["content"].rpartition("</think>")[2].strip() not in text:
        return False
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    return all(str(call.get("name", "")) in text and _shows_arguments(text, call.get("arguments")) for call in calls)


def _shows_arguments(text: str, arguments: Any) -> bool:
    """Whether the names of a call's arguments are there; their values may be written in many ways."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return True
    return not isinstance(arguments, dict) or all(
        json.dumps(str(key))[1:-1] in text or str(key) in text for key in arguments
    )


def end_of_turn(alone: str, special: Collection[str], is_call: bool = False) -> str:
    """What ends the turn: the text up to the special token after it; empty if the template has none.

    It is what follows when the conversation ends here, so that the header of a next turn is never taken for it.
    The placeholder for a call is its name, so that the rest of the call stands before the last special token.
    """
    if is_call:
        ends = [alone.rfind(token) + len(token) for token in special if token in alone]
        return alone[: max(ends, default=0)]
    blanks = len(alone) - len(alone.lstrip())
    token = max((token for token in special if alone.startswith(token, blanks)), key=len, default=None)
    return alone[: blanks + len(token)] if token else ""


def make_room(cache: Any) -> None:
    """Empty a cache by the shape of a conversation when it is full."""
    if len(cache) >= _MAX_SHAPES:
        cache.clear()
