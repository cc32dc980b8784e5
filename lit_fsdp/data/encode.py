"""Rows of any format as samples: tokens with a mask, cut to length, or the reason why nothing is left."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.cells import text_of
from lit_fsdp.data.formats import Conversation, check_columns, sides_of, to_conversation
from lit_fsdp.data.masks import Encoded, SpanEncoder
from lit_fsdp.data.named import find_template, no_template
from lit_fsdp.data.plain import read_text
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.data.text import TextEncoder, added_tokens, split
from lit_fsdp.errors import DataError

_log = logging.getLogger(__name__)
_VERSION = 1
"""Raised with changes here or below that give the same rows other tokens or masks."""
NO_TURN, CUT = "without an assistant turn", "cut before the assistant's turn"
TOO_LONG, EMPTY, NOTHING_LEFT = "longer than max_seq_length", "empty", "without a token to learn"


@dataclass(frozen=True)
class EncodedRow:
    """What became of one row."""

    samples: list[Encoded]
    """After truncation; several only for a plain text that was split, none if the row was dropped."""
    truncated: bool
    """Whether tokens were cut off."""
    dropped: str | None
    """Why there is no sample, in a few words that can be counted."""


class RowEncoder:
    """Rows to samples, with one tokenizer, template and data section; can be sent to another process.

    Args:
        tokenizer: A fast tokenizer of transformers.
        config: What is learnt and how long a sample may be.
        template: Jinja text in place of what ``data.chat_template`` names.
        spans: The same tokenizer as one that marks spans, which takes a while to make and can be shared.

    Attributes:
        text: Everything that ids and masks depend on, for fingerprints.
        chat_template: Jinja text of the template that conversations are rendered with, or ``None``.

    Raises:
        ConfigError: The tokenizer or the template cannot be used.
    """

    def __init__(
        self, tokenizer: Any, config: DataConfig, template: str | None = None, spans: SpanEncoder | None = None
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._spans = spans or SpanEncoder(tokenizer)
        self._texts = TextEncoder(tokenizer, self._spans)
        found = template or find_template(config.chat_template, tokenizer)
        options = (config.supervise, config.train_on_prompt, self._spans)
        self._chat = ChatTemplate(tokenizer, found, *options) if found else None
        self.chat_template = self._chat.source if self._chat else None
        settings = {
            "version": _VERSION,
            "tokenizer": self._spans.text,
            "template": self._chat.text if self._chat else None,
            "added": added_tokens(tokenizer),
            "special": {key: str(value) for key, value in tokenizer.special_tokens_map.items()},
            "supervise": config.supervise,
            "train_on_prompt": config.train_on_prompt,
            "truncation": config.truncation,
            "max_seq_length": config.max_seq_length,
        }
        self.text = json.dumps(settings, sort_keys=True)
        self._said = False

    def encode(self, rows: Sequence[Mapping[str, Any]], form: RowFormat, places: Sequence[str]) -> list[EncodedRow]:
        """Samples of some rows, in their order.

        Args:
            rows: Column values under our names.
            form: Not ``auto``.
            places: Where each row stands, for errors.

        Raises:
            DataError: A row is bad, cannot be marked exactly, or is too long and ``data.truncation`` is error.
            ConfigError: Conversations, and no chat template.
        """
        if form == "text":
            texts = [read_text(row, place) for row, place in zip(rows, places, strict=True)]
            found = self._texts.encode(texts, [0] * len(texts), places)
            return [self._split(row, text) for row, text in zip(found, texts, strict=True)]
        if form == "tokens":
            found = [self._texts.tokens(row, place) for row, place in zip(rows, places, strict=True)]
            return [self._cut(row, place, NOTHING_LEFT) for row, place in zip(found, places, strict=True)]
        if self._chat is None:
            return self._bare(rows, form, places)
        whole = self._config.train_on_prompt
        talks = [to_conversation(r, form, place, learns_prompt=whole) for r, place in zip(rows, places, strict=True)]
        found = self._chat.encode(talks, places)
        return [self._cut(row, place, _nothing_in(talk)) for row, talk, place in zip(found, talks, places, strict=True)]

    def _bare(self, rows: Sequence[Mapping[str, Any]], form: RowFormat, places: Sequence[str]) -> list[EncodedRow]:
        """Prompts and completions as they stand, which is what they mean to a base model."""
        if form != "prompt_completion":
            raise no_template(f"{form} rows", self._tokenizer)
        for row, place in zip(rows, places, strict=True):
            check_columns(row, form, place)
        strange = [place for row, place in zip(rows, places, strict=True) if not _is_bare(row)]
        if strange:
            raise no_template(f"messages, a system prompt or tools ({strange[0]})", self._tokenizer)
        if not self._said:
            self._said = True
            _log.info(
                "%s: no chat template, so that prompt, completion and EOS are put together as they stand", places[0]
            )
        sides = [
            [text_of(row[side], f"{place}: {side}") for side in ("prompt", "completion")]
            for row, place in zip(rows, places, strict=True)
        ]
        heads = [0 if self._config.train_on_prompt else len(prompt) for prompt, _ in sides]
        found = self._texts.encode(["".join(both) for both in sides], heads, places)
        return [self._cut(row, place, NOTHING_LEFT) for row, place in zip(found, places, strict=True)]

    def _split(self, row: Encoded, text: str) -> EncodedRow:
        if not text:
            return EncodedRow([], False, EMPTY)
        pieces = split(row, self._config.max_seq_length)
        samples = [piece for piece in pieces if piece.supervised.any()]
        return EncodedRow(samples, len(samples) < len(pieces), None if samples else NOTHING_LEFT)

    def _cut(self, row: Encoded, place: str, nothing: str) -> EncodedRow:
        """The row within ``max_seq_length``; of a longer one that part that ``data.truncation`` leaves."""
        if not row.supervised.any():
            return EncodedRow([], False, nothing)
        # What follows the last token that is learnt, such as the line break after the last turn, changes no loss.
        row = row.part(0, int(np.flatnonzero(row.supervised)[-1]) + 1)
        length, limit, policy = len(row.input_ids), self._config.max_seq_length, self._config.truncation
        if length <= limit:
            return EncodedRow([row], False, None)
        if policy == "error":
            raise DataError(
                f"{place}: {length} tokens\n  allowed: data.max_seq_length {limit}, as data.truncation is error\n"
                f"  fix:     set data.max_seq_length: {length}, or data.truncation: drop"
            )
        if policy == "drop":
            return EncodedRow([], False, TOO_LONG)
        kept = row.part(0, limit) if policy == "end" else self._texts.end_of(row, limit)
        return EncodedRow([kept], True, None) if kept.supervised.any() else EncodedRow([], True, CUT)


def _nothing_in(talk: Conversation) -> str:
    """Why nothing of a conversation is learnt."""
    return NOTHING_LEFT if any(message["role"] == "assistant" for message in talk.messages) else NO_TURN


def _is_bare(row: Mapping[str, Any]) -> bool:
    return not any(isinstance(side, (list, tuple)) for side in sides_of(row)) and not (
        row.get("system") or row.get("tools")
    )
