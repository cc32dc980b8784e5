"""What is about to be trained on as plain data: counts by hand, and of a stream its first rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.packing import prepare_samples
from lit_fsdp.data.stats import describe_data, first_samples
from lit_fsdp.errors import DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.unit.data.conversations import say


def _described(path: Path, *rows: tuple[str, ...], **options: Any) -> dict[str, Any]:
    path.write_text("".join(json.dumps({"messages": say(*turns)}) + "\n" for turns in rows))
    config = DataConfig(train=str(path), max_seq_length=64, num_tokenizers=1, cache_dir=str(path.parent), **options)
    encoder = RowEncoder(miniature_tokenizer(), config)
    samples = {"train": first_samples(config, encoder)} if config.streaming else {}
    samples |= {} if config.streaming else prepare_samples(config, ["train"], encoder)
    described: dict[str, Any] = json.loads(json.dumps(describe_data(samples, config, encoder)))["splits"]["train"]
    return described


def test_counts(tmp_path: Path):
    split = _described(tmp_path / "t.jsonl", ("u:a", "a:b"), ("u:x",), ("u:" + "q" * 100, "a:z"), ("u:c", "a:d"))
    assert (split["rows_read"], split["samples"], split["packs"]) == (4, 2, None)
    assert split["dropped"] == {"without a supervised token": 1, "cut before the assistant's turn": 1}
    assert split["supervised_share"] == split["supervised_tokens"] / split["tokens"]
    assert Path(split["from"]).is_dir()


def test_of_a_stream_the_first_rows_are_looked_at(tmp_path: Path):
    """By the same numbers as of rows that are tokenized as a whole."""
    rows = [("u:" + "q" * (100 * (i == 3)) + str(i % 7), "a:" + "x" * (i % 5 + 1)) for i in range(1500)]
    split = _described(tmp_path / "t.jsonl", *rows, packing=True, streaming=True)
    assert (split.pop("from"), split.pop("sources")[0]["format"]) == ("the first 1,000 rows of a stream", "messages")
    whole = _described(tmp_path / "t.jsonl", *rows[:1000], packing=True)
    assert {name: whole[name] for name in split} == split
    with pytest.raises(DataError, match="the first 1 rows of a stream: no token of any row is supervised"):
        _described(tmp_path / "t.jsonl", ("u:only asked",), streaming=True)
