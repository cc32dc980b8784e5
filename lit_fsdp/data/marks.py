"""Which assistant turn stands between which generation marks of a chat template, as found with placeholders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Span
from lit_fsdp.data.render import Renderer
from lit_fsdp.data.turn_texts import MARK_IT, make_room, placeholder, shows, with_word
from lit_fsdp.errors import DataError


class MarkedTurns:
    """Assistant turns between the marks of one template.

    Args:
        renderer: The template.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._shapes: dict[Any, tuple[int, ...]] = {}

    def find(
        self, talk: Conversation, wanted: Sequence[int], rendered: tuple[str, list[Span]], place: str
    ) -> list[Span]:
        """Characters of the wanted turns; of other turns it does not matter whether they are marked.

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
        held = self._held(talk, place)
        spans = dict(zip(held, marked, strict=True)) if len(held) == len(marked) else {}
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
        return [spans[index] for index in wanted]

    def _held(self, talk: Conversation, place: str) -> tuple[int, ...]:
        """The turn that each mark holds, in conversations of this shape; nothing if one holds none or several."""
        shape = tuple((m["role"], not m["content"], tuple(m)) for m in talk.messages)
        if shape not in self._shapes:
            words = {i: placeholder(i) for i, message in enumerate(talk.messages) if message["role"] == "assistant"}
            others = [with_word(m, words[i]) if i in words else m for i, m in enumerate(talk.messages)]
            probe, marked = self._renderer.render(others, talk.tools, place)
            inside = [[i for i, word in words.items() if word in probe[a:b]] for a, b in marked]
            held = tuple(i for found in inside for i in found)
            one_each = all(len(found) == 1 for found in inside) and len(set(held)) == len(held)
            make_room(self._shapes)
            self._shapes[shape] = held if one_each else ()
        return self._shapes[shape]
