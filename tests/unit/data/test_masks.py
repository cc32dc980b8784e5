"""Spans of characters as a mask over tokens: every token is inside, outside, or the row is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_fsdp.data.masks import SpanEncoder
from lit_fsdp.errors import DataError


def _words(*words: str) -> Any:
    """A tokenizer of whole words that begin with their blank."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*words, "?"))}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_word_goes_with_the_blank_before_it_and_a_part_of_one_is_refused():
    encoder = SpanEncoder(_words("▁ab", "▁c"))
    ((ids, mask),) = encoder.encode(["c ab c"], [[(2, 4)]], ["x"])
    assert (ids, mask.tolist()) == ([1, 0, 1], [False, True, False])
    for span in ((2, 3), (3, 4), (3, 5)):
        with pytest.raises(DataError, match=r"^x: token '▁ab' lies across the border"):
            encoder.encode(["c ab c"], [[span]], ["x"])


def test_random_spans_are_what_comparing_every_token_gives(small: Any):
    draw, encoder = random.Random(1), SpanEncoder(small)
    for _ in range(300):
        text = "".join(draw.choices("ab \nñ日🙂", k=draw.randint(1, 30)))
        borders = sorted(draw.sample(range(len(text) + 1), k=min(len(text) + 1, draw.choice((2, 4)))) if text else ())
        spans = list(zip(borders[::2], borders[1::2], strict=False))
        ((ids, mask),) = encoder.encode([text], [spans], ["x"])
        learned = b"".join(text[a:b].encode() for a, b in spans)
        assert small.decode([t for t, m in zip(ids, mask, strict=True) if m]).encode() == learned
        assert small.decode(ids) == text
