"""Samples to look at, as styled text and as plain data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from lit_fsdp.report.inspection import Item, Shown
from lit_fsdp.report.sample_text import CLOSE, OPEN, pieces, sample_text, shortened, visible

_HEAD, _NOTE, _BAD = "bold cyan", "dim italic", "bold red"
_MAX_CHARACTERS = 4000
_MAX_TOKENS = 1000
_MAX_ROW_CHARACTERS = 600


@dataclass(frozen=True)
class Look:
    """How samples are shown."""

    with_ids: bool = False
    """Every token alone, with its number behind it."""
    in_full: bool = False
    """Nothing shortened."""


def print_items(console: Console, tokenizer: Any, items: Sequence[Item], look: Look) -> None:
    """Rendered samples; supervised tokens are coloured, or between ``⟦`` and ``⟧`` where there is no colour."""
    marks = console.color_system is None or console.no_color
    for item in items:
        _line(console, f"\n━━ {item.title}", _HEAD)
        position = 0
        for number, shown in enumerate(item.samples):
            where = f"sample {number + 1} of {len(item.samples)}, " if len(item.samples) > 1 else ""
            if item.capacity is not None:
                where += f"position {position:,} to {position + len(shown.input_ids) - 1:,} of the pack, "
            position += len(shown.input_ids)
            _line(console, f"── {where}{visible(shown.place)}: {_counts(shown)}", _HEAD)
            _print_sample(console, tokenizer, shown, look, marks)
        if item.capacity is not None and position < item.capacity:
            _line(console, f"── {item.capacity - position:,} tokens of padding, never learnt", _NOTE)


def explanation(console: Console) -> Text:
    """One line on what the signs mean, for whoever sees them for the first time."""
    marks = console.color_system is None or console.no_color
    text = Text("learnt: ")
    if marks:
        text.append(f"{OPEN}like this{CLOSE}; special tokens stand as they are; ")
    else:
        text.append("like this", "bold green").append("; special tokens: ").append("like this", "reverse").append("; ")
    return text.append("↵ line break, ⇥ tab, ⟨U+001B⟩ a character without a picture", None)


def item_record(tokenizer: Any, item: Item) -> dict[str, Any]:
    """An item for machines: ids, mask and text of every sample, complete and exact."""
    return {
        "title": item.title,
        "capacity": item.capacity,
        "samples": [_record(tokenizer, one) for one in item.samples],
    }


def _record(tokenizer: Any, shown: Shown) -> dict[str, Any]:
    parts = pieces(tokenizer, shown.input_ids, shown.supervised)
    return {
        "place": shown.place,
        "input_ids": shown.input_ids.tolist(),
        "supervised": np.asarray(shown.supervised).astype(int).tolist(),
        "pieces": [{"text": p.text, "supervised": p.supervised, "special": p.special} for p in parts],
        "cut": shown.cut,
        "dropped": shown.dropped,
    }


def _counts(shown: Shown) -> str:
    total, learnt = len(shown.input_ids), int(np.asarray(shown.supervised).sum())
    if not total:
        return "no tokens"
    return f"{total:,} tokens, {learnt:,} supervised ({learnt / total:.1%})"


def _print_sample(console: Console, tokenizer: Any, shown: Shown, look: Look, marks: bool) -> None:
    if shown.dropped is not None:
        _line(console, f"not trained on: {visible(shown.dropped)}", _BAD)
    if shown.columns is not None:
        content = json.dumps(shown.columns, ensure_ascii=False, default=str)
        _line(console, visible(content if look.in_full else _short(content)), None)
    if shown.cut and shown.cut_at_start:
        _line(console, f"✂ {shown.cut}", _NOTE)
    border = shown.cut_after or len(shown.input_ids)
    _print_tokens(console, tokenizer, replace(shown, **_part(shown, 0, border)), look, marks)
    if shown.cut_after is not None and shown.cut_after < len(shown.input_ids):
        _line(console, f"✂ data.max_seq_length {shown.cut_after:,}: what follows is beyond it", _NOTE)
        rest = replace(shown, **_part(shown, border, len(shown.input_ids)))
        _print_tokens(console, tokenizer, rest, look, marks)
    if shown.cut and not shown.cut_at_start:
        _line(console, f"✂ {shown.cut}", _NOTE)


def _part(shown: Shown, start: int, end: int) -> dict[str, Any]:
    return {"input_ids": shown.input_ids[start:end], "supervised": shown.supervised[start:end]}


def _print_tokens(console: Console, tokenizer: Any, shown: Shown, look: Look, marks: bool) -> None:
    if not len(shown.input_ids):
        return
    most = None if look.in_full else _MAX_TOKENS
    parts = pieces(tokenizer, shown.input_ids, shown.supervised, look.with_ids, most)
    parts = parts if look.in_full else shortened(parts, _MAX_CHARACTERS)
    text = sample_text(parts, marks, np.asarray(shown.input_ids) if look.with_ids else None)
    text.rstrip()
    console.print(text, soft_wrap=True, highlight=False)


def _short(text: str) -> str:
    half = _MAX_ROW_CHARACTERS // 2
    if len(text) <= 2 * half:
        return text
    return f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"


def _line(console: Console, text: str, style: str | None) -> None:
    console.print(Text(text, style or ""), soft_wrap=True, highlight=False)
