"""Convert character spans of a text into an exact token mask, or raise an error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from lit_fsdp.errors import DataError, require

Span = tuple[int, int]
Marked = tuple[list[int], np.ndarray]
"""Token ids of a text, and whether each token is in a span."""


@dataclass(frozen=True)
class Encoded:
    """One sample as tokens."""

    input_ids: np.ndarray
    """int32, shape (T,)."""
    supervised: np.ndarray
    """bool, shape (T,); never true for the first token, which nothing predicts."""

    def part(self, start: int, end: int) -> Encoded:
        """Return tokens ``start`` to ``end`` as a separate sample."""
        return sample(self.input_ids[start:end], self.supervised[start:end])


def sample(ids: Sequence[int] | np.ndarray, supervised: np.ndarray) -> Encoded:
    """Build a sample from tokens and their mask; the first token is never supervised."""
    mask = supervised.astype(bool)
    mask[:1] = False
    return Encoded(np.asarray(ids, dtype=np.int32), mask)


class SpanEncoder:
    """Tokenize texts without adding BOS or EOS, and mark the tokens of given spans.

    Uses a copy of the tokenizer, so that truncation or padding set on the original has no effect. The copy has no
    post-processor, which could only add tokens or trim spaces from the offsets. The ``text`` is a hash of everything
    that ids depend on.

    Raises:
        ConfigError: The tokenizer does not report character offsets of its tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        given = f"{type(tokenizer).__name__}, which does not report character offsets of its tokens"
        fix = "name a folder or hub repository with a tokenizer.json"
        require(getattr(tokenizer, "is_fast", False), "model.tokenizer", given, "a fast tokenizer", fix)
        self._backend, self.text = _plain_copy(tokenizer.backend_tokenizer.to_str())
        added = self._backend.get_added_tokens_decoder()
        self._take_blanks = {i: t.content for i, t in added.items() if (t.lstrip or t.rstrip) and t.content.strip()}

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]], locations: Sequence[str]) -> list[Marked]:
        """Return tokens and masks of many texts; the first token is marked like any other.

        For each text, ``spans`` has the supervised half-open character ranges, sorted and disjoint.

        Raises:
            DataError: A token crosses the boundary of a span and cannot be split there, or a text cannot be encoded.
        """
        for text, location in zip(texts, locations, strict=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{location}: text with an unpaired surrogate ({error})") from None
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        parts = zip(texts, encodings, spans, locations, strict=True)
        return [self._mask(text, encoding, wanted, location) for text, encoding, wanted, location in parts]

    def _mask(self, text: str, encoding: Any, spans: Sequence[Span], location: str) -> Marked:
        ids, supervised = encoding.ids, np.zeros(len(encoding), dtype=bool)
        offsets_of = encoding.token_to_chars  # faster than a list of all offsets; only boundaries are needed
        if self._take_blanks:
            offsets_of = [self._literal(text, *token) for token in zip(ids, encoding.offsets, strict=True)].__getitem__
        across: list[tuple[int, Span]] = []
        for span in spans:
            (left, first), (last, right) = (_border(encoding, offsets_of, at, len(text)) for at in span)
            across += [(i, span) for i in {*range(left, first), *range(last, right)}]
            while last > first and offsets_of(last - 1)[0] >= span[1]:  # without text
                last -= 1
            supervised[first:last] = True
        borders = {at for i, span in across for at in span if offsets_of(i)[0] < at < offsets_of(i)[1]}
        split = self._split(text, ids, spans, [0, *sorted(borders), len(text)], location) if borders else None
        if split is not None:
            return split
        for index, (start, end) in across:
            # only the space that belongs to the following word
            if text[offsets_of(index)[0] : start] != " " or offsets_of(index)[1] > end:
                raise DataError(
                    f"{location}: token {encoding.tokens[index]!r} crosses the boundary of an assistant turn\n"
                    "  fix:     set a data.chat_template with a line break or special token between turns"
                )
            supervised[index] = True
        return ids, supervised

    def _literal(self, text: str, token: int, offsets: Span) -> Span:
        """Return the offsets of a token without the surrounding whitespace that a special token absorbs."""
        word = self._take_blanks.get(token)
        start = text.find(word, *offsets) if word else -1
        return (start, start + len(word)) if word and start >= 0 else offsets

    def _split(
        self, text: str, ids: list[int], spans: Sequence[Span], cuts: Sequence[int], location: str
    ) -> Marked | None:
        """Tokenize each side of a boundary separately, like prompt and answer in generation.

        ``None`` if the decoded text differs, as with tokenizers that add a space before every text.
        """
        pieces = [
            (text[a:b], [(max(s, a) - a, min(e, b) - a) for s, e in spans if s < b and e > a])
            for a, b in pairwise(cuts)
        ]
        encoded = self._backend.encode_batch([piece for piece, _ in pieces], add_special_tokens=False)
        joined = [token for piece in encoded for token in piece.ids]
        if len({self._backend.decode(found, skip_special_tokens=False) for found in (ids, joined)}) > 1:
            return None
        masks = zip(pieces, encoded, strict=True)
        parts = [self._mask(piece, found, inner, location) for (piece, inner), found in masks]
        return [token for part, _ in parts for token in part], np.concatenate([mask for _, mask in parts])


def _border(encoding: Any, offsets_of: Callable[[int], Span], at: int, length: int) -> tuple[int, int]:
    """Return the first token that ends after a character, and the first from there that starts at or after it."""
    tokens = filter(lambda token: token is not None, map(encoding.char_to_token, range(at, length)))
    token = begins = next((token for token in tokens if offsets_of(token)[1] > at), len(encoding))
    while begins < len(encoding) and offsets_of(begins)[0] < at:
        begins += 1
    return token, begins


@lru_cache(maxsize=2)
def _plain_copy(state: str) -> tuple[Any, str]:
    """Build a tokenizer from its state, and a hash of what ids depend on; cached, as it is slow and splits share it."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(state)
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    return backend, hashlib.blake2b(backend.to_str().encode(), digest_size=16).hexdigest()


def added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer adds before and after a text, such as BOS."""
    backend = tokenizer.backend_tokenizer
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    first = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return full[:first], full[first + len(bare) :]
