"""Encode rows of any row format as samples: tokens with a mask, truncated, or the reason why a row is dropped."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.chat_template import find_template, no_template
from lit_fsdp.data.formats import (
    Conversation,
    is_plain,
    num_alike,
    preference_sides,
    read_prompt,
    read_tokens,
    text_of,
    to_conversation,
)
from lit_fsdp.data.masks import Encoded, Span, SpanEncoder, added_tokens, sample
from lit_fsdp.data.turns import REASONING, AssistantTurns, Found, Unwritten, supervised_turns
from lit_fsdp.errors import ConfigError, DataError, require

_VERSION = 10
"""Incremented when a change here or below alters the tokens or masks of the same rows."""
CUT, TOO_LONG = "cut before the assistant's turn", "longer than max_seq_length"
EMPTY, NOTHING_LEFT, EQUAL = "empty", "without a supervised token", "with equal completions"
_FEW_TOKENS = 16
"""Answers without text have fewer supervised tokens: end tokens, blanks, and empty reasoning."""
_TEMPLATE = "data.chat_template: chatml"
_SPLITS_TURNS = ("data.split_turns", "true")


@dataclass(frozen=True)
class EncodedRow:
    """Result of encoding one row."""

    samples: list[Encoded]
    """Samples after truncation: two for a preference row, several for a split text or conversation, or none."""
    truncated: int = 0
    """Number of truncated samples."""
    dropped: tuple[str, ...] = ()
    """Why the row, or a turn with ``data.split_turns``, has no sample: short reasons that can be counted."""
    unwritten: tuple[str, ...] = ()
    """Roles of texts that the template omits, ``tools`` for schemas; allowed by ``data.unwritten_text``."""
    is_plain: bool = False
    """Whether it is a prompt and a completion in plain text, which no template renders."""
    lacks_text: bool = False
    """Whether a supervised answer has no text, only special tokens, such as the end of the turn."""


class _Part(NamedTuple):
    """Input of one sample."""

    text: str
    spans: list[Span]
    location: str
    is_document: bool = False
    """Whether BOS and EOS are added."""


class RowEncoder:
    """Encode rows as samples with one tokenizer, template and data section; picklable.

    Conversations have the same ids as with ``apply_chat_template``. Texts get BOS if the tokenizer adds it, and EOS.
    The ``text`` contains everything that ids and masks depend on; the ``chat_template`` is the Jinja source, if any.
    Ids must be below ``num_embeddings`` of the model; a tokenizer may have more.

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
        names = ("supervise", "split_turns", "train_on_prompt", "unwritten_text", "truncation", "max_seq_length")
        settings = [getattr(config, name) for name in names]
        self.text = json.dumps([_VERSION, made_with, settings, self._num_ids])

    @property
    def lacks_prompt(self) -> bool:
        """Whether the chat template writes a header before answers, but no generation prompt."""
        return self._turns is not None and self._turns.lacks_prompt

    def encode(
        self, rows: Sequence[Mapping[str, Any]], row_format: RowFormat, locations: Sequence[str]
    ) -> list[EncodedRow]:
        """Encode rows in order; the ``row_format`` must not be ``auto``.

        Raises:
            DataError: A row is invalid, cannot be masked exactly, or is too long and ``data.truncation`` is error.
            ConfigError: The rows are conversations, but no chat template is set.
        """
        splits = self._config.split_turns and row_format in ("preference", "tokens", "text")
        require(not splits, *_SPLITS_TURNS, f"false for rows of format {row_format}")
        if row_format == "preference":
            found = self._preferences(rows, locations)
        else:
            found = []
            wholes = self._whole(rows, row_format, locations)
            for row, (whole, unwritten), location in zip(rows, wholes, locations, strict=True):
                parts = [self._split(one) if row_format == "text" else self._cut(one, location) for one in whole]
                dropped = tuple(why for part in parts for why in part.dropped)
                if not parts:
                    dropped = (EMPTY if row_format == "text" else NOTHING_LEFT,)
                samples = [one for part in parts for one in part.samples]
                plain = row_format == "prompt_completion" and is_plain(row)
                answers = () if row_format in ("text", "tokens") else zip(whole, parts, strict=True)
                is_empty = any(part.samples and self._lacks_text(one) for one, part in answers)  # before truncation
                cut = sum(part.truncated for part in parts)
                found.append(EncodedRow(samples, cut, dropped, unwritten, plain, is_empty))
        every = [each.input_ids for encoded in found for each in encoded.samples]
        if every and np.concatenate(every).max() >= self._num_ids:
            for encoded, location in zip(found, locations, strict=True):
                for each in encoded.samples:
                    self._check_ids(each.input_ids, location)
        return found

    def open_conversation(self, conversation: Conversation, location: str) -> list[int]:
        """Return the token ids of a conversation, including the generation prompt."""
        if self._template is None:
            raise no_template(f"conversations ({location})")
        assert self._turns is not None
        conversation = _without_flags(conversation)
        text, _ = self._template.render(conversation, location, generation_prompt=True)
        self._allowed(self._turns.unwritten(conversation, text, generation_prompt=True), location, _TEMPLATE)
        ids = self._spans.encode([text], [[]], [location])[0][0]
        self._check_ids(ids, location)
        return ids

    def open_text(self, text: str, location: str) -> list[int]:
        """Return the token ids of a text to be continued: with BOS if the tokenizer adds it, without EOS."""
        ids = self._spans.encode([text], [[]], [location])[0][0]
        self._check_ids(ids, location)
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def _whole(
        self, rows: Sequence[Mapping[str, Any]], row_format: RowFormat, locations: Sequence[str]
    ) -> list[tuple[list[Encoded], tuple[str, ...]]]:
        """Return each row's samples before truncation, and the texts that its template omits."""
        pairs = zip(rows, locations, strict=True)
        if row_format == "tokens":
            return [([sample(*read_tokens(row, self._num_ids, location))], ()) for row, location in pairs]
        rendered = [self._rendered(row, row_format, location) for row, location in pairs]
        parts = [part for of_row, _ in rendered for part in of_row]
        texts, spans = [part.text for part in parts], [part.spans for part in parts]
        marked = self._spans.encode(texts, spans, [part.location for part in parts])
        samples = iter([self._closed(*one, part.is_document) for one, part in zip(marked, parts, strict=True)])
        return [([next(samples) for _ in of_row], unwritten) for of_row, unwritten in rendered]

    def _rendered(
        self, row: Mapping[str, Any], row_format: RowFormat, location: str
    ) -> tuple[list[_Part], tuple[str, ...]]:
        """Render a row as one text, or with ``data.split_turns`` one per supervised turn; also return omitted texts."""
        whole, splits = self._config.train_on_prompt, self._config.split_turns
        is_preference = row_format == "preference"
        if row.get("label") is False and row_format not in ("preference", "text"):
            fix = "train on pairs (chosen, rejected), or remove such rows (data.on_bad_row: drop)"
            raise DataError(f"{location}: label: false marks an undesired answer\n  fix:     {fix}")
        row_format = "prompt_completion" if is_preference else row_format
        if row_format == "text":
            text = text_of(row, "text", location)
            return [_Part(text, [(0, len(text))], location, True)] if text else [], ()
        plain = read_prompt(row, location) if row_format == "prompt_completion" else None
        if plain:  # not rendered, as for a base model
            require(not splits, *_SPLITS_TURNS, f"false for prompts and completions in plain text ({location})")
            text = "".join(plain)
            return [_Part(text, [(0 if whole else len(plain[0]), len(text))], location, True)], ()
        if self._turns is None:
            raise no_template(f"{row_format} rows ({location})")
        conversation = to_conversation(row, row_format, location, supervises_prompt=whole)
        wanted = supervised_turns(conversation.messages, self._config.supervise, whole, location)
        seen = _without_flags(conversation)
        found = self._by_turn(seen, wanted, location) if splits else [self._turns.find(seen, wanted, location)]
        unwritten = dict.fromkeys(one for *_, lacks in found for one in lacks)  # once per row, not per sample
        fix = _TEMPLATE
        if unwritten and not (splits or whole or is_preference) and self._splitting_helps(seen, wanted, location):
            fix += ", data.split_turns: true"
        return [_Part(text, spans, location) for text, spans, _ in found], self._allowed(unwritten, location, fix)

    def _by_turn(self, conversation: Conversation, wanted: Sequence[int], location: str) -> list[Found]:
        assert self._turns is not None
        messages = conversation.messages
        upto = [replace(conversation, messages=messages[: turn + 1]) for turn in wanted]
        return [self._turns.find_last(one, location) for one in upto]

    def _splitting_helps(self, conversation: Conversation, wanted: Sequence[int], location: str) -> bool:
        try:
            found = self._by_turn(conversation, wanted, location)
        except DataError:  # concerns a part of the conversation; the caller reports the error of the whole
            return False
        return bool(found) and not any(lacks for *_, lacks in found)

    def _allowed(self, unwritten: Iterable[Unwritten], location: str, fix: str) -> tuple[str, ...]:
        """Return the roles of texts that the template omits, or raise DataError."""
        names = ", ".join(name for name, _ in unwritten)
        if any(kind == REASONING for _, kind in unwritten):
            fix = "set a data.chat_template that writes the reasoning of the last turn, or remove it"
        if names and self._config.unwritten_text == "error":
            raise DataError(
                f"{location}: the chat template omits {names}, in part or in full\n"
                "  allowed: rows whose texts it writes in full; others with data.unwritten_text: allow\n"
                f"  fix:     {fix}, or data.on_bad_row: drop"
            )
        return tuple(kind for _, kind in unwritten)

    def _lacks_text(self, whole: Encoded) -> bool:
        """Whether the supervised tokens of a sample are special tokens, blank, or reasoning without text."""
        if not 0 < np.count_nonzero(whole.supervised) < _FEW_TOKENS:
            return False
        ids = whole.input_ids[whole.supervised].tolist()
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return not text.replace("<think>", "").replace("</think>", "").strip()

    def _check_ids(self, ids: Sequence[int] | np.ndarray, location: str) -> None:
        if (highest := int(np.max(ids, initial=0))) >= self._num_ids:
            token = self.tokenizer.convert_ids_to_tokens(highest)
            raise DataError(
                f"{location}: token {token!r} ({highest}) has no embedding in the model\n"
                f"  allowed: token ids 0 to {self._num_ids - 1}\n"
                f"  fix:     remove the row (data.on_bad_row: drop), or set model.add_tokens: [{json.dumps(token)}]"
            )

    def _preferences(self, rows: Sequence[Mapping[str, Any]], locations: Sequence[str]) -> list[EncodedRow]:
        """Return two samples per row, the chosen completion first; none if either is dropped."""
        if self._config.train_on_prompt:
            allowed = "false for chosen and rejected rows, because only completions are compared"
            raise ConfigError("data.train_on_prompt", "true", allowed, "drop it")
        sides = [side for row, at in zip(rows, locations, strict=True) for side in preference_sides(row, at)]
        names = [f"{location}: {name}" for location in locations for name in ("chosen", "rejected")]
        whole, found = self._whole(sides, "preference", names), []
        for i in range(0, len(sides), 2):
            ([one], unwritten), ([other], more) = whole[i : i + 2]
            chosen, rejected = self._cut(one, names[i], other), self._cut(other, names[i + 1], one)
            is_cut, dropped = max(chosen.truncated, rejected.truncated), chosen.dropped or rejected.dropped
            both = [[each.input_ids.tolist() for each in side.samples] for side in (chosen, rejected)]
            dropped = dropped or (EQUAL,) * (both[0] == both[1])
            samples = [] if dropped else chosen.samples + rejected.samples
            plain, is_empty = is_plain(sides[i]), bool(samples) and self._lacks_text(one)
            found.append(EncodedRow(samples, 0 if dropped else is_cut, dropped, unwritten or more, plain, is_empty))
        return found

    def _closed(self, ids: list[int], mask: np.ndarray, is_document: bool) -> Encoded:
        """Build the sample of a row; a document gets BOS and EOS unless it has them."""
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
        """Split a document into pieces of at most ``max_seq_length`` without overlap; each first token is no target.

        A last piece of a single token could not be supervised, so it gets one more token from the previous piece.
        """
        total, longest = len(row.input_ids), self._config.max_seq_length
        borders = [*range(0, total, longest), total]
        if len(borders) > 2 and borders[-1] - borders[-2] == 1 and longest > 2:
            borders[-2] -= 1
        pieces = [row.part(start, end) for start, end in pairwise(borders)]
        samples = [piece for piece in pieces if piece.supervised.any()]
        return EncodedRow(samples, 0 < len(samples) < len(pieces), () if samples else (NOTHING_LEFT,))

    def _cut(self, whole: Encoded, location: str, other: Encoded | None = None) -> EncodedRow:
        """Truncate a row to ``max_seq_length`` as ``data.truncation`` says.

        Both sides of a preference (``other`` is the other side) lose the same tokens of their common prompt.
        """
        row = _trimmed(whole)
        other = _trimmed(other) if other else row
        if not len(row.input_ids):
            return EncodedRow([], 0, (NOTHING_LEFT,))
        length, limit, policy = len(row.input_ids), self._config.max_seq_length, self._config.truncation
        if max(length, len(other.input_ids) if policy == "start" else 0) <= limit:
            return EncodedRow([row])
        if policy == "error":
            raise DataError(
                f"{location}: {length} tokens\n  allowed: data.max_seq_length {limit}, as data.truncation is error\n"
                f"  fix:     set data.max_seq_length: {length}, or data.truncation: drop"
            )
        if policy == "drop":
            return EncodedRow([], 0, (TOO_LONG,))
        kept = row.part(0, limit) if policy == "end" else self._end_of(row, other, limit)
        return EncodedRow([kept], 1) if kept.supervised.any() else EncodedRow([], 0, (CUT,))

    def _end_of(self, row: Encoded, other: Encoded, limit: int) -> Encoded:
        """Return BOS, if the row starts with it, and the last tokens; the longer side decides for the common prefix."""
        ids, others = row.input_ids.tolist(), other.input_ids.tolist()
        alike = num_alike(ids, others)
        kept = self._prefix if ids[: len(self._prefix)] == self._prefix else []
        if ids[0] == self._bos and ids[:alike].count(self._bos) == 1:  # written once, so it does not start a turn
            kept = [self._bos]
        over = len(kept) - limit
        start = max(len(ids) + over, min(len(others) + over, alike))
        return sample([*kept, *ids[start:]], np.concatenate([np.zeros(len(kept), bool), row.supervised[start:]]))


def _trimmed(row: Encoded) -> Encoded:
    """Remove the tokens after the last supervised one, such as a final line break: they do not affect the loss."""
    marked = row.supervised.nonzero()[0]
    end = int(marked[-1]) + 1 if len(marked) else 0
    return Encoded(row.input_ids[:end], row.supervised[:end])


def _without_flags(conversation: Conversation) -> Conversation:
    """Return the conversation as templates see it, without ``train`` keys."""
    if not any("train" in message for message in conversation.messages):
        return conversation
    clean = [{key: value for key, value in message.items() if key != "train"} for message in conversation.messages]
    return replace(conversation, messages=clean)
