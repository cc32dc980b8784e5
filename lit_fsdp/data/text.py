"""Rows without turns as tokens: plain text, a prompt with its completion as they stand, and rows of token ids.

BOS is put in front as the tokenizer does it, EOS after each document, and never twice where a text has them already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import numpy as np

from lit_fsdp.data.masks import Encoded, Marked, Span, SpanEncoder, sample
from lit_fsdp.data.plain import read_tokens
from lit_fsdp.errors import ConfigError, DataError


class TextEncoder:
    """Tokenises documents with one tokenizer.

    Args:
        tokenizer: A fast tokenizer of transformers.
        encoder: The same tokenizer as one that marks spans.
    """

    def __init__(self, tokenizer: Any, encoder: SpanEncoder) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer
        self.prefix, suffix = added_tokens(tokenizer)
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._suffix = suffix if self._eos in suffix else [*suffix, self._eos]
        self._num_tokens = len(tokenizer)

    def encode(self, texts: Sequence[str], prompts: Sequence[int], places: Sequence[str]) -> list[Encoded]:
        """Tokens and masks of documents.

        Args:
            texts: What is tokenised.
            prompts: Characters at the head of each text that are not learnt; 0 for a plain text.
            places: Names of the texts in errors.

        Raises:
            ConfigError: The tokenizer has no EOS.
            DataError: A token lies across the end of a prompt and cannot be split there.
        """
        if self._eos is None:
            raise ConfigError(
                "model.tokenizer",
                "a tokenizer without an EOS token",
                "one with eos_token, which ends every document",
                "add eos_token to its tokenizer_config.json",
            )
        spans: list[list[Span]] = [[(start, len(text))] for text, start in zip(texts, prompts, strict=True)]
        return [self._closed(row) for row in self._encoder.encode(texts, spans, places)]

    def _closed(self, row: Marked) -> Encoded:
        """With BOS and EOS, once; blanks may stand before the one and behind the other."""
        ids, mask = row
        before, after = self.prefix, self._suffix
        if before and before[0] in ids:  # few texts hold one, and blanks take a while to count
            start = num_blanks(self._tokenizer, ids)
            if ids[start : start + len(before)] == before:
                mask[: start + len(before)] = False
                before = []
        if self._eos in ids and ids[: len(ids) - num_blanks(self._tokenizer, reversed(ids))][-1:] == [self._eos]:
            after = []
        learnt = np.concatenate([np.zeros(len(before), bool), mask, np.ones(len(after), bool)])
        return sample([*before, *ids, *after], learnt)

    def end_of(self, row: Encoded, max_tokens: int) -> Encoded:
        """The last tokens of a row, behind the BOS that it began with."""
        ids = row.input_ids.tolist()
        blanks = num_blanks(self._tokenizer, ids)
        kept = self.prefix if ids[blanks : blanks + len(self.prefix)] == self.prefix else []
        if (
            ids[blanks : blanks + 1] == [self._bos] and ids.count(self._bos) == 1
        ):  # the template's, and no mark of a turn
            kept = [self._bos]
        kept = kept if len(kept) < max_tokens else []
        start = max(len(ids) - max_tokens + len(kept), blanks + len(kept) if kept else 0)
        mask = np.concatenate([np.zeros(len(kept), bool), row.supervised[start:]])
        return sample([*kept, *ids[start:]], mask)

    def tokens(self, row: Mapping[str, Any], place: str) -> Encoded:
        """A row of token ids with its mask; without one all but the first are learnt.

        Raises:
            DataError: No ids, no mask of them, or an id that the tokenizer does not have.
        """
        ids, mask = read_tokens(row, place)
        if len(ids) and ids.max() >= self._num_tokens:
            raise DataError(
                f"{place}: token id {ids.max()}\n  allowed: 0 to {self._num_tokens - 1}, which the tokenizer has\n"
                "  fix:     name the tokenizer that the rows were made with"
            )
        return sample(ids, np.ones(len(ids), dtype=bool) if mask is None else mask)


def added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids that the tokenizer by itself puts before and after a text, such as BOS."""
    backend = tokenizer.backend_tokenizer
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    starts = [i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare]
    first = starts[0] if starts else 0
    return full[:first], full[first + len(bare) :]


def num_blanks(tokenizer: Any, ids: Iterable[int]) -> int:
    """How many tokens at the beginning are nothing but blanks."""
    return sum(1 for _ in takewhile(lambda token: not tokenizer.decode([token]).strip(), ids))


def split(row: Encoded, max_tokens: int) -> list[Encoded]:
    """A document in pieces of at most ``max_tokens`` without overlap; the first token of each is not learnt.

    A last piece of one token, which could not be learnt, takes one over from the piece before it.
    """
    total = len(row.input_ids)
    borders = [*range(0, total, max_tokens), total]
    if len(borders) > 2 and borders[-1] - borders[-2] == 1 and max_tokens > 2:
        borders[-2] -= 1
    return [row.part(start, end) for start, end in pairwise(borders)]
