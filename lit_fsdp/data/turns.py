"""Where in the text of a conversation its assistant turns are: by the template's marks, or derived by rendering.

A template with ``{% generation %}`` marks says itself what the assistant says. For others it is derived: a turn begins
where the generation prompt of the conversation before it ends, as there the model takes over. It ends where the text
agrees again with the same conversation rendered with a placeholder as this turn, whatever the template does to other
turns; the special token that follows belongs to it, as the model has to emit it to stop. Every step is checked against
the full text; a template that does something else is refused, never unmasked in silence.

Deriving renders three times per turn. It is done once per shape of a conversation (roles, empty contents, tools), with
placeholders as all contents. A row of that shape is then rendered once, and if its text is that of the shape with its
own contents in place of the placeholders, so are its turns; any other row is derived by itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lit_fsdp.data.formats import Conversation, Message
from lit_fsdp.data.marks import MarkedTurns
from lit_fsdp.data.masks import Span
from lit_fsdp.data.render import Renderer
from lit_fsdp.data.turn_texts import MARK_IT, end_of_turn, make_room, placeholder, shows, with_word
from lit_fsdp.errors import DataError

_PLACE = re.compile(r"qzx(\d+)xzq")


class TurnFinder:
    """Finds assistant turns in what one template renders.

    Args:
        renderer: The template.
        special: Text of the tokenizer's special tokens.
    """

    def __init__(self, renderer: Renderer, special: Collection[str]) -> None:
        self._renderer, self._special = renderer, tuple(special)
        self._shapes: dict[Any, _Shape | None] = {}
        self._marked = MarkedTurns(renderer, special)

    def find(self, talk: Conversation, wanted: Sequence[int], place: str) -> tuple[str, list[Span]]:
        """The text of a conversation, and the characters of the wanted turns, ends of turn included.

        Args:
            talk: Messages without keys of ours.
            wanted: Indices of assistant messages, ascending.
            place: Where the row stands, for errors.

        Raises:
            DataError: The template refuses the row, or its turns cannot be told exactly.
        """
        text, spans = self._renderer.render(talk.messages, talk.tools, place)
        if self._renderer.has_marks:
            return text, self._marked.find(talk, wanted, (text, spans), place)
        if not wanted:
            return text, []
        return text, self._by_shape(talk, wanted, text) or [self._span(talk, i, text, place) for i in wanted]

    def _by_shape(self, talk: Conversation, wanted: Sequence[int], text: str) -> list[Span] | None:
        """Spans from the shape of the conversation; ``None`` if its text is not that of the shape."""
        if any(len(message) != 2 for message in talk.messages):
            return None
        contents = [message["content"] for message in talk.messages]
        roles = tuple(message["role"] if message["content"] else (message["role"],) for message in talk.messages)
        key = (roles, tuple(wanted), repr(talk.tools) if talk.tools else None)
        if key not in self._shapes:
            make_room(self._shapes)
            self._shapes[key] = self._shape(talk, wanted)
        shape = self._shapes[key]
        if shape is None:
            return None
        return shape.spans(contents, text) or shape.spans([content.strip() for content in contents], text)

    def _shape(self, talk: Conversation, wanted: Sequence[int]) -> _Shape | None:
        contents = [placeholder(i) if message["content"] else "" for i, message in enumerate(talk.messages)]
        blank = Conversation(
            [{"role": m["role"], "content": c} for m, c in zip(talk.messages, contents, strict=True)], talk.tools
        )
        try:
            text, _ = self._renderer.render(blank.messages, blank.tools, "a conversation of this shape")
            spans = [self._span(blank, index, text, "a conversation of this shape") for index in wanted]
        except DataError:
            return None
        shape = _Shape.of(text, spans)
        return shape if all(index < len(contents) for index in shape.filled) else None

    def _span(self, talk: Conversation, index: int, text: str, place: str) -> Span:
        """Characters of one assistant turn, from where the model takes over to its end of turn."""
        word = next(w for w in (placeholder(n) for n in itertools.count()) if w not in text)
        turns = [{"role": "assistant", "content": word}, with_word(talk.messages[index], word)]
        for turn in turns[: 2 if turns[1].get("tool_calls") else 1]:
            span = self._span_by(talk, index, turn, word, text)
            if span is not None and shows(text[slice(*span)], talk.messages[index]):
                return span
        raise DataError(
            f"{place}: the chat template does not show assistant turn {index} whole and in one piece, so that it "
            f"cannot be marked\n  fix:     {MARK_IT}"
        )

    def _span_by(self, talk: Conversation, index: int, turn: Message, word: str, text: str) -> Span | None:
        """The turn from comparing with another in its place; ``None`` if they are not alike."""
        messages = talk.messages
        probe = self._text([*messages[:index], turn, *messages[index + 1 :]], talk)
        alone = self._text([*messages[:index], turn], talk)
        if probe is None or alone is None or word not in probe:
            return None
        before, _, after = probe.partition(word)
        head, _, rest = alone.partition(word)
        if turn.get("tool_calls"):
            said = self._text([*messages[:index], {"role": "assistant", "content": word}], talk)
            opening = _without(head, (said or "").partition(word)[0])
            if said is None or opening is None or not before.endswith(opening):
                return None
            head, before = head[: len(head) - len(opening)], before[: len(before) - len(opening)]
        rest = end_of_turn(rest, self._special, is_call=bool(turn.get("tool_calls")))
        start = self._start(talk, index, before, head, text)
        end = len(text) - len(after)
        if start is None or not text.endswith(after) or start > end:
            return None
        return start, end + (len(rest) if after.startswith(rest) else 0)

    def _start(self, talk: Conversation, index: int, before: str, head: str, text: str) -> int | None:
        """Where the model takes over; ``None`` if the text is another than expected.

        A template without a generation prompt leaves the header of the turn to whoever asks, so it is not learnt.

        Args:
            talk: The conversation.
            index: Of the turn.
            before: Text before what the turn says.
            head: The same of the conversation that ends with this turn, where earlier turns may look another way.
            text: Of the conversation.
        """
        before = before if text.startswith(before) else before.rstrip()  # a blank that only some turns begin with
        shown = len(before) if text.startswith(before) else None
        prompt = self._text(talk.messages[:index], talk, generation_prompt=True) if index else None
        if prompt is None:
            return shown
        if text.startswith(prompt):
            start, header = len(prompt), text[len(prompt) : shown] if shown is not None else None
        else:
            header = head[len(prompt) :] if head.startswith(prompt) else ""
            if shown is None or not before.endswith(header):
                return shown
            start = shown - len(header)
        if (header is None or header.strip()) and prompt == self._text(talk.messages[:index], talk):
            return shown
        return start

    def _text(self, messages: Sequence[Message], talk: Conversation, generation_prompt: bool = False) -> str | None:
        """``None`` if the template refuses these messages, as some do with a conversation that is cut off."""
        try:
            return self._renderer.render(messages, talk.tools, "", generation_prompt)[0]
        except DataError:
            return None


@dataclass(frozen=True)
class _Shape:
    """The text of a conversation with placeholders as contents, cut at these."""

    parts: tuple[str, ...]
    """Texts before, between and after the placeholders."""
    filled: tuple[int, ...]
    """Message whose content stands at each placeholder, in the order of the text."""
    borders: tuple[tuple[int, int, int, int], ...]
    """Per span: its start without the placeholders before it, their number, its end without those, their number."""

    @classmethod
    def of(cls, text: str, spans: Sequence[Span]) -> _Shape:
        found = list(_PLACE.finditer(text))
        cuts = [0, *(position for match in found for position in match.span()), len(text)]
        parts = [text[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        borders = []
        for span in spans:
            for position in span:
                passed = [m for m in found if m.end() <= position]
                borders += [position - sum(m.end() - m.start() for m in passed), len(passed)]
        grouped = tuple(zip(*[iter(borders)] * 4, strict=True))
        return cls(tuple(parts), tuple(int(m[1]) for m in found), grouped)

    def spans(self, contents: Sequence[str], text: str) -> list[Span] | None:
        """Spans in the text of a conversation with these contents; ``None`` if it is another text."""
        filling = [contents[index] for index in self.filled]
        joined = [part for pair in zip(self.parts, filling, strict=False) for part in pair]
        if "".join([*joined, self.parts[-1]]) != text:
            return None
        shift = [0, *accumulate(map(len, filling))]
        return [(start + shift[a], end + shift[b]) for start, a, end, b in self.borders]


def _without(text: str, beginning: str) -> str | None:
    """What follows a beginning, which may have a blank more; ``None`` if the text begins in another way."""
    beginning = beginning if text.startswith(beginning) else beginning.rstrip()
    return text[len(beginning) :] if text.startswith(beginning) else None
