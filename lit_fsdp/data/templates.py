"""Conversations to token ids with a mask that is exact to the token: what the assistant says, and its end of turn.

A template with ``{% generation %}`` marks says itself what the assistant says. For others the mask is derived. A turn
begins where the generation prompt of the conversation before it ends: there the model takes over. It ends where the
text agrees again with the same conversation rendered with a placeholder as this turn, whatever the template does to
other turns; the special token that follows belongs to it, as the model has to emit it to stop. Every step is checked
against the full text; a template that does something else is refused, never unmasked in silence.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

from lit_fsdp.data.formats import Conversation, Message
from lit_fsdp.data.masks import Encoded, Span, SpanEncoder
from lit_fsdp.errors import ConfigError, DataError

_log = logging.getLogger(__name__)
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIX = "give data.chat_template with {% generation %} … {% endgeneration %} around what the assistant says"


class ChatTemplate:
    """Renders conversations with one tokenizer and template.

    Args:
        tokenizer: A fast tokenizer of transformers.
        template: Jinja text; ``None`` for the tokenizer's own.
        supervise: Loss on ``all`` assistant turns or on the ``last``.

    Raises:
        ConfigError: There is no template, or the tokenizer does not tell where its tokens lie in the text.
    """

    def __init__(self, tokenizer: Any, template: str | None, supervise: Literal["all", "last"] = "all") -> None:
        self.tokenizer, self.supervise = tokenizer, supervise
        own = tokenizer.chat_template
        found = template or (own.get("default") if isinstance(own, dict) else own)
        if not found:
            raise ConfigError(
                "data.chat_template",
                "null, and the tokenizer has no chat template of its own",
                "a file with a Jinja chat template",
                "set data.chat_template: template.jinja, or model.tokenizer to one with a template",
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "model.tokenizer",
                f"{type(tokenizer).__name__}, which does not tell where its tokens lie in the text",
                "a fast tokenizer (one with tokenizer.json)",
                "name a folder or hub repository with a tokenizer.json",
            )
        self.text = str(found)
        self.encoder = SpanEncoder(tokenizer)
        self._has_marks = bool(_MARK.search(self.text))
        self._special = {str(token): int(number) for token, number in tokenizer.added_tokens_encoder.items() if token}
        self._warned = False

    def encode(self, conversations: Sequence[Conversation], places: Sequence[str]) -> list[Encoded]:
        """Tokens and masks of many conversations; ``places`` name them in errors.

        Raises:
            DataError: The template fails on a row, or its text cannot be marked exactly.
        """
        marked = [self._marked(talk, place) for talk, place in zip(conversations, places, strict=True)]
        # The template has written BOS and EOS already where they belong, so nothing is added.
        encoded = self.encoder.encode([text for text, _ in marked], [spans for _, spans in marked], places)
        for row, place in zip(encoded, places, strict=True):
            self._warn_of_no_end(row, place)
        return encoded

    def _marked(self, talk: Conversation, place: str) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans in it that are learnt."""
        turns = [i for i, message in enumerate(talk.messages) if message["role"] == "assistant"]
        if self._has_marks:
            text, spans = self._render(talk, place, marks=True)
            self._check_marks(talk, turns, text, spans, place)
        else:
            text, _ = self._render(talk, place)
            wanted = turns if self.supervise == "all" else turns[-1:]
            spans = [self._span(talk, index, text, place) for index in wanted]
        try:
            text.encode()
        except UnicodeEncodeError as error:  # in what formats does not look at, such as the arguments of a call
            raise DataError(f"{place}: half a character (\\u{ord(text[error.start]):04x}), which is no text") from None
        return text, spans if self.supervise == "all" else spans[-1:]

    def _check_marks(self, talk: Conversation, turns: list[int], text: str, spans: list[Span], place: str) -> None:
        """The template's marks hold each turn, and hold a placeholder in its place.

        transformers counts wrongly where the marks are inside a macro or a block that is set, whose text comes later.
        """
        if len(spans) != len(turns):
            raise DataError(
                f"{place}: the chat template marks {len(spans)} of {len(turns)} assistant turns\n  fix:     {_FIX}"
            )
        words = {index: f"qzx{index}xzq" for index in turns}
        others = [{"role": m["role"], "content": words[i]} if i in words else m for i, m in enumerate(talk.messages)]
        probe, marked = self._render(Conversation(others, talk.tools), place, marks=True)
        held = [word in probe[start:end] for word, (start, end) in zip(words.values(), marked, strict=False)]
        shown = [_shows(text[a:b], talk.messages[i]) for i, (a, b) in zip(turns, spans, strict=True)]
        if len(held) != len(turns) or not all(held) or not all(shown):
            raise DataError(
                f"{place}: the chat template's {{% generation %}} marks do not hold what the assistant says\n"
                "  fix:     mark the content and its end of turn, outside any macro, set block or filter"
            )

    def _render(
        self, talk: Conversation, place: str, generation_prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, and the spans between the template's own marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # annotated as returning the text alone
        try:
            texts, spans = render(
                [talk.messages],
                tools=talk.tools,
                chat_template=self.text,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # Jinja's errors, and whatever a template raises
            raise DataError(f"{place}: the chat template refuses it ({' '.join(str(error).split())})") from error
        return texts[0], [(int(start), int(end)) for start, end in (spans[0] if marks else ())]

    def _span(self, talk: Conversation, index: int, text: str, place: str) -> Span:
        """Characters of one assistant turn, from where the model takes over to its end of turn."""
        word = next(w for w in (f"qzx{n}xzq" for n in itertools.count()) if w not in text)
        turn = {"role": "assistant", "content": word}
        messages = talk.messages
        probe = self._text([*messages[:index], turn, *messages[index + 1 :]], talk, place)
        before, seen, after = probe.partition(word)
        start = self._start(talk, index, before, text, place)
        end = len(text) - len(after)
        fits = seen and start is not None and text.endswith(after) and start <= end
        if not fits or start is None or not _shows(text[start:end], messages[index]):
            raise DataError(
                f"{place}: the chat template does not show assistant turn {index} whole and in one piece, so that it "
                f"cannot be marked\n  fix:     {_FIX}"
            )
        return start, end + len(self._end_mark(messages[:index], turn, after, talk, place))

    def _start(self, talk: Conversation, index: int, before: str, text: str, place: str) -> int | None:
        """Where the model takes over; ``None`` if the text is another than expected.

        A template without a generation prompt leaves the header of the turn to whoever asks, so it is not learnt.
        """
        shown = len(before) if text.startswith(before) else None
        if index == 0:
            return shown
        prompt = self._text(talk.messages[:index], talk, place, generation_prompt=True)
        if not text.startswith(prompt):
            return shown
        if shown is None or text[len(prompt) : shown].strip():
            return shown if prompt == self._text(talk.messages[:index], talk, place) else len(prompt)
        return len(prompt)

    def _end_mark(self, earlier: list[Message], turn: Message, after: str, talk: Conversation, place: str) -> str:
        """The text after the content up to the special token that ends the turn; empty if the template has none.

        It is what follows when the conversation ends here, so that the header of a next turn is never taken for it.
        """
        alone = self._text([*earlier, turn], talk, place).partition(turn["content"])[2]
        blanks = len(alone) - len(alone.lstrip())
        special = max((s for s in self._special if alone.startswith(s, blanks)), key=len, default=None)
        mark = alone[: blanks + len(special)] if special else ""
        return mark if after.startswith(mark) else ""

    def _text(self, messages: list[Message], talk: Conversation, place: str, generation_prompt: bool = False) -> str:
        return self._render(Conversation(messages, talk.tools), place, generation_prompt)[0]

    def _warn_of_no_end(self, row: Encoded, place: str) -> None:
        learnt = row.input_ids[row.supervised]
        if len(learnt) and int(learnt[-1]) not in self._special.values() and not self._warned:
            self._warned = True
            _log.warning(
                "%s: after an assistant turn the chat template has no special token that is learnt, so the model does "
                "not learn to stop",
                place,
            )


def _shows(text: str, message: Message) -> bool:
    """Whether a turn's text has its content, but for blanks around it and thoughts, and its calls of tools."""
    content = message["content"].rpartition("</think>")[2].strip()
    calls = message.get("tool_calls") or []
    names = [str(call.get("function", call).get("name", "")) for call in calls]
    return content in text and all(name in text for name in names)
