"""Character spans of a text as a mask over its tokens, exact to the token or refused."""

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
    """Tokenize texts as they are, without adding BOS or EOS, and mark the tokens of given spans.

    It works on a copy of the tokenizer: what others set on theirs (truncation, padding) changes nothing here, and
    there is no post-processor, which could only add tokens or trim blanks off the offsets. ``text`` is a hash of all
    that ids depend on.

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

        ``spans`` are per text the half-open character ranges that are supervised, in order and apart.

        Raises:
            DataError: A token lies across the border of a span and cannot be split there, or a text cannot be encoded.
        """
        for text, location in zip(texts, locations, strict=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{location}: half a character, which is no text ({error})") from None
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        parts = zip(texts, encodings, spans, locations, strict=True)
        return [self._mask(text, encoding, wanted, location) for text, encoding, wanted, location in parts]

    def _mask(self, text: str, encoding: Any, spans: Sequence[Span], location: str) -> Marked:
        ids, supervised = encoding.ids, np.zeros(len(encoding), dtype=bool)
        offsets_of = encoding.token_to_chars  # a list of all takes longer than to ask for those at borders
        if self._take_blanks:
            offsets_of = [self._literal(text, *token) for token in zip(ids, encoding.offsets, strict=True)].__getitem__
        across: list[tuple[int, Span]] = []
        for span in spans:
            (left, first), (last, right) = (_border(encoding, offsets_of, at, len(text)) for at in span)
            across += [(i, span) for i in {*range(left, first), *range(last, right)}]
            while last > first and offsets_of(last - 1)[0] >= span[1]:  # without a text of its own
                last -= 1
            supervised[first:last] = True
        borders = {at for i, span in across for at in span if offsets_of(i)[0] < at < offsets_of(i)[1]}
        split = self._split(text, ids, spans, [0, *sorted(borders), len(text)], location) if borders else None
        if split is not None:
            return split
        for index, (start, end) in across:
            # only the blank that belongs to the word after it
            if text[offsets_of(index)[0] : start] != " " or offsets_of(index)[1] > end:
                raise DataError(
                    f"{location}: token {encoding.tokens[index]!r} lies across the border of an assistant turn\n"
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
        self, text: str, ids: list[int], spans: Sequence[Span], cuts: Sequence[int], location: str
    ) -> Marked | None:
        """Each side of a border tokenized alone, as prompt and answer are when the model generates.

        ``None`` if it is another text then, as with tokenizers that put a blank before every text.
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
    """The first token that ends behind a character, and the first one from there on that begins at it or behind it."""
    tokens = filter(lambda token: token is not None, map(encoding.char_to_token, range(at, length)))
    token = begins = next((token for token in tokens if offsets_of(token)[1] > at), len(encoding))
    while begins < len(encoding) and offsets_of(begins)[0] < at:
        begins += 1
    return token, begins


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
