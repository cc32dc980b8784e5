"""Character spans of a text as a mask over its tokens, exact to the token or refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from lit_fsdp.errors import DataError

Span = tuple[int, int]


@dataclass(frozen=True)
class Encoded:
    """One conversation as tokens, before truncation."""

    input_ids: np.ndarray
    """int32, shape (T,)."""
    supervised: np.ndarray
    """bool, shape (T,); never true for the first token, which nothing predicts."""


class SpanEncoder:
    """Tokenises texts as they are, without adding BOS or EOS, and marks the tokens of given spans.

    It works on a copy of the tokenizer: what others set on theirs (truncation, padding) changes nothing here, and
    there is no post-processor, which could only add tokens or trim blanks off the offsets.

    Args:
        tokenizer: A fast tokenizer of transformers.

    Attributes:
        text: The state that ids depend on.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend, self.text = _plain_copy(tokenizer.backend_tokenizer.to_str())

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]], places: Sequence[str]) -> list[Encoded]:
        """Tokens and masks of many texts.

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

    def _mask(self, text: str, encoding: Any, spans: Sequence[Span], place: str) -> Encoded:
        starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        supervised = np.zeros(len(starts), dtype=bool)
        across = np.zeros(len(starts), dtype=bool)
        for start, end in spans:
            inside = (starts >= start) & (ends <= end) & (starts < end) & (ends > start)
            across |= (starts < end) & (ends > start) & ~inside
            supervised |= inside
        if across.any():
            split = self._split(text, encoding.ids, spans)
            if split is not None:
                return split
            for index in np.flatnonzero(across):
                before = [text[starts[index] : start] for start, end in spans if starts[index] < start < ends[index]]
                if before != [" "]:  # only the blank that belongs to the word after it
                    raise _refusal(place, encoding.tokens[index])
                supervised[index] = True
        supervised[:1] = False
        return Encoded(np.array(encoding.ids, dtype=np.int32), supervised)

    def _split(self, text: str, ids: list[int], spans: Sequence[Span]) -> Encoded | None:
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
        supervised[:1] = False
        return Encoded(np.array(joined, dtype=np.int32), supervised)


@lru_cache(maxsize=2)
def _plain_copy(state: str) -> tuple[Any, str]:
    """A tokenizer from its state, and the state that ids depend on; kept, as it takes a while and splits share it."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(state)
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = None
    return backend, backend.to_str()


def _refusal(place: str, token: str) -> DataError:
    return DataError(
        f"{place}: token {token!r} lies across the border of an assistant turn, so that the mask would not be exact\n"
        "  fix:     give data.chat_template with a line break or special token between the turns"
    )
