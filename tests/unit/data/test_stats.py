"""The supervision proof as plain data: counts by hand, sources, packs and what is warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig, SourceConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.packing import prepare_samples
from lit_fsdp.data.stats import SampleNumbers, describe_data, first_rows
from lit_fsdp.errors import DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer


def _chat(question: str, answer: str | None = None) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"messages": turns + ([] if answer is None else [{"role": "assistant", "content": answer}])}


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))


def _describe(**options: Any) -> dict[str, Any]:
    config = DataConfig(**{"max_seq_length": 64, "num_tokenizers": 1, **options})
    encoder = RowEncoder(miniature_tokenizer(), config)
    return describe_data(prepare_samples(config, ["train", "val"], encoder), config, encoder)


def test_counts_and_warnings(tmp_path: Path):
    train = [_chat("a", "b"), _chat("a", "b"), _chat("x"), _chat("q" * 100, "z"), _chat("c", "d"), _chat("e", "f")]
    names = {"train": _write(tmp_path / "t.jsonl", train), "val": _write(tmp_path / "v.jsonl", train[:1] + train[4:5])}
    record = _describe(**names)
    split = record["splits"]["train"]
    assert (split["rows_read"], split["samples"], split["duplicates"]) == (6, 4, 1)
    assert split["dropped"] == {"without an assistant turn": 1, "cut before the assistant's turn": 1}
    assert split["supervised_share"] == split["supervised_tokens"] / split["tokens"]
    assert sum(split["supervised_share_histogram"]) == 4
    assert split["tokens_per_epoch"] == split["tokens"]
    assert Path(split["cache"]).is_dir()
    text = "\n".join(record["warnings"])
    assert "data.val: 2 of 2 samples are in data.train too" in text
    assert "data.train: 2 of 6 rows dropped: 1 without an assistant turn, 1 cut before the assistant's turn" in text
    assert "data.train: 1 of 4 samples are copies" in text
    json.dumps(record)


def test_numbers_by_hand():
    numbers = SampleNumbers(np.array([100, 10, 4]), np.array([30, 0, 4]), np.array([1, 2, 2], np.uint64)).describe()
    assert numbers["supervised_share_histogram"] == [1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    assert numbers["lengths"] == {"min": 4, "median": 10, "mean": 38, "p95": 91, "max": 100}
    assert (numbers["samples"], numbers["duplicates"], numbers["tokens"]) == (3, 1, 114)
    nothing = np.zeros(0, np.int64)
    assert SampleNumbers(nothing, nothing, nothing).describe()["lengths"]["max"] == 0


def test_packs_and_padding(tmp_path: Path):
    rows = [_chat(str(i), "x" * (i % 9 + 1)) for i in range(40)]
    train = _describe(train=_write(tmp_path / "t.jsonl", rows), packing=True, micro_batch_size=4)["splits"]["train"]
    packs = train["packs"]
    assert packs["fill"] == pytest.approx(train["tokens"] / (packs["count"] * 64))
    assert packs["count"] < train["samples"] == 40
    longest, mean = train["lengths"]["max"], train["lengths"]["mean"]
    assert 0 < train["padding_share_unpacked"] < 1 - mean / longest


def test_val_split_says_where_its_rows_come_from(tmp_path: Path):
    train = _write(tmp_path / "rows.jsonl", [_chat(str(i), "x") for i in range(20)])
    splits = _describe(train=train, val_split=5)["splits"]
    assert (splits["train"]["samples"], splits["val"]["samples"]) == (15, 5)
    assert splits["train"]["rows_read"] == 20
    assert (splits["val"]["rows_read"], splits["val"]["taken_out_of"]) == (None, "data.train")
    assert splits["val"]["in_train"] == 0
    assert [source["samples"] for source in splits["val"]["sources"]] == [5]


def test_sources_of_a_weighted_mix(tmp_path: Path):
    short = _write(tmp_path / "short.jsonl", [_chat("a", str(i)) for i in range(6)])
    long = _write(tmp_path / "long.jsonl", [_chat("a", "b" * 30 + str(i)) for i in range(2)])
    mix = [SourceConfig(source=short, weight=1.0), SourceConfig(source=long, weight=3.0)]
    train = _describe(train=mix)["splits"]["train"]
    first, second = train["sources"]
    assert [(s["name"], s["samples"], s["weight"], s["format"]) for s in (first, second)] == [
        (short, 6, 1.0, "messages"),
        (long, 2, 3.0, "messages"),
    ]
    assert first["tokens"] + second["tokens"] == train["tokens"]
    # 8 items per epoch: 2 of the 6 short ones, 6 of the 2 long ones
    assert train["tokens_per_epoch"] == 2 * first["tokens"] // 6 + 3 * second["tokens"]


def test_of_a_stream_the_first_rows_are_looked_at(tmp_path: Path):
    train = _write(tmp_path / "t.jsonl", [_chat(str(i), "x") for i in range(1500)])
    config = DataConfig(train=train, streaming=True, max_seq_length=64)
    encoder = RowEncoder(miniature_tokenizer(), config)
    split = describe_data({}, config, encoder, first_rows(config, encoder))["splits"]["train"]
    assert (split["seen"], split["rows_read"]) == ("the first 1,000 rows of a stream", 1000)
    bare = DataConfig(train=_write(tmp_path / "t.jsonl", [_chat("only asked")]), streaming=True)
    with pytest.raises(DataError, match="the first 1 rows of the stream: no token of any row is supervised"):
        first_rows(bare, encoder)
