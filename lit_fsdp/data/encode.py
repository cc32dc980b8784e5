"""Rows of any row format as samples: tokens with a mask, cut to length, or the reason why nothing is left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.chat_template import find_template, no_template
from lit_fsdp.data.formats import (
    Conversation,
    num_alike,
    preference_sides,
    read_prompt,
    read_tokens,
    text_of,
    to_conversation,
)
from lit_fsdp.data.masks import Encoded, Span, SpanEncoder, added_tokens, sample
from lit_fsdp.data.turns import AssistantTurns, Unwritten, supervised_turns
from lit_fsdp.errors import ConfigError, DataError, require

_VERSION = 4
"""Raised with changes here or below that give the same rows other tokens or masks."""
CUT, TOO_LONG = "cut before the assistant's turn", "longer than max_seq_length"
EMPTY, NOTHING_LEFT = "empty", "without a supervised token"


@dataclass(frozen=True)
class EncodedRow:
    """What became of one row."""

    samples: list[Encoded]
    """After truncation; two of a preference, several of a plain text that was split, none of a row that was dropped."""
    truncated: bool
    dropped: str | None
    """Why there is no sample, in a few words that can be counted."""
    unwritten: tuple[str, ...] = ()
    """Roles of texts that the template does not write, ``tools`` for schemas; allowed by ``data.unwritten_text``."""


class RowEncoder:
    """Rows to samples, with one tokenizer, template and data section; can be sent to another process.

    The ids of a conversation are those of ``apply_chat_template``; a text has BOS as the tokenizer puts it, and EOS.
    ``text`` is everything that ids and masks depend on, ``chat_template`` the Jinja text of the template, if any. Ids
    are below ``num_embeddings``, the model's; a tokenizer may have more.

    Raises:
        ConfigError: The tokenizer or the template cannot be used.
    """

    def __init__(self, tokenizer: Any, config: DataConfig, num_embeddings: int | None = None) -> None:
        self._config, self.tokenizer = config, tokenizer
        self._num_ids = num_embeddings or 1 + max(tokenizer.get_vocab().values())
        self._spans = SpanEncoder(tokenizer)
        self._template = find_template(config.chat_template, tokenizer, config.chat_template_kwargs)
        self._turns = AssistantTurns(self._template, tokenizer) if self._template else None
        self.chat_template = self._template.source if self._template else None
        self._prefix, suffix = added_tokens(tokenizer)
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._suffix = suffix if self._eos in suffix else [*suffix, self._eos]
        special = {key: str(value) for key, value in sorted(tokenizer.special_tokens_map.items())}
        made_with = (self._spans.text, self._template.text if self._template else None, self._prefix, suffix, special)
        settings = (config.supervise, config.train_on_prompt, config.truncation, config.max_seq_length)
        self.text = json.dumps([_VERSION, made_with, settings, config.unwritten_text, self._num_ids])

    def encode(
        self, rows: Sequence[Mapping[str, Any]], row_format: RowFormat, locations: Sequence[str]
    ) -> list[EncodedRow]:
        """Samples of some rows, in their order; ``row_format`` is not ``auto``.

        Raises:
            DataError: A row is bad, cannot be marked exactly, or is too long and ``data.truncation`` is error.
            ConfigError: Conversations, and no chat template.
        """
        if row_format == "preference":
            found = self._preferences(rows, locations)
        else:
            whole = self._whole(rows, row_format, locations)
            if row_format == "text":
                split = zip(rows, whole, strict=True)
                found = [self._split(one) if row["text"] else EncodedRow([], False, EMPTY) for row, (one, _) in split]
            else:
                parts = zip(whole, locations, strict=True)
                found = [replace(self._cut(one, location), unwritten=lacks) for (one, lacks), location in parts]
        for encoded, location in zip(found, locations, strict=True):
            for each in encoded.samples:
                self._check_ids(each.input_ids, location)
        return found

    def open_conversation(self, conversation: Conversation, location: str) -> list[int]:
        """Token ids of a conversation up to where the assistant takes over."""
        if self._template is None:
            raise no_template(f"conversations ({location})")
        assert self._turns is not None
        conversation = _without_flags(conversation)
        text, _ = self._template.render(conversation, location, generation_prompt=True)
        self._allowed(self._turns.unwritten(conversation, text, generation_prompt=True), location)
        ids = self._spans.encode([text], [[]], [location])[0][0]
        self._check_ids(ids, location)
        return ids

    def open_text(self, text: str, location: str) -> list[int]:
        """Token ids of a text that goes on: with BOS as the tokenizer puts it, and without EOS."""
        ids = self._spans.encode([text], [[]], [location])[0][0]
        self._check_ids(ids, location)
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def _whole(
        self, rows: Sequence[Mapping[str, Any]], row_format: RowFormat, locations: Sequence[str]
    ) -> list[tuple[Encoded, tuple[str, ...]]]:
        """Rows of one completion as samples of any length, and what the template does not write of each."""
        if row_format == "tokens":
            pairs = zip(rows, locations, strict=True)
            return [(sample(*read_tokens(row, self._num_ids, location)), ()) for row, location in pairs]
        rendered = [self._rendered(row, row_format, at) for row, at in zip(rows, locations, strict=True)]
        texts, spans, lacks, are_documents = zip(*rendered, strict=True)
        marked = self._spans.encode(texts, spans, locations)
        return [(self._closed(*row, one), lack) for row, one, lack in zip(marked, are_documents, lacks, strict=True)]

    def _rendered(
        self, row: Mapping[str, Any], row_format: RowFormat, location: str
    ) -> tuple[str, list[Span], tuple[str, ...], bool]:
        """A row as text, what is supervised of it, what it lacks, and whether it is a document, with BOS and EOS."""
        whole = self._config.train_on_prompt
        if row_format == "text":
            text = text_of(row, "text", location)
            return text, [(0, len(text))], (), True
        plain = read_prompt(row, location) if row_format == "prompt_completion" else None
        if plain:  # which stand as they are, as that is what they mean to a base model
            text = "".join(plain)
            return text, [(0 if whole else len(plain[0]), len(text))], (), True
        if self._turns is None:
            raise no_template(f"{row_format} rows ({location})")
        conversation = to_conversation(row, row_format, location, supervises_prompt=whole)
        wanted = supervised_turns(conversation.messages, self._config.supervise, whole, location)
        text, spans, unwritten = self._turns.find(_without_flags(conversation), wanted, location)
        return text, spans, self._allowed(unwritten, location), False

    def _allowed(self, unwritten: Sequence[Unwritten], location: str) -> tuple[str, ...]:
        """Roles of texts that the template does not write, or DataError."""
        if unwritten and self._config.unwritten_text == "error":
            names = ", ".join(name for name, _ in unwritten)
            raise DataError(
                f"{location}: the chat template does not write {names}, or not whole\n"
                "  allowed: rows whose texts it writes; others with data.unwritten_text: allow\n"
                "  fix:     set a template that does, such as data.chat_template: chatml, or data.on_bad_row: drop"
            )
        return tuple(kind for _, kind in unwritten)

    def _check_ids(self, ids: Sequence[int] | np.ndarray, location: str) -> None:
        if (highest := int(np.max(ids, initial=0))) >= self._num_ids:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise DataError(
                f"{location}: token {token!r} ({highest}), which has no embedding in the model\n"
                f"  allowed: token ids 0 to {self._num_ids - 1}\n"
                f"  fix:     leave the row out (data.on_bad_row: drop), or write model.add_tokens: [{token!r}]"
            )

    def _preferences(self, rows: Sequence[Mapping[str, Any]], locations: Sequence[str]) -> list[EncodedRow]:
        """Two samples per row, the chosen completion first; none where one of them has nothing left."""
        if self._config.train_on_prompt:
            allowed = "false for rows of chosen and rejected, which are compared by their completions"
            raise ConfigError("data.train_on_prompt", "true", allowed, "drop it")
        sides = [side for row, at in zip(rows, locations, strict=True) for side in preference_sides(row, at)]
        names = [f"{location}: {name}" for location in locations for name in ("chosen", "rejected")]
        whole, found = self._whole(sides, "prompt_completion", names), []
        for i in range(0, len(sides), 2):
            (one, lacks), (other, more) = whole[i : i + 2]
            chosen, rejected = self._cut(one, names[i], other), self._cut(other, names[i + 1], one)
            is_cut, dropped = chosen.truncated or rejected.truncated, chosen.dropped or rejected.dropped
            found.append(
                EncodedRow([] if dropped else chosen.samples + rejected.samples, is_cut, dropped, lacks or more)
            )
        return found

    def _closed(self, ids: list[int], mask: np.ndarray, is_document: bool) -> Encoded:
        """A sample of the tokens of a row, of a document with BOS and EOS, once."""
        if not is_document:
            return sample(ids, ~mask if self._config.train_on_prompt else mask)
        allowed, fix = "one with eos_token, which ends every document", "add eos_token to its tokenizer_config.json"
        require(self._eos is not None, "model.tokenizer", "a tokenizer without an EOS token", allowed, fix)
        before = len(self._prefix)
        if ids[:before] == self._prefix:
            mask[:before] = False
        else:
            ids, mask = [*self._prefix, *ids], np.concatenate([np.zeros(before, bool), mask])
        after = [] if ids[-1:] == [self._eos] else self._suffix
        return sample([*ids, *after], np.concatenate([mask, np.ones(len(after), bool)]))

    def _split(self, row: Encoded) -> EncodedRow:
        """A document in pieces of at most ``max_seq_length`` without overlap; the first token of each is no target.

        A last piece of one token, which could not be supervised, takes one over from the piece before it.
        """
        total, longest = len(row.input_ids), self._config.max_seq_length
        borders = [*range(0, total, longest), total]
        if len(borders) > 2 and borders[-1] - borders[-2] == 1 and longest > 2:
            borders[-2] -= 1
        pieces = [row.part(start, end) for start, end in pairwise(borders)]
        samples = [piece for piece in pieces if piece.supervised.any()]
        return EncodedRow(samples, len(samples) < len(pieces), None if samples else NOTHING_LEFT)

    def _cut(self, whole: Encoded, location: str, other: Encoded | None = None) -> EncodedRow:
        """The row within ``max_seq_length``; of a longer one that part that ``data.truncation`` leaves.

        Of a preference, whose ``other`` side has the same prompt, both sides lose the same tokens of it.
        """
        row, other = _trimmed(whole), _trimmed(other or whole)
        if not len(row.input_ids):
            return EncodedRow([], False, NOTHING_LEFT)
        length, limit, policy = len(row.input_ids), self._config.max_seq_length, self._config.truncation
        if max(length, len(other.input_ids) if policy == "start" else 0) <= limit:
            return EncodedRow([row], False, None)
        if policy == "error":
            raise DataError(
                f"{location}: {length} tokens\n  allowed: data.max_seq_length {limit}, as data.truncation is error\n"
                f"  fix:     set data.max_seq_length: {length}, or data.truncation: drop"
            )
        if policy == "drop":
            return EncodedRow([], False, TOO_LONG)
        kept = row.part(0, limit) if policy == "end" else self._end_of(row, other, limit)
        return EncodedRow([kept], True, None) if kept.supervised.any() else EncodedRow([], True, CUT)

    def _end_of(self, row: Encoded, other: Encoded, limit: int) -> Encoded:
        """The last tokens of a row, behind the BOS that it began with; what is alike in both by the longer one."""
        ids, others = row.input_ids.tolist(), other.input_ids.tolist()
        alike = num_alike(ids, others)
        kept = self._prefix if ids[: len(self._prefix)] == self._prefix else []
        if ids[0] == self._bos and ids[:alike].count(self._bos) == 1:  # the template's, and no mark of a turn
            kept = [self._bos]
        over = len(kept) - limit
        start = max(len(ids) + over, min(len(others) + over, alike))
        return sample([*kept, *ids[start:]], np.concatenate([np.zeros(len(kept), bool), row.supervised[start:]]))


def _trimmed(row: Encoded) -> Encoded:
    """Without what follows the last supervised token, such as a line break after the last turn: it changes no loss."""
    end = int(np.max(np.flatnonzero(row.supervised), initial=-1)) + 1
    return Encoded(row.input_ids[:end], row.supervised[:end])


def _without_flags(conversation: Conversation) -> Conversation:
    """The conversation as templates see it."""
    clean = [{key: value for key, value in message.items() if key != "train"} for message in conversation.messages]
    return replace(conversation, messages=clean)
