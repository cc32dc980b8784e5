"""Rows of any row format as samples: tokens with a mask, cut to length, or the reason why nothing is left."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.chat_template import TODAY, find_template, no_template
from lit_fsdp.data.formats import (
    Conversation,
    is_plain,
    preference_sides,
    read_prompt,
    read_text,
    read_tokens,
    text_of,
    to_conversation,
)
from lit_fsdp.data.masks import Encoded, Marked, Span, SpanEncoder, added_tokens, sample
from lit_fsdp.data.turns import AssistantTurns, supervised_turns
from lit_fsdp.errors import ConfigError, DataError, require

_log = logging.getLogger(__name__)
_VERSION = 2
"""Raised with changes here or below that give the same rows other tokens or masks."""
NO_TURN, CUT = "without an assistant turn", "cut before the assistant's turn"
TOO_LONG, EMPTY, NOTHING_LEFT = "longer than max_seq_length", "empty", "without a supervised token"


@dataclass(frozen=True)
class EncodedRow:
    """What became of one row."""

    samples: list[Encoded]
    """After truncation; two of a preference, several of a plain text that was split, none of a row that was dropped."""
    truncated: bool
    dropped: str | None
    """Why there is no sample, in a few words that can be counted."""


class RowEncoder:
    """Rows to samples, with one tokenizer, template and data section; can be sent to another process.

    The ids of a conversation are those of ``apply_chat_template``; a text has BOS as the tokenizer puts it, and EOS.

    Attributes:
        text: Everything that ids and masks depend on, for fingerprints.
        chat_template: Jinja text of the template that conversations are rendered with, or ``None``.

    Raises:
        ConfigError: The tokenizer or the template cannot be used.
    """

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        self._config, self.tokenizer = config, tokenizer
        self._spans = SpanEncoder(tokenizer)
        self._template = find_template(config.chat_template, tokenizer, config.chat_template_kwargs)
        self._turns = AssistantTurns(self._template, tokenizer) if self._template else None
        self.chat_template = self._template.source if self._template else None
        self._special = set(tokenizer.added_tokens_encoder.values())
        self._prefix, suffix = added_tokens(tokenizer)
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._suffix = suffix if self._eos in suffix else [*suffix, self._eos]
        settings = {
            "version": _VERSION,
            "tokenizer": self._spans.text,
            "template": self._template.text if self._template else None,
            "added": (self._prefix, suffix),
            "special": {key: str(value) for key, value in tokenizer.special_tokens_map.items()},
            "supervise": config.supervise,
            "train_on_prompt": config.train_on_prompt,
            "truncation": config.truncation,
            "max_seq_length": config.max_seq_length,
        }
        self.text = json.dumps(settings, sort_keys=True)
        self._warned: set[str] = set()
        if self._template and "strftime_now" in self._template.text:
            self._warn(
                "the chat template writes today's date, which is taken to be %s in every run", f"{TODAY:%d %B %Y}"
            )

    def encode(
        self, rows: Sequence[Mapping[str, Any]], row_format: RowFormat, locations: Sequence[str]
    ) -> list[EncodedRow]:
        """Samples of some rows, in their order; ``row_format`` is not ``auto``.

        Raises:
            DataError: A row is bad, cannot be marked exactly, or is too long and ``data.truncation`` is error.
            ConfigError: Conversations, and no chat template.
        """
        pairs = list(zip(rows, locations, strict=True))
        if row_format == "text":
            texts = [read_text(row, location) for row, location in pairs]
            found = self._documents(texts, [0] * len(texts), locations)
            return [self._split(row, text) for row, text in zip(found, texts, strict=True)]
        if row_format == "tokens":
            return [self._cut(self._tokens(row, location), location, NOTHING_LEFT) for row, location in pairs]
        if row_format == "preference":
            return self._preferences(pairs)
        if row_format == "prompt_completion":
            plain = [is_plain(row) for row in rows]
            if all(plain):
                return self._prompts(pairs)
            if any(plain):
                return [self.encode([row], row_format, [location])[0] for row, location in pairs]
        whole = self._config.train_on_prompt
        conversations = [to_conversation(row, row_format, location, supervises_prompt=whole) for row, location in pairs]
        found = self._conversations(conversations, row_format, locations)
        reasons = [_nothing_in(conversation) for conversation in conversations]
        return [self._cut(*each) for each in zip(found, locations, reasons, strict=True)]

    def open_conversation(self, conversation: Conversation, location: str) -> list[int]:
        """Token ids of a conversation up to where the assistant takes over."""
        if self._template is None:
            raise no_template(f"conversations ({location})", self.tokenizer)
        clean = [{key: value for key, value in m.items() if key != "train"} for m in conversation.messages]
        text, _ = self._template.render(replace(conversation, messages=clean), location, generation_prompt=True)
        return self._spans.encode([text], [[]], [location])[0][0]

    def open_text(self, text: Any, location: str) -> list[int]:
        """Token ids of a text that goes on: with BOS as the tokenizer puts it, and without EOS."""
        ids = self._spans.encode([text_of(text, location)], [[]], [location])[0][0]
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def _conversations(
        self, conversations: Sequence[Conversation], row_format: RowFormat, locations: Sequence[str]
    ) -> list[Encoded]:
        marked = [
            self._marked(conversation, row_format, location)
            for conversation, location in zip(conversations, locations, strict=True)
        ]
        found = self._spans.encode([text for text, _ in marked], [spans for _, spans in marked], locations)
        return [self._checked(row, location) for row, location in zip(found, locations, strict=True)]

    def _marked(self, conversation: Conversation, row_format: RowFormat, location: str) -> tuple[str, list[Span]]:
        """The text of a conversation and the spans that are supervised; with train_on_prompt those that are not."""
        if self._turns is None:
            raise no_template(f"{row_format} rows ({location})", self.tokenizer)
        if self._config.train_on_prompt:
            unsupervised = [i for i, message in enumerate(conversation.messages) if message.get("train") is False]
            wanted = [i for i in unsupervised if conversation.messages[i]["role"] == "assistant"]
            if wanted != unsupervised:
                self._warn(
                    "%s: data.train_on_prompt supervises a message of another role that says train: false", location
                )
        else:
            wanted = supervised_turns(conversation.messages, self._config.supervise, location)
        clean = [{key: value for key, value in m.items() if key != "train"} for m in conversation.messages]
        return self._turns.find(replace(conversation, messages=clean), wanted, location)

    def _checked(self, row: Marked, location: str) -> Encoded:
        """The row with the mask that is asked for, and a warning where inference would not do as training does."""
        ids, mask = row
        if self._prefix and self._prefix[0] not in ids:
            self._warn("%s: the chat template writes no BOS, which the tokenizer puts before other texts", location)
        if self._config.train_on_prompt:
            mask = ~mask
        elif mask.any() and ids[int(mask.nonzero()[0][-1])] not in self._special:
            self._warn(
                "%s: no special token ends an assistant turn, so the model does not learn to stop there", location
            )
        return sample(ids, mask)

    def _prompts(self, pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[EncodedRow]:
        """Prompts and completions in plain text as they stand, which is what they mean to a base model."""
        sides = [read_prompt(row, location) for row, location in pairs]
        heads = [0 if self._config.train_on_prompt else len(prompt) for prompt, _ in sides]
        locations = [location for _, location in pairs]
        found = self._documents([prompt + completion for prompt, completion in sides], heads, locations)
        return [self._cut(row, location, NOTHING_LEFT) for row, location in zip(found, locations, strict=True)]

    def _preferences(self, pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[EncodedRow]:
        """Two samples per row, chosen and rejected, each the prompt and a completion; none where one has nothing left.

        What the two have in common is supervised in both or in neither.
        """
        if self._config.train_on_prompt:
            allowed = "false for rows of chosen and rejected, which are compared by their completions"
            raise ConfigError("data.train_on_prompt", "true", allowed, "drop it")
        sides = [side for row, location in pairs for side in preference_sides(row, location)]
        locations = [f"{location}: {name}" for _, location in pairs for name in ("chosen", "rejected")]
        found = iter(self.encode(sides, "prompt_completion", locations))
        return [_pair(chosen, rejected) for chosen, rejected in zip(found, found, strict=True)]

    def _documents(self, texts: Sequence[str], heads: Sequence[int], locations: Sequence[str]) -> list[Encoded]:
        """Texts with BOS and EOS, of which the first ``heads`` characters are not supervised."""
        allowed, fix = "one with eos_token, which ends every document", "add eos_token to its tokenizer_config.json"
        require(self._eos is not None, "model.tokenizer", "a tokenizer without an EOS token", allowed, fix)
        spans: list[list[Span]] = [[(start, len(text))] for text, start in zip(texts, heads, strict=True)]
        return [self._closed(row) for row in self._spans.encode(texts, spans, locations)]

    def _closed(self, row: Marked) -> Encoded:
        """With BOS and EOS, once."""
        ids, mask = row
        before, after = self._prefix, self._suffix
        if before and ids[: len(before)] == before:
            mask[: len(before)] = False
            before = []
        if ids[-1:] == [self._eos]:
            after = []
        supervised = np.concatenate([np.zeros(len(before), bool), mask, np.ones(len(after), bool)])
        return sample([*before, *ids, *after], supervised)

    def _tokens(self, row: Mapping[str, Any], location: str) -> Encoded:
        """A row of token ids with its mask; without one all but the first are supervised."""
        ids, mask = read_tokens(row, location)
        most = len(self.tokenizer) - 1
        bad = ids[ids > most]
        if len(bad):
            raise DataError(
                f"{location}: token id {bad[0]}\n  allowed: 0 to {most}, which the tokenizer has\n"
                "  fix:     name the tokenizer that the rows were made with"
            )
        return sample(ids, np.ones(len(ids), dtype=bool) if mask is None else mask)

    def _split(self, row: Encoded, text: str) -> EncodedRow:
        """A document in pieces of at most ``max_seq_length`` without overlap; the first token of each is no target.

        A last piece of one token, which could not be supervised, takes one over from the piece before it.
        """
        if not text:
            return EncodedRow([], False, EMPTY)
        total, longest = len(row.input_ids), self._config.max_seq_length
        borders = [*range(0, total, longest), total]
        if len(borders) > 2 and borders[-1] - borders[-2] == 1 and longest > 2:
            borders[-2] -= 1
        pieces = [row.part(start, end) for start, end in pairwise(borders)]
        samples = [piece for piece in pieces if piece.supervised.any()]
        return EncodedRow(samples, len(samples) < len(pieces), None if samples else NOTHING_LEFT)

    def _cut(self, row: Encoded, location: str, nothing: str) -> EncodedRow:
        """The row within ``max_seq_length``; of a longer one that part that ``data.truncation`` leaves."""
        if not row.supervised.any():
            return EncodedRow([], False, nothing)
        # What follows the last supervised token, such as the line break after the last turn, changes no loss.
        row = row.part(0, int(np.flatnonzero(row.supervised)[-1]) + 1)
        length, limit, policy = len(row.input_ids), self._config.max_seq_length, self._config.truncation
        if length <= limit:
            return EncodedRow([row], False, None)
        if policy == "error":
            raise DataError(
                f"{location}: {length} tokens\n  allowed: data.max_seq_length {limit}, as data.truncation is error\n"
                f"  fix:     set data.max_seq_length: {length}, or data.truncation: drop"
            )
        if policy == "drop":
            return EncodedRow([], False, TOO_LONG)
        kept = row.part(0, limit) if policy == "end" else self._end_of(row, limit)
        return EncodedRow([kept], True, None) if kept.supervised.any() else EncodedRow([], True, CUT)

    def _end_of(self, row: Encoded, limit: int) -> Encoded:
        """The last tokens of a row, behind the BOS that it began with."""
        ids = row.input_ids.tolist()
        kept = self._prefix if ids[: len(self._prefix)] == self._prefix else []
        if ids[0] == self._bos and ids.count(self._bos) == 1:  # the template's, and no mark of a turn
            kept = [self._bos]
        kept = kept if len(kept) < limit else []
        start = len(ids) - limit + len(kept)
        return sample([*kept, *ids[start:]], np.concatenate([np.zeros(len(kept), bool), row.supervised[start:]]))

    def _warn(self, text: str, *values: str) -> None:
        """Once, whatever the row."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *values)


def _pair(chosen: EncodedRow, rejected: EncodedRow) -> EncodedRow:
    is_cut, dropped = chosen.truncated or rejected.truncated, chosen.dropped or rejected.dropped
    return EncodedRow([] if dropped else chosen.samples + rejected.samples, is_cut, dropped)


def _nothing_in(conversation: Conversation) -> str:
    """Why nothing of a conversation is supervised."""
    return NOTHING_LEFT if any(message["role"] == "assistant" for message in conversation.messages) else NO_TURN
