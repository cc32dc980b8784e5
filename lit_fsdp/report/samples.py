"""Samples for people to read: what is supervised stands out, special tokens show, nothing reaches the terminal raw.

Rows come from anywhere, and a control character that is printed as it is can move the cursor, change colors or hide
text. So it is shown by its number: an escape becomes ``⟨U+001B⟩``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from lit_fsdp.data.batches import Sample

_OPEN, _CLOSE = "⟦", "⟧"
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_HEAD, _SUPERVISED, _SPECIAL = "bold cyan", "bold green", "reverse"


def visible(text: str) -> str:
    """``text`` without anything a terminal would act upon but line breaks and tabs."""
    return _OBEYED.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


Piece = tuple[str, bool, bool]
"""Text that is not safe to print, whether it is supervised, and whether it is one special token."""


def pieces(tokenizer: Any, ids: np.ndarray, supervised: np.ndarray) -> list[Piece]:
    """A sample as text, cut where supervision changes and around special tokens.

    A token is decoded with the one before it, as some tokenizers drop a blank at the beginning.
    """
    special = np.isin(ids, [number for number, token in tokenizer.added_tokens_decoder.items() if token.special])
    new = (supervised[1:] != supervised[:-1]) | special[1:] | special[:-1]
    starts, whole = [0, *(np.flatnonzero(new) + 1).tolist()], ids.tolist()
    runs = zip(starts, [*starts[1:], len(whole)], strict=True)
    return [(_decoded(tokenizer, whole, a, b), bool(supervised[a]), bool(special[a])) for a, b in runs]


def _decoded(tokenizer: Any, ids: list[int], start: int, end: int) -> str:
    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    before, both = decode(ids[max(0, start - 1) : start]), decode(ids[max(0, start - 1) : end])
    return both[len(before) :] if both.startswith(before) else decode(ids[start:end])


def print_samples(console: Console, tokenizer: Any, name: str, samples: Sequence[Sample]) -> None:
    """Samples as text; supervised tokens are colored, or between ``⟦`` and ``⟧`` where there is no color."""
    marks = console.color_system is None or console.no_color
    how = f"between {_OPEN} and {_CLOSE}" if marks else "green"
    _line(console, Text(f"supervised tokens are {how}, ⟨U+001B⟩ is a character that is not printed as it is"))
    for number, (ids, supervised) in enumerate(samples):
        title = f"\n━━ {name} {number}: {len(ids):,} tokens, {np.count_nonzero(supervised):,} supervised"
        _line(console, Text(title, _HEAD))
        text, inside = Text(), False
        for said, is_supervised, is_special in [*pieces(tokenizer, ids, supervised), ("", False, False)]:
            if marks and is_supervised != inside:
                text.append(_OPEN if is_supervised else _CLOSE)
            inside = is_supervised
            text.append(visible(said), " ".join([_SUPERVISED] * is_supervised + [_SPECIAL] * is_special))
        _line(console, text)


def _line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True, highlight=False)
