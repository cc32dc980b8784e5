"""Samples as text: color or marks, nothing raw, nothing endless."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.report.data_tables import histogram_bars
from lit_fsdp.report.inspection import Item, Shown
from lit_fsdp.report.sample_text import pieces, print_items


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def printed(shown: Shown, with_ids: bool = False, in_full: bool = False, **options: Any) -> str:
    console = Console(file=io.StringIO(), **options)
    print_items(console, miniature_tokenizer(), [Item("one", [shown])], with_ids, in_full)
    return console.file.getvalue()  # type: ignore[attr-defined]


def sample(question: str, answer: str) -> Shown:
    encoder = RowEncoder(miniature_tokenizer(), DataConfig(max_seq_length=2**20))
    (one,) = encoder.encode([chat(question, answer)], "messages", ["x"])[0].samples
    return Shown("x", one.input_ids, one.supervised)


def test_color_takes_the_place_of_marks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = printed(sample("a", "b"), force_terminal=True, color_system="standard")
    assert "\x1b[1;32mb" in colored
    assert "⟦" not in colored
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed(sample("a", "b"), force_terminal=True, color_system="standard")
    assert "\x1b[1mb" in plain  # bold is no color
    assert plain.count("⟦") == plain.count("⟧") == 2  # the legend, and the sample
    assert "\x1b" not in printed(sample("a", "b"))


def test_long_samples_are_shortened_unless_asked_for():
    long = sample("q" * 9_000, "w " * 4_000)
    short = printed(long)
    assert len(short) < 5_000
    assert "left out" in short
    many = "".join(f"{i}\n" for i in range(1500))
    assert "tokens left out here, --full shows them" in printed(sample("a", many), with_ids=True)
    assert printed(long, in_full=True).count("w ") > 3_900


def test_characters_of_several_tokens_are_whole():
    one = sample("日本", "héllo 🎉")
    text = "".join(piece.text for piece in pieces(miniature_tokenizer(), one))
    assert "日本" in text
    assert "héllo 🎉" in text


def test_bars_show_whatever_is_not_empty():
    assert histogram_bars([0, 1, 1000, 500]) == " ▁█▄"
    assert histogram_bars([0, 0]) == "  "
