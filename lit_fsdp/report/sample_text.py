"""Samples for people to read: what is supervised stands out, special tokens show, nothing reaches the terminal raw.

Rows come from anywhere, and a control character that is printed as it is can move the cursor, change colors or hide
text. So whatever has no picture of its own is shown by its number: an escape becomes ``⟨U+001B⟩``.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from lit_fsdp.report.inspection import Item, Shown

_OPEN, _CLOSE = "⟦", "⟧"
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))  # controls, directions, halves of pairs, line separators
_JOINERS = "\u200c\u200d"  # part of how Persian words and emoji are written
_BLANKS = {"\n": "↵\n", "\t": "⇥   "}
_HEAD, _NOTE, _BAD, _SUPERVISED, _SPECIAL = "bold cyan", "dim italic", "bold red", "bold green", "reverse"
_MOST_TOKENS = 600
_MOST_CHARACTERS = 600


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


@dataclass(frozen=True)
class Piece:
    """Neighboring tokens of one kind."""

    text: str
    """As decoded; not safe to print."""
    supervised: bool
    special: bool
    """Whether it is one special token."""
    start: int
    """Position of its first token."""
    num_tokens: int


def pieces(tokenizer: Any, shown: Shown, one_by_one: bool = False, most_tokens: int | None = None) -> list[Piece]:
    """A sample as text, cut where supervision changes and around special tokens.

    Args:
        tokenizer: Of transformers; a token is decoded with the one before it, as some drop a blank at the beginning.
        shown: The sample.
        one_by_one: Every token a piece of its own.
        most_tokens: Only so many tokens of a longer sample, from its two ends.
    """
    ids, supervised = np.asarray(shown.input_ids), np.asarray(shown.supervised).astype(bool)
    if not len(ids):
        return []
    special_ids = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
    special = np.isin(ids, special_ids)
    new = np.full(len(ids), one_by_one)
    new[0] = True
    new[1:] |= (supervised[1:] != supervised[:-1]) | special[1:] | special[:-1]
    left_out = range(0)
    if most_tokens is not None and len(ids) > most_tokens:
        left_out = range(most_tokens // 2, len(ids) - most_tokens // 2)
        new[[left_out.start, left_out.stop]] = True
    starts = np.flatnonzero(new).tolist()
    runs = [(a, b) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True) if a not in left_out]
    whole = ids.tolist()
    return [Piece(_decoded(tokenizer, whole, a, b), bool(supervised[a]), bool(special[a]), a, b - a) for a, b in runs]


def _decoded(tokenizer: Any, ids: list[int], start: int, end: int) -> str:
    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    if start:
        before, both = decode(ids[start - 1 : start]), decode(ids[start - 1 : end])
        if both.startswith(before):
            return both[len(before) :]
    return decode(ids[start:end])


def item_record(tokenizer: Any, item: Item) -> dict[str, Any]:
    """An item for machines: ids, mask and text of every sample, complete and exact."""
    samples = [
        {
            "location": shown.location,
            "input_ids": shown.input_ids.tolist(),
            "supervised": np.asarray(shown.supervised).astype(int).tolist(),
            "pieces": [
                {"text": piece.text, "supervised": piece.supervised, "special": piece.special}
                for piece in pieces(tokenizer, shown)
            ],
            "cut": shown.cut,
            "dropped": shown.dropped,
        }
        for shown in item.samples
    ]
    return {"title": item.title, "capacity": item.capacity, "samples": samples}


def print_items(
    console: Console, tokenizer: Any, items: Sequence[Item], with_ids: bool = False, in_full: bool = False
) -> None:
    """Rendered samples; supervised tokens are colored, or between ``⟦`` and ``⟧`` where there is no color.

    Args:
        console: Where to.
        tokenizer: Of transformers.
        items: What is shown.
        with_ids: Every token alone, with its number behind it.
        in_full: Nothing shortened.
    """
    marks = console.color_system is None or console.no_color
    legend = Text("supervised: ")
    if marks:
        legend.append(f"{_OPEN}like this{_CLOSE}; special tokens stand as they are; ")
    else:
        legend.append("like this", _SUPERVISED).append("; special tokens: ").append("like this", _SPECIAL).append("; ")
    console.print(legend.append("↵ line break, ⇥ tab, ⟨U+001B⟩ a character without a picture"), soft_wrap=True)
    for item in items:
        _line(console, f"\n━━ {item.title}", _HEAD)
        position = 0
        for number, shown in enumerate(item.samples):
            where = f"sample {number + 1} of {len(item.samples)}, " if len(item.samples) > 1 else ""
            if item.capacity is not None:
                where += f"position {position:,} to {position + len(shown.input_ids) - 1:,} of the pack, "
            position += len(shown.input_ids)
            _line(console, f"── {where}{visible(shown.location)}: {_counts(shown)}", _HEAD)
            if shown.dropped is not None:
                _line(console, f"not trained on: {visible(shown.dropped)}", _BAD)
            if shown.columns is not None:
                content = json.dumps(shown.columns, ensure_ascii=False, default=str)
                left_out = "" if in_full or len(content) <= _MOST_CHARACTERS else " …, --full shows the rest"
                _line(console, visible(content if in_full else content[:_MOST_CHARACTERS]) + left_out, "")
            found = pieces(tokenizer, shown, with_ids, None if in_full else _MOST_TOKENS)
            if found:
                text = _sample_text(found, marks, shown.input_ids if with_ids else None)
                console.print(text, soft_wrap=True, highlight=False)
            if shown.cut:
                _line(console, f"✂ {shown.cut}", _NOTE)
        if item.capacity is not None and position < item.capacity:
            _line(console, f"── {item.capacity - position:,} tokens of padding, never supervised", _NOTE)


def _line(console: Console, text: str, style: str) -> None:
    console.print(Text(text, style), soft_wrap=True, highlight=False)


def _counts(shown: Shown) -> str:
    total, supervised = len(shown.input_ids), int(np.asarray(shown.supervised).sum())
    return f"{total:,} tokens, {supervised:,} supervised ({supervised / total:.1%})" if total else "no tokens"


def _sample_text(found: Sequence[Piece], marks: bool, input_ids: np.ndarray | None) -> Text:
    text, inside, position = Text(), False, 0
    for piece in found:
        if piece.start > position:
            text.append(f"\n… {piece.start - position:,} tokens left out here, --full shows them …\n", _NOTE)
        if marks and piece.supervised != inside:
            text.append(_OPEN if piece.supervised else _CLOSE)
        inside, position = piece.supervised, piece.start + piece.num_tokens
        styles = [_SUPERVISED] * piece.supervised + [_SPECIAL] * piece.special
        text.append(visible(piece.text), " ".join(styles))
        if input_ids is not None:
            text.append(f"[{' '.join(map(str, input_ids[piece.start : position].tolist()))}]", "dim")
    if marks and inside:
        text.append(_CLOSE)
    text.rstrip()
    return text
