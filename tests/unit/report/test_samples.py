"""Samples as text: color or marks, whole characters."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.report.samples import Shown, pieces, print_samples


def _sample(question: str, answer: str) -> Shown:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    encoder = RowEncoder(miniature_tokenizer(), DataConfig())
    (one,) = encoder.encode([{"messages": turns}], "messages", ["x"])[0].samples
    return Shown("x", one.input_ids, one.supervised)


def _printed(shown: Shown, **options: Any) -> str:
    console = Console(file=io.StringIO(), **options)
    print_samples(console, miniature_tokenizer(), [shown])
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_color_takes_the_place_of_marks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = _printed(_sample("a", "b"), force_terminal=True, color_system="standard")
    assert "\x1b[1;32mb" in colored
    assert "⟦" not in colored
    monkeypatch.setenv("NO_COLOR", "1")
    plain = _printed(_sample("a", "b"), force_terminal=True, color_system="standard")
    assert "\x1b[1mb" in plain  # bold is no color
    assert plain.count("⟦") == plain.count("⟧") == 2  # the legend, and the sample
    assert "\x1b" not in _printed(_sample("a", "b"))


def test_characters_of_several_tokens_are_whole():
    text = "".join(piece.text for piece in pieces(miniature_tokenizer(), _sample("日本", "héllo 🎉")))
    assert "日本" in text
    assert "héllo 🎉" in text
