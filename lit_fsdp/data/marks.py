"""Which assistant turn stands between which generation marks of a chat template, as found with placeholders.

Where the marks end before the special token that ends the turn, it is learnt too, as the model has to emit it to stop.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lit_fsdp.data.formats import Conversation, Message
from lit_fsdp.data.masks import Span
from lit_fsdp.data.render import Renderer
from lit_fsdp.data.turn_texts import MARK_IT, end_of_turn, make_room, placeholder, shows, with_word
from lit_fsdp.errors import DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shape:
    """What the marks hold in conversations of one shape."""

    held: tuple[int, ...] = ()
    """The turn in each mark; nothing if one holds none or several."""
    ends: tuple[str, ...] = ()
    """What ends each of these turns behind its mark."""


class MarkedTurns:
    """Assistant turns between the marks of one template.

    Args:
        renderer: The template.
        special: Text of the tokenizer's special tokens.
    """

    def __init__(self, renderer: Renderer, special: Collection[str]) -> None:
        self._renderer, self._special = renderer, tuple(special)
        self._shapes: dict[Any, _Shape] = {}
        self._said = False

    def find(
        self, talk: Conversation, wanted: Sequence[int], rendered: tuple[str, list[Span]], place: str
    ) -> list[Span]:
        """Characters of the wanted turns, ends of turn included; other turns may be marked or not.

        Args:
            talk: Messages without keys of ours.
            wanted: Indices of assistant messages, ascending.
            rendered: The text of the conversation, and what is marked there.
            place: Where the row stands, for errors.

        Raises:
            DataError: A wanted turn is not marked, or its marks hold something else.
        """
        if not wanted:
            return []
        text, marked = rendered
        shape = self._shape(talk, place)
        spans = dict(zip(shape.held, marked, strict=True)) if len(shape.held) == len(marked) else {}
        num_turns = sum(message["role"] == "assistant" for message in talk.messages)
        if len(marked) != num_turns and not spans.keys() >= set(wanted):
            raise DataError(
                f"{place}: the chat template marks {len(marked)} of {num_turns} assistant turns\n  fix:     {MARK_IT}"
            )
        if not all(i in spans and shows(text[slice(*spans[i])], talk.messages[i]) for i in wanted):
            raise DataError(
                f"{place}: the chat template's {{% generation %}} marks do not hold what the assistant says\n"
                "  fix:     mark the content and its end of turn, outside any macro, set block or filter"
            )
        ends = dict(zip(shape.held, shape.ends, strict=True))
        return [self._closed(spans[index], ends[index], text, place) for index in wanted]

    def _closed(self, span: Span, end: str, text: str, place: str) -> Span:
        """With the end of turn that follows the mark."""
        if not end or not text.startswith(end, span[1]):
            return span
        if not self._said:
            self._said = True
            _log.warning(
                "%s: the chat template's {%% generation %%} marks end before %s, which ends the turn, so it is learnt "
                "too: the model has to emit it to stop",
                place,
                end.strip(),
            )
        return span[0], span[1] + len(end)

    def _shape(self, talk: Conversation, place: str) -> _Shape:
        """What the marks hold in conversations of this shape."""
        turns = tuple((m["role"], not m["content"], tuple(m), len(m.get("tool_calls") or ())) for m in talk.messages)
        key = (turns, repr(talk.tools) if talk.tools else None)
        if key not in self._shapes:
            words = {i: placeholder(i) for i, message in enumerate(talk.messages) if message["role"] == "assistant"}
            others = [with_word(m, words[i]) if i in words else m for i, m in enumerate(talk.messages)]
            probe, marked = self._renderer.render(others, talk.tools, place)
            inside = [[i for i, word in words.items() if word in probe[a:b]] for a, b in marked]
            held = tuple(i for found in inside for i in found)
            one_each = all(len(found) == 1 for found in inside) and len(set(held)) == len(held)
            make_room(self._shapes)
            ends = self._ends(Conversation(others, talk.tools), held, probe, marked) if one_each else ()
            self._shapes[key] = _Shape(held, ends) if one_each else _Shape()
        return self._shapes[key]

    def _ends(self, talk: Conversation, held: Sequence[int], text: str, marked: Sequence[Span]) -> tuple[str, ...]:
        """What ends each turn behind its mark; for calls of tools nothing where the mark of another turn has its end.

        Args:
            talk: With placeholders.
            held: The turn in each mark.
            text: Of the conversation.
            marked: Where the marks are in it.
        """
        calls = [bool(talk.messages[index].get("tool_calls")) for index in held]
        whole = [text[a:b].rstrip().endswith(self._special) for a, b in marked]
        ends_inside = any(inside for inside, is_call in zip(whole, calls, strict=True) if not is_call)
        done = [ends_inside if is_call else inside for inside, is_call in zip(whole, calls, strict=True)]
        done = [d or not end_of_turn(text[b:], self._special) for d, (_, b) in zip(done, marked, strict=True)]
        return tuple("" if d else self._end(talk, index) for d, index in zip(done, held, strict=True))

    def _end(self, talk: Conversation, index: int) -> str:
        """What ends a turn behind its mark, by the conversation up to there; empty if nothing does for sure."""
        *before, turn = talk.messages[: index + 1]
        word = placeholder(index)
        plain = self._around(before, {"role": "assistant", "content": word}, word, talk)
        own = self._around(before, turn, word, talk) if turn.get("tool_calls") else plain
        if own is None or (plain or own)[1].rstrip().endswith(self._special):  # a call's mark may end with its own
            return ""
        end = end_of_turn(own[2], self._special)
        bos, eos = (self._renderer.variables.get(name) for name in ("bos_token", "eos_token"))
        if not end or end.strip() == bos != eos:
            return ""
        return end if end.strip() == eos != bos or self._is_over(before, turn, own, talk) else ""

    def _is_over(self, before: list[Message], turn: Message, parts: tuple[str, str, str], talk: Conversation) -> bool:
        """Whether what follows a turn at the end is no header that the model is handed without being asked for it.

        Then asking for one changes the text, or the header of this turn is not there before the turn is.
        """
        asked = self._rendered([*before, turn], talk, generation_prompt=True)
        if asked is not None and asked[0] != "".join(parts):
            return True
        shorter = self._rendered(before, talk)
        return shorter is not None and parts[0].startswith(shorter[0]) and bool(parts[0][len(shorter[0]) :].strip())

    def _around(
        self, before: list[Message], turn: Message, word: str, talk: Conversation
    ) -> tuple[str, str, str] | None:
        """The text before a turn's mark, in it, and behind it at the end; ``None`` if it is not marked."""
        text, marked = self._rendered([*before, turn], talk) or ("", [])
        start, end = marked[-1] if marked else (0, 0)
        return (text[:start], text[start:end], text[end:]) if word in text[start:end] else None

    def _rendered(
        self, messages: list[Message], talk: Conversation, generation_prompt: bool = False
    ) -> tuple[str, list[Span]] | None:
        """``None`` if the template refuses these messages, as some do with a conversation that is cut off."""
        try:
            return self._renderer.render(messages, talk.tools, "", generation_prompt)
        except DataError:
            return None
