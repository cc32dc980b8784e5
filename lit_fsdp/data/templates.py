"""Conversations to token ids with a mask that is exact to the token: what the assistant says, and its end of turn.

A template with ``{% generation %}`` marks says itself what the assistant says. For others the mask is derived: each
assistant turn is rendered once more with a placeholder as its content, which shows where the content begins and
ends, whatever the template does to other turns. Every step is checked against the full text; a template that does
something else is refused, never unmasked in silence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lit_fsdp.errors import ConfigError, DataError

Message = dict[str, Any]

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PLACEHOLDER = "qzxPLACEHOLDERxzq"


@dataclass(frozen=True)
class Encoded:
    """One conversation as tokens, before truncation."""

    input_ids: np.ndarray
    """int32, shape (T,)."""
    supervised: np.ndarray
    """bool, shape (T,); never true for the first token, which nothing predicts."""


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
        found = template or tokenizer.chat_template
        if isinstance(found, dict):
            found = found.get("default")
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
        self.has_marks = bool(_MARK.search(self.text))
        self._special = {str(token) for token in tokenizer.added_tokens_encoder}

    def encode(self, conversations: Sequence[list[Message]], places: Sequence[str]) -> list[Encoded]:
        """Tokens and masks of many conversations; ``places`` name them in errors.

        Raises:
            DataError: The template fails on a row, or its text cannot be marked exactly.
        """
        texts = [self._render(messages, place) for messages, place in zip(conversations, places, strict=True)]
        spans = [
            self._marked_spans(messages, place) if self.has_marks else self._spans(messages, text, place)
            for messages, text, place in zip(conversations, texts, places, strict=True)
        ]
        # The template has written BOS and EOS already where they belong.
        tokens = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        pairs = zip(tokens["input_ids"], tokens["offset_mapping"], spans, places, strict=True)
        return [self._mask(ids, offsets, wanted, place) for ids, offsets, wanted, place in pairs]

    def _render(self, messages: list[Message], place: str, generation_prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, chat_template=self.text, tokenize=False, add_generation_prompt=generation_prompt
                )
            )
        except Exception as error:  # Jinja's errors, and whatever a template raises
            raise DataError(f"{place}: the chat template refuses it ({error})") from error

    def _turns(self, messages: list[Message]) -> list[int]:
        """Indices of the assistant turns that are learnt."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return turns[-1:] if self.supervise == "last" else turns

    def _marked_spans(self, messages: list[Message], place: str) -> list[tuple[int, int]]:
        """Character spans between the template's own marks, one per assistant turn."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            _, indices = render_jinja_template(
                [messages],
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise DataError(f"{place}: the chat template refuses it ({error})") from error
        spans = [(int(start), int(end)) for start, end in indices[0]]
        return spans[-1:] if self.supervise == "last" else spans

    def _spans(self, messages: list[Message], text: str, place: str) -> list[tuple[int, int]]:
        """Character spans of the assistant's turns, each from the generation prompt to the end of turn."""
        if _PLACEHOLDER in text:
            raise DataError(f"{place}: the row contains the word {_PLACEHOLDER}, by which turns are found")
        found = []
        for index in self._turns(messages):
            turn = {**messages[index], "content": _PLACEHOLDER}
            probe = self._render([*messages[:index], turn, *messages[index + 1 :]], place)
            before, seen, after = probe.partition(_PLACEHOLDER)
            fits = seen and text.startswith(before) and text.endswith(after) and len(before) + len(after) <= len(text)
            content = messages[index]["content"]
            end = len(text) - len(after)
            if not fits or (
                content.strip() and content.strip() not in text[len(before) : end] and not _thinks(content)
            ):
                raise DataError(
                    f"{place}: the chat template does not show assistant turn {index} in one piece, so that it cannot be "
                    "marked\n  fix:     give data.chat_template with {% generation %} … {% endgeneration %} around it"
                )
            start = self._start(messages, index, before, place)
            found.append((start, end + len(self._end_mark(messages, index, turn, after, place))))
        return found

    def _start(self, messages: list[Message], index: int, before: str, place: str) -> int:
        """Where the model takes over: after the generation prompt, which may end before the content begins."""
        if index == 0:
            return len(before)
        prompt = self._render(messages[:index], place, generation_prompt=True)
        return len(prompt) if before.startswith(prompt) else len(before)

    def _end_mark(self, messages: list[Message], index: int, turn: Message, after: str, place: str) -> str:
        """The text after the content up to the special token that ends the turn; empty if the template has none.

        It is what follows when the conversation ends here, so that the header of a next turn is never taken for it.
        """
        alone = self._render([*messages[:index], turn], place).partition(_PLACEHOLDER)[2]
        for match in re.finditer(r"\S+", alone):
            special = next((s for s in self._special if s and alone.startswith(s, match.start())), None)
            mark = alone[: match.start() + len(special)] if special else ""
            return mark if after.startswith(mark) else ""
        return ""

    def _mask(
        self, ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]], place: str
    ) -> Encoded:
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        supervised = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            inside = (starts >= start) & (ends <= end) & (ends > starts)
            across = (starts < end) & (ends > start) & ~inside & (ends > starts)
            if across.any():
                token = self.tokenizer.convert_ids_to_tokens(int(ids[int(across.argmax())]))
                raise DataError(
                    f"{place}: token {token!r} lies across the border of an assistant turn, so that the mask would not "
                    "be exact\n  fix:     give data.chat_template with a line break or special token between the turns"
                )
            supervised |= inside
        supervised[:1] = False
        return Encoded(np.array(ids, dtype=np.int32), supervised)


def _thinks(content: str) -> bool:
    """Whether templates for reasoning models may drop a part of this content."""
    return "</think>" in content
