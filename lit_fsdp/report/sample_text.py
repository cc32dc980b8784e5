"""Token ids as text for people: what is learnt stands out, special tokens show, nothing reaches the terminal raw.

Rows come from anywhere, and a control character that is printed as it is can move the cursor, change colours or hide
text. So whatever has no picture of its own is shown by its number: an escape becomes ``⟨U+001B⟩``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

OPEN, CLOSE = "⟦", "⟧"
"""Around what is learnt, where there is no colour."""
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))  # controls, directions, halves of pairs, line separators
_JOINERS = "\u200c\u200d"  # part of how Persian words and emoji are written
_BLANKS = {"\n": "↵\n", "\t": "⇥   "}
_LEARNT, _SPECIAL, _CONTEXT, _NOTE = "bold green", "reverse", "none", "dim italic"


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind."""

    text: str
    """As decoded; not safe to print."""
    supervised: bool
    special: bool
    """Whether it is one special token."""
    start: int
    """Position of its first token."""
    num_tokens: int


def pieces(
    tokenizer: Any,
    input_ids: np.ndarray,
    supervised: np.ndarray,
    one_by_one: bool = False,
    most_tokens: int | None = None,
) -> list[Piece]:
    """A sample as text, cut where supervision changes and around special tokens.

    Args:
        tokenizer: Of transformers; a token is decoded with the one before it, as some drop a blank at the beginning.
        input_ids: Shape (T,).
        supervised: Shape (T,), true where the token is learnt.
        one_by_one: Every token a piece of its own.
        most_tokens: Of a longer run of one kind only its two ends are decoded, as that takes time; so many tokens.
    """
    special_ids = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    ids, learnt = np.asarray(input_ids), np.asarray(supervised).astype(bool)
    if not len(ids):
        return []
    special = np.isin(ids, special_ids)
    new = np.ones(len(ids), dtype=bool)
    if not one_by_one:
        new[1:] = (learnt[1:] != learnt[:-1]) | special[1:] | special[:-1]
    starts = np.flatnonzero(new).tolist()
    whole = ids.tolist()
    runs = list(zip(starts, [*starts[1:], len(whole)], strict=True))
    if most_tokens is not None:
        half = max(1, most_tokens // 2)
        runs = [ends for run in _two_ends(runs, most_tokens) for ends in _long_run(run, half)]
    return [Piece(_decoded(tokenizer, whole, a, b), bool(learnt[a]), bool(special[a]), a, b - a) for a, b in runs]


def _two_ends(runs: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    return runs if len(runs) <= most else [*runs[: most // 2], *runs[len(runs) - most // 2 :]]


def _long_run(run: tuple[int, int], half: int) -> list[tuple[int, int]]:
    start, end = run
    return [run] if end - start <= 2 * half else [(start, start + half), (end - half, end)]


def _decoded(tokenizer: Any, ids: list[int], start: int, end: int) -> str:
    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    if start:
        before, both = decode(ids[start - 1 : start]), decode(ids[start - 1 : end])
        if both.startswith(before):
            return both[len(before) :]
    return decode(ids[start:end])


def visible(text: str) -> str:
    """``text`` without anything a terminal would act upon; line breaks and tabs keep their shape, behind a sign."""
    return "".join(_visible_character(character) for character in text)


def visible_lines(text: str) -> str:
    """The same for words of our own that quote a row or a file name: line breaks stay as they are."""
    return "\n".join(visible(line) for line in text.split("\n"))


def _visible_character(character: str) -> str:
    if character in _BLANKS:
        return _BLANKS[character]
    if unicodedata.category(character) in _UNSEEN and character not in _JOINERS:
        return f"⟨U+{ord(character):04X}⟩"
    return character


def sample_text(parts: Sequence[Piece], marks: bool, input_ids: np.ndarray | None = None) -> Text:
    """The pieces of a sample as one styled text.

    Args:
        parts: From :func:`pieces`; what is left out between two of them is said.
        marks: Put ``⟦…⟧`` around what is learnt, for places without colour.
        input_ids: Shown behind each piece, where given.
    """
    text, learning, position = Text(), False, 0
    for part in parts:
        if part.start > position:
            text.append(f"\n… {part.start - position:,} tokens left out here, --full shows them …\n", _NOTE)
        if marks and part.supervised != learning:
            text.append(OPEN if part.supervised else CLOSE)
        learning, position = part.supervised, part.start + part.num_tokens
        style = f"{_LEARNT if part.supervised else _CONTEXT}{' ' + _SPECIAL if part.special else ''}"
        text.append(visible(part.text), style.removeprefix("none ") or None)
        if input_ids is not None:
            numbers = " ".join(map(str, input_ids[part.start : position].tolist()))
            text.append(f"[{numbers}]", "dim")
    if marks and learning:
        text.append(CLOSE)
    return text


def shortened(parts: Sequence[Piece], max_characters: int) -> list[Piece]:
    """The first and last pieces of a long sample; a piece that is too long itself loses its middle.

    A border between what is learnt and what is not is always kept beside text of both kinds.
    """
    each = max(20, max_characters // max(1, len(parts)))
    parts = (
        [_without_middle(part, each) for part in parts] if sum(len(p.text) for p in parts) > max_characters else parts
    )
    budget = max_characters // 2
    head = _count_within(parts, budget)
    tail = _count_within(parts[::-1], budget)
    return list(parts) if head + tail >= len(parts) else [*parts[:head], *parts[len(parts) - tail :]]


def _without_middle(part: Piece, max_characters: int) -> Piece:
    text = part.text
    if len(text) <= max_characters:
        return part
    half = max_characters // 2
    left_out = len(text) - 2 * half
    shown = f"{text[:half]} … {left_out:,} characters left out … {text[len(text) - half :]}"
    return Piece(shown, part.supervised, part.special, part.start, part.num_tokens)


def _count_within(parts: Sequence[Piece], budget: int) -> int:
    used = 0
    for count, part in enumerate(parts):
        used += max(1, len(part.text))
        if used > budget:
            return max(1, count)
    return len(parts)
