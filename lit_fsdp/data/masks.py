"""Character spans of a text as a mask over its tokens, exact to the token or refused."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from lit_fsdp.errors import ConfigError, DataError

Span = tuple[int, int]
Marked = tuple[list[int], np.ndarray]
"""Token ids of a text, and whether each lies in a span."""


@dataclass(frozen=True)
class Encoded:
    """One sample as tokens."""

    input_ids: np.ndarray
    """int32, shape (T,)."""
    supervised: np.ndarray
    """bool, shape (T,); never true for the first token, which nothing predicts."""

    def part(self, start: int, end: int) -> Encoded:
        """Tokens ``start`` to ``end`` as a sample of their own."""
        return sample(self.input_ids[start:end], self.supervised[start:end])


def sample(ids: Sequence[int] | np.ndarray, supervised: np.ndarray) -> Encoded:
    """Tokens with their mask, of which the first is taken out."""
    mask = supervised.astype(bool)
    mask[:1] = False
    return Encoded(np.asarray(ids, dtype=np.int32), mask)


class SpanEncoder:
    """Tokenises texts as they are, without adding BOS or EOS, and marks the tokens of given spans.

    It works on a copy of the tokenizer: what others set on theirs (truncation, padding) changes nothing here, and
    there is no post-processor, which could only add tokens or trim blanks off the offsets.

    Args:
        tokenizer: A fast tokenizer of transformers.

    Attributes:
        text: Hash of the state that ids depend on.

    Raises:
        ConfigError: The tokenizer does not tell where its tokens lie in the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "model.tokenizer",
                f"{type(tokenizer).__name__}, which does not tell where its tokens lie in the text",
                "a fast tokenizer (one with tokenizer.json)",
                "name a folder or hub repository with a tokenizer.json",
            )
        self._backend, self.text = _plain_copy(tokenizer.backend_tokenizer.to_str())

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]], places: Sequence[str]) -> list[Marked]:
        """Tokens and masks of many texts; the first token is marked like any other.

        Args:
            texts: What is tokenised.
            spans: Per text the half-open character ranges that are supervised, in order and apart.
            places: Names of the texts in errors.

        Raises:
            DataError: A token lies across the border of a span and cannot be split there.
        """
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        parts = zip(texts, encodings, spans, places, strict=True)
        return [self._mask(text, encoding, wanted, place) for text, encoding, wanted, place in parts]

    def _mask(self, text: str, encoding: Any, spans: Sequence[Span], place: str) -> Marked:
        ids = encoding.ids
        if len(spans) == 1 and spans[0] == (0, len(text)):  # a document, without a border to look for
            return ids, np.ones(len(ids), dtype=bool)
        offsets = encoding.offsets
        supervised = np.zeros(len(ids), dtype=bool)
        across: list[tuple[int, Span]] = []
        for start, end in spans:
            first, last, cut = _tokens_of(offsets, start, end)
            supervised[first:last] = True
            across += [(index, (start, end)) for index in cut]
        if across:
            split = self._split(text, ids, spans)
            if split is not None:
                return split
            for index, (start, end) in across:
                # only the blank that belongs to the word after it
                if text[offsets[index][0] : start] != " " or offsets[index][1] > end:
                    raise _refusal(place, encoding.tokens[index])
                supervised[index] = True
        return ids, supervised

    def _split(self, text: str, ids: list[int], spans: Sequence[Span]) -> Marked | None:
        """Each side of a border tokenised alone, as prompt and answer are when the model generates.

        ``None`` if that spells another text, as with tokenizers that put a blank before every text.
        """
        borders = [0, *(border for span in spans for border in span), len(text)]
        pieces = [text[a:b] for a, b in pairwise(borders)]
        encoded = [e.ids for e in self._backend.encode_batch(pieces, add_special_tokens=False)]
        joined = [token for piece in encoded for token in piece]
        same = self._backend.decode(joined, skip_special_tokens=False)
        if same != self._backend.decode(ids, skip_special_tokens=False):
            return None
        supervised = np.repeat([i % 2 == 1 for i in range(len(encoded))], [len(piece) for piece in encoded])
        return joined, supervised


def _tokens_of(offsets: Sequence[Span], start: int, end: int) -> tuple[int, int, list[int]]:
    """The half-open range of tokens inside a span, and the tokens across one of its borders.

    Args:
        offsets: Characters of each token, ascending, but for the bytes of one character, which have the same.
        start: Of the span.
        end: Of the span, exclusive.
    """
    first, last = bisect_left(offsets, (start, 0)), bisect_left(offsets, (end, 0))
    cut = []
    index = first - 1
    while index >= 0 and offsets[index][1] > start:
        cut.append(index)
        index -= 1
    while first < last and offsets[first][1] <= start:  # a token of no character before the span
        first += 1
    while last > first and offsets[last - 1][1] > end:
        last -= 1
        cut.append(last)
    return first, last, cut


@lru_cache(maxsize=2)
def _plain_copy(state: str) -> tuple[Any, str]:
    """A tokenizer from its state, and a hash of what ids depend on; kept, as it takes a while and splits share it."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(state)
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    return backend, hashlib.blake2b(backend.to_str().encode(), digest_size=16).hexdigest()


def _refusal(place: str, token: str) -> DataError:
    return DataError(
        f"{place}: token {token!r} lies across the border of an assistant turn, so that the mask would not be exact\n"
        "  fix:     give data.chat_template with a line break or special token between the turns"
    )
