"""Rows of any row format as samples: tokens with a mask, cut to length, or the reason why nothing is left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.chat_template import find_template, no_template
from lit_fsdp.data.formats import Conversation, preference_sides, read_prompt, read_tokens, text_of, to_conversation
from lit_fsdp.data.masks import Encoded, Span, SpanEncoder, added_tokens, sample
from lit_fsdp.data.turns import AssistantTurns, supervised_turns
from lit_fsdp.errors import ConfigError, DataError, require

_VERSION = 5
"""Raised with changes here or below that give the same rows other tokens or masks."""
CUT, TOO_LONG = "cut before the assistant's turn", "longer than max_seq_length"
EMPTY, NOTHING_LEFT = "empty", "without a supervised token"
_SPLITS_TURNS = ("data.split_turns", "true")
_Part = tuple[str, list[Span], bool]


@dataclass(frozen=True)
class EncodedRow:
    """What became of one row."""

    samples: list[Encoded]
    """After truncation; two of a preference, several of a plain text or a conversation that was split, or none."""
    truncated: int
    """Samples of it that were cut."""
    dropped: str | None
    """Why there is no sample, in a few words that can be counted."""
    lost: tuple[str, ...] = ()
    """Why there is none of some turns of ``data.split_turns``, where there are samples of others."""


class RowEncoder:
    """Rows to samples, with one tokenizer, template and data section; can be sent to another process.

    The ids of a conversation are those of ``apply_chat_template``; a text has BOS as the tokenizer puts it, and EOS.
    ``text`` is everything that ids and masks depend on, ``chat_template`` the Jinja text of the template, if any.

    Raises:
        ConfigError: The tokenizer or the template cannot be used.
    """

    def __init__(self, tokenizer: Any, config: DataConfig) -> None:
        self._config, self.tokenizer = config, tokenizer
        self._spans = SpanEncoder(tokenizer)
        self._template = find_template(config.chat_template, tokenizer, config.chat_template_kwargs)
        self._turns = AssistantTurns(self._template, tokenizer) if self._template else None
        self.chat_template = self._template.source if self._template else None
        self._prefix, suffix = added_tokens(tokenizer)
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._suffix = suffix if self._eos in suffix else [*suffix, self._eos]
        special = {key: str(value) for key, value in sorted(tokenizer.special_tokens_map.items())}
        made_with = (self._spans.text, self._template.text if self._template else None, self._prefix, suffix, special)
        names = ("supervise", "split_turns", "train_on_prompt", "truncation", "max_seq_length")
        settings = [getattr(config, name) for name in names]
        self.text = json.dumps([_VERSION, made_with, settings])

    def encode(
        self, rows: Sequence[Mapping[str, Any]], row_format: RowFormat, locations: Sequence[str]
    ) -> list[EncodedRow]:
        """Samples of some rows, in their order; ``row_format`` is not ``auto``.

        Raises:
            DataError: A row is bad, cannot be marked exactly, or is too long and ``data.truncation`` is error.
            ConfigError: Conversations, and no chat template.
        """
        pairs = list(zip(rows, locations, strict=True))
        splits = self._config.split_turns and row_format in ("preference", "tokens", "text")
        require(not splits, *_SPLITS_TURNS, f"false for rows of format {row_format}")
        if row_format == "preference":
            return self._preferences(pairs)
        if row_format == "tokens":
            found = [sample(*read_tokens(row, len(self.tokenizer), location)) for row, location in pairs]
            return [self._cut(row, location) for row, location in zip(found, locations, strict=True)]
        rendered = [[(*part, at) for part in self._rendered(row, row_format, at)] for row, at in pairs]
        parts: list[Any] = list(chain.from_iterable(rendered))
        texts, spans, are_documents, at = ([part[i] for part in parts] for i in range(4))
        marked = self._spans.encode(texts, spans, at)
        found = [self._closed(*row, one) for row, one in zip(marked, are_documents, strict=True)]
        if row_format == "text":
            split = zip(texts, found, strict=True)
            return [self._split(row) if text else EncodedRow([], False, EMPTY) for text, row in split]
        cut = map(self._cut, found, at)
        return [_joined([next(cut) for _ in turns]) for turns in rendered]

    def open_conversation(self, conversation: Conversation, location: str) -> list[int]:
        """Token ids of a conversation up to where the assistant takes over."""
        if self._template is None:
            raise no_template(f"conversations ({location})")
        text, _ = self._template.render(_without_flags(conversation), location, generation_prompt=True)
        return self._spans.encode([text], [[]], [location])[0][0]

    def open_text(self, text: str, location: str) -> list[int]:
        """Token ids of a text that goes on: with BOS as the tokenizer puts it, and without EOS."""
        ids = self._spans.encode([text], [[]], [location])[0][0]
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def _rendered(self, row: Mapping[str, Any], row_format: RowFormat, location: str) -> list[_Part]:
        """A row as text, what is supervised of it, and whether it is a document, to which BOS and EOS are added.

        With ``data.split_turns`` one for each supervised turn, up to it.
        """
        whole, splits = self._config.train_on_prompt, self._config.split_turns
        if row_format == "text":
            text = text_of(row, "text", location)
            return [(text, [(0, len(text))], True)]
        plain = read_prompt(row, location) if row_format == "prompt_completion" else None
        if plain:  # which stand as they are, as that is what they mean to a base model
            require(not splits, *_SPLITS_TURNS, f"false for prompts and completions in plain text ({location})")
            text = "".join(plain)
            return [(text, [(0 if whole else len(plain[0]), len(text))], True)]
        if self._turns is None:
            raise no_template(f"{row_format} rows ({location})")
        conversation = to_conversation(row, row_format, location, supervises_prompt=whole)
        wanted = supervised_turns(conversation.messages, self._config.supervise, whole, location)
        seen = _without_flags(conversation)
        if not splits:
            return [(*self._turns.find(seen, wanted, location), False)]
        upto = [replace(seen, messages=seen.messages[: turn + 1]) for turn in wanted]
        return [(*self._turns.find_last(part, location), False) for part in upto]

    def _preferences(self, pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[EncodedRow]:
        """Two samples per row, the chosen completion first; none where one of them has nothing left."""
        if self._config.train_on_prompt:
            allowed = "false for rows of chosen and rejected, which are compared by their completions"
            raise ConfigError("data.train_on_prompt", "true", allowed, "drop it")
        sides = [side for row, location in pairs for side in preference_sides(row, location)]
        locations = [f"{location}: {name}" for _, location in pairs for name in ("chosen", "rejected")]
        found, rows = self.encode(sides, "prompt_completion", locations), []
        for chosen, rejected in zip(found[::2], found[1::2], strict=True):
            is_cut, dropped = chosen.truncated or rejected.truncated, chosen.dropped or rejected.dropped
            rows.append(EncodedRow([] if dropped else chosen.samples + rejected.samples, is_cut, dropped))
        return rows

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

    def _cut(self, row: Encoded, location: str) -> EncodedRow:
        """The row within ``max_seq_length``; of a longer one that part that ``data.truncation`` leaves."""
        marked = np.flatnonzero(row.supervised)
        if not len(marked):
            return EncodedRow([], False, NOTHING_LEFT)
        # What follows the last supervised token, such as the line break after the last turn, changes no loss.
        row = Encoded(row.input_ids[: marked[-1] + 1], row.supervised[: marked[-1] + 1])
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
        start = len(ids) - limit + len(kept)
        return sample([*kept, *ids[start:]], np.concatenate([np.zeros(len(kept), bool), row.supervised[start:]]))


def _joined(turns: Sequence[EncodedRow]) -> EncodedRow:
    """A row of what became of its turns."""
    if len(turns) == 1:
        return turns[0]
    samples = [sample for turn in turns for sample in turn.samples]
    lost = tuple(turn.dropped for turn in turns if turn.dropped is not None)
    dropped = None if samples else lost[0] if lost else NOTHING_LEFT
    return EncodedRow(samples, sum(turn.truncated for turn in turns if turn.samples), dropped, lost)


def _without_flags(conversation: Conversation) -> Conversation:
    """The conversation as templates see it."""
    clean = [{key: value for key, value in message.items() if key != "train"} for message in conversation.messages]
    return replace(conversation, messages=clean)
