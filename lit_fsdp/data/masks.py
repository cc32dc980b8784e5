"""Character spans of a text as a mask over its tokens, exact to the token or refused."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from lit_fsdp.errors import DataError, require

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
    """Tokenize texts as they are, without adding BOS or EOS, and marks the tokens of given spans.

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
        given = f"{type(tokenizer).__name__}, which does not tell where its tokens lie in the text"
        fix = "name a folder or hub repository with a tokenizer.json"
        require(getattr(tokenizer, "is_fast", False), "model.tokenizer", given, "a fast tokenizer", fix)
        self._backend, self.text = _plain_copy(tokenizer.backend_tokenizer.to_str())
        added = self._backend.get_added_tokens_decoder()
        self._take_blanks = {i: t.content for i, t in added.items() if (t.lstrip or t.rstrip) and t.content.strip()}

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]], locations: Sequence[str]) -> list[Marked]:
        """Tokens and masks of many texts; the first token is marked like any other.

        Args:
            texts: What is tokenized.
            spans: Per text the half-open character ranges that are supervised, in order and apart.
            locations: Where the texts stand, for errors.

        Raises:
            DataError: A token lies across the border of a span and cannot be split there, or a text cannot be encoded.
        """
        for text, location in zip(texts, locations, strict=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = f"half a character (\\u{ord(text[error.start]):04x})"
                fix = "write both halves of the pair, or remove it"
                raise DataError(f"{location}: {half}, which is no text\n  fix:     {fix}") from None
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        parts = zip(texts, encodings, spans, locations, strict=True)
        return [self._mask(text, encoding, wanted, location) for text, encoding, wanted, location in parts]

    def _mask(self, text: str, encoding: Any, spans: Sequence[Span], location: str) -> Marked:
        ids, offsets = encoding.ids, encoding.offsets
        if len(spans) == 1 and spans[0] == (0, len(text)):  # a document, without a border to look for
            return ids, np.ones(len(ids), dtype=bool)
        supervised = np.zeros(len(ids), dtype=bool)
        across: list[tuple[int, Span]] = []
        in_blanks: set[int] = set()
        for start, end in spans:
            first, last, cut = _tokens_of(offsets, start, end)
            supervised[first:last] = True
            for index in cut:
                a, b = self._literal(text, ids[index], offsets[index])
                if a < start < b or a < end < b:
                    across.append((index, (start, end)))
                else:  # the border is in the blanks that a special token takes in, so that its own text decides
                    supervised[index] |= start <= a and b <= end
                    in_blanks |= {border for border in (start, end) if offsets[index][0] < border < offsets[index][1]}
        if across:
            split = self._split(text, ids, spans, in_blanks, location)
            if split is not None:
                return split
            for index, (start, end) in across:
                # only the blank that belongs to the word after it
                if text[offsets[index][0] : start] != " " or offsets[index][1] > end:
                    raise DataError(
                        f"{location}: token {encoding.tokens[index]!r} lies across the border of an assistant turn, so "
                        "that the mask would not be exact\n"
                        "  fix:     give data.chat_template with a line break or special token between the turns"
                    )
                supervised[index] = True
        return ids, supervised

    def _literal(self, text: str, token: int, offsets: Span) -> Span:
        """Where a token's own text is, without the blanks around it that a special token takes in."""
        word = self._take_blanks.get(token)
        start = text.find(word, *offsets) if word else -1
        return (start, start + len(word)) if word and start >= 0 else offsets

    def _split(
        self, text: str, ids: list[int], spans: Sequence[Span], in_blanks: Collection[int], location: str
    ) -> Marked | None:
        """Each side of a border tokenized alone, as prompt and answer are when the model generates.

        Not at the borders ``in_blanks`` of a special token, where it would be another text. ``None`` if it is another
        one all the same, as with tokenizers that put a blank before every text.
        """
        borders = sorted({0, len(text), *(border for span in spans for border in span)}.difference(in_blanks))
        pieces = [
            (text[a:b], [(max(s, a) - a, min(e, b) - a) for s, e in spans if s < b and e > a])
            for a, b in pairwise(borders)
        ]
        encoded = self._backend.encode_batch([piece for piece, _ in pieces], add_special_tokens=False)
        joined = [token for piece in encoded for token in piece.ids]
        same = self._backend.decode(joined, skip_special_tokens=False)
        if same != self._backend.decode(ids, skip_special_tokens=False):
            return None
        parts = [
            self._mask(piece, found, inner, location) for (piece, inner), found in zip(pieces, encoded, strict=True)
        ]
        return [token for part, _ in parts for token in part], np.concatenate([mask for _, mask in parts])


def _tokens_of(offsets: Sequence[Span], start: int, end: int) -> tuple[int, int, list[int]]:
    """The half-open range of tokens inside a span, and the tokens across one of its borders.

    ``offsets`` are the characters of each token, ascending, but for the bytes of one character, which have the same.
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


def added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids that the tokenizer by itself puts before and after a text, such as BOS."""
    backend = tokenizer.backend_tokenizer
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    first = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return full[:first], full[first + len(bare) :]
