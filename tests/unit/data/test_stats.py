"""The supervision proof as plain data: counts by hand, sources, packs and what is warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.packing import prepare_samples
from lit_fsdp.data.stats import describe_data, split_numbers
from lit_fsdp.errors import DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer


def _chat(question: str, answer: str | None = None) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"messages": turns + ([] if answer is None else [{"role": "assistant", "content": answer}])}


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _describe(cache: Path, **options: Any) -> dict[str, Any]:
    config = DataConfig(**{"max_seq_length": 64, "num_tokenizers": 1, "cache_dir": str(cache), **options})
    encoder = RowEncoder(miniature_tokenizer(), config)
    numbers = split_numbers(prepare_samples(config, ["train", "val"], encoder), config)
    record = describe_data(numbers, config, encoder)
    return json.loads(json.dumps(record))


def test_counts_and_warnings(tmp_path: Path):
    train = [_chat("a", "b"), _chat("a", "b"), _chat("x"), _chat("q" * 100, "z"), _chat("c", "d"), _chat("e", "f")]
    names = {"train": _write(tmp_path / "t.jsonl", train), "val": _write(tmp_path / "v.jsonl", train[:1] + train[4:5])}
    record = _describe(tmp_path, **names)
    split = record["splits"]["train"]
    assert (split["rows_read"], split["samples"], split["duplicates"]) == (6, 4, 1)
    assert split["dropped"] == {"without a supervised token": 1, "cut before the assistant's turn": 1}
    assert split["supervised_share"] == split["supervised_tokens"] / split["tokens"]
    assert Path(split["cache"]).is_dir()
    text = "\n".join(record["warnings"])
    assert "data.val: 2 of 2 samples are in data.train too" in text
    assert "data.train: 1 of 4 samples are copies" in text


def test_of_a_stream_the_first_rows_are_looked_at(tmp_path: Path):
    """By the same numbers as of rows that are tokenized as a whole."""
    rows = [_chat("q" * (100 * (i == 3)) + str(i % 7), "x" * (i % 5 + 1)) for i in range(1500)]
    train = _write(tmp_path / "t.jsonl", rows)
    config = DataConfig(train=train, streaming=True, max_seq_length=64, packing=True)
    encoder = RowEncoder(miniature_tokenizer(), config)
    split = describe_data(split_numbers({}, config, encoder), config, encoder)["splits"]["train"]
    assert (split["seen"], split["rows_read"]) == ("the first 1,000 rows of a stream", 1000)
    head = _write(tmp_path / "head.jsonl", rows[:1000])
    whole = _describe(tmp_path, train=head, packing=True)["splits"]["train"]
    assert {name: whole.get(name, split["seen"]) for name in split} == split
    bare = DataConfig(train=_write(tmp_path / "t.jsonl", [_chat("only asked")]), streaming=True)
    with pytest.raises(DataError, match="the first 1 rows of the stream: no token of any row is supervised"):
        split_numbers({}, bare, encoder)
