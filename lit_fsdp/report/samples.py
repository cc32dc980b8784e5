"""Rows for people to read: what is supervised stands out, special tokens show, nothing reaches the terminal raw.

Rows come from anywhere, and a control character that is printed as it is can move the cursor, change colors or hide
text. So whatever has no picture of its own is shown by its number: an escape becomes ``⟨U+001B⟩``.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.cache import encode_rows
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.sources import find_sources
from lit_fsdp.errors import DataError

_OPEN, _CLOSE = "⟦", "⟧"
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))  # controls, directions, halves of pairs, line separators
_JOINERS = "\u200c\u200d"  # part of how Persian words and emoji are written
_BLANKS = {"\n": "↵\n", "\t": "⇥   "}
_HEAD, _NOTE, _BAD, _SUPERVISED, _SPECIAL = "bold cyan", "dim italic", "bold red", "bold green", "reverse"


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
class Shown:
    """One sample to look at, or a row that gave none: without tokens, but with why it was dropped, and its columns."""

    location: str
    input_ids: np.ndarray
    supervised: np.ndarray
    truncated: bool = False
    dropped: str | None = None
    columns: dict[str, Any] | None = None


def show_rows(config: DataConfig, section: str, encoder: RowEncoder, numbers: Collection[int]) -> list[Shown]:
    """What becomes of some rows of a ``section``, by the same encoder as in training: samples, or why there is none.

    ``numbers`` count the rows over all sources, from 0; those that are not there are left out.
    """
    found: list[Shown] = []
    with suppress(DataError):  # of a file that cannot be read, which is said already: its first rows are what is left
        sources = find_sources(getattr(config, section), config, config.streaming and section == "train")
        rows = ((row, source.row_format) for source in sources for chunk in source.chunks() for row in chunk.rows())
        for number, ((location, row), form) in enumerate(islice(rows, max(numbers, default=-1) + 1)):
            if number in numbers:
                (encoded,), refused = encode_rows([(location, row)], form, encoder, True)
                found += [Shown(location, one.input_ids, one.supervised, encoded.truncated) for one in encoded.samples]
                if not encoded.samples:
                    reason = refused[0].removeprefix(f"{location}: ") if refused else encoded.dropped
                    columns = row if isinstance(row, dict) else None
                    found.append(Shown(location, np.zeros(0, int), np.zeros(0, bool), False, reason, columns))
    return found


@dataclass(frozen=True)
class Piece:
    """Neighboring tokens of one kind, or one special token; the text is not safe to print."""

    text: str
    supervised: bool
    special: bool


def pieces(tokenizer: Any, shown: Shown, one_by_one: bool = False) -> list[Piece]:
    """A sample as text, cut where supervision changes and around special tokens, or ``one_by_one`` token.

    A token is decoded with the one before it, as some tokenizers drop a blank at the beginning.
    """
    ids, supervised = shown.input_ids, shown.supervised
    special = np.isin(ids, [number for number, token in tokenizer.added_tokens_decoder.items() if token.special])
    new = np.full(len(ids), one_by_one)
    new[:1] = True
    new[1:] |= (supervised[1:] != supervised[:-1]) | special[1:] | special[:-1]
    starts, whole = np.flatnonzero(new).tolist(), ids.tolist()
    runs = zip(starts, [*starts[1:], len(whole)], strict=True) if starts else ()
    return [Piece(_decoded(tokenizer, whole, a, b), bool(supervised[a]), bool(special[a])) for a, b in runs]


def _decoded(tokenizer: Any, ids: list[int], start: int, end: int) -> str:
    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    before, both = decode(ids[max(0, start - 1) : start]), decode(ids[max(0, start - 1) : end])
    return both[len(before) :] if both.startswith(before) else decode(ids[start:end])


def print_samples(console: Console, tokenizer: Any, samples: Sequence[Shown], with_ids: bool = False) -> None:
    """Rendered samples; supervised tokens are colored, or between ``⟦`` and ``⟧`` where there is no color.

    ``with_ids`` shows every token alone, with its number behind it.
    """
    marks = console.color_system is None or console.no_color
    legend = Text("supervised: ")
    if marks:
        legend.append(f"{_OPEN}like this{_CLOSE}; special tokens stand as they are; ")
    else:
        legend.append("like this", _SUPERVISED).append("; special tokens: ").append("like this", _SPECIAL).append("; ")
    _line(console, legend.append("↵ line break, ⇥ tab, ⟨U+001B⟩ a character without a picture"))
    for shown in samples:
        total, supervised = len(shown.input_ids), int(shown.supervised.sum())
        counts = f"{total:,} tokens, {supervised:,} supervised ({supervised / total:.1%})" if total else "no tokens"
        _line(console, Text(f"\n━━ {visible(shown.location)}: {counts}", _HEAD))
        if shown.dropped is not None:
            _line(console, Text(f"not trained on: {visible(shown.dropped)}", _BAD))
        if shown.columns is not None:
            _line(console, Text(visible(json.dumps(shown.columns, ensure_ascii=False, default=str))))
        if total:
            _line(console, _sample_text(tokenizer, shown, marks, with_ids))
        if shown.truncated:
            _line(console, Text("✂ cut to data.max_seq_length (data.truncation)", _NOTE))


def _line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True, highlight=False)


def _sample_text(tokenizer: Any, shown: Shown, marks: bool, with_ids: bool) -> Text:
    text, inside = Text(), False
    for number, piece in enumerate(pieces(tokenizer, shown, with_ids)):
        if marks and piece.supervised != inside:
            text.append(_OPEN if piece.supervised else _CLOSE)
        inside = piece.supervised
        text.append(visible(piece.text), " ".join([_SUPERVISED] * piece.supervised + [_SPECIAL] * piece.special))
        if with_ids:
            text.append(f"[{shown.input_ids[number]}]", "dim")
    if marks and inside:
        text.append(_CLOSE)
    text.rstrip()
    return text
