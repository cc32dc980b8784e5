"""The supervision proof: every number of it against rows that can be counted by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.config.parser import build
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.report import describe_data
from lit_fsdp.data.row_numbers import (
    expected_padding,
    length_summary,
    num_duplicates,
    num_shared,
    share_histogram,
)
from lit_fsdp.data.samples import prepare_samples
from lit_fsdp.models.tokenizers import miniature_tokenizer


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 9])
def test_expected_padding_is_the_mean_over_all_batches(batch_size: int):
    lengths = array(7, 1, 3, 3, 12)
    drawn = min(batch_size, len(lengths))
    longest = np.mean([max(rows) for rows in itertools.combinations(lengths.tolist(), drawn)])
    assert expected_padding(lengths, batch_size) == pytest.approx(1 - lengths.mean() / longest, abs=1e-12)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_expected_padding_of_a_weighted_mix(batch_size: int):
    lengths, weights = array(2, 10, 4), np.array([3.0, 1.0, 1.0])
    chances = weights / weights.sum()
    mean = float(lengths @ chances)
    longest = sum(
        float(np.prod(chances[list(rows)])) * lengths[list(rows)].max()
        for rows in itertools.product(range(3), repeat=batch_size)
    )
    assert expected_padding(lengths, batch_size, weights) == pytest.approx(1 - mean / longest, abs=1e-12)


def test_no_rows_and_equal_rows_have_no_padding():
    assert expected_padding(array(), 4) == 0.0
    assert expected_padding(array(5, 5, 5), 2) == pytest.approx(0.0, abs=1e-12)


def test_expected_padding_of_a_million_rows():
    lengths = np.random.Generator(np.random.Philox(1)).integers(1, 100, 1_000_000)
    assert expected_padding(lengths, 8) == pytest.approx(1 - 50 / 89.4, abs=0.01)


def test_a_border_of_the_histogram_belongs_to_the_bin_below():
    lengths, learnt = array(100, 100, 100, 100, 10, 3), array(0, 30, 31, 1, 10, 1)
    expected = [1, 1, 0, 1, 2, 0, 0, 0, 0, 0, 1]
    assert share_histogram(lengths, learnt) == expected
    assert share_histogram(array(), array()) == [0] * 11


def test_lengths():
    assert length_summary(np.arange(1, 102)) == {"min": 1, "median": 51.0, "mean": 51.0, "p95": 96.0, "max": 101}
    assert length_summary(array())["max"] == 0


def test_copies_and_shared_rows():
    digests = np.array([5, 7, 5, 5, 9], dtype=np.uint64)
    assert num_duplicates(digests) == 2
    assert num_shared(digests, np.array([5, 1], dtype=np.uint64)) == 3


# -- of real files


def chat(question: str, answer: str | None) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"messages": turns + ([] if answer is None else [{"role": "assistant", "content": answer}])}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def describe(**options: Any) -> dict[str, Any]:
    config = build(DataConfig, options, "data")
    encoder = RowEncoder(miniature_tokenizer(), config)
    samples = prepare_samples(config, ("train", "val", "test", "predict"), encoder)
    return describe_data(samples, config, encoder)


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, str]:
    """Training rows: 2 of them the same, 1 without an answer, 1 too long; a validation row that is one of them."""
    train = [
        chat("a", "b"),
        chat("a", "b"),
        chat("a", None),
        chat("q" * 100, "never reached"),
        chat("c", "d" * 100),
        chat("e", "f"),
    ]
    return {
        "train": write(tmp_path / "train.jsonl", train),
        "val": write(tmp_path / "val.jsonl", [chat("a", "b"), chat("new", "one")]),
    }


def test_what_became_of_every_row(rows: dict[str, str], tmp_path: Path):
    record = describe(**rows, max_seq_length=40, micro_batch_size=2)
    train, val = record["splits"]["train"], record["splits"]["val"]
    assert train["rows_read"] == 6
    assert train["dropped"] == {"without an assistant turn": 1, "cut before the assistant's turn": 1}
    assert (train["samples"], train["duplicates"]) == (4, 1)
    assert train["truncated"] == 1  # the one of which nothing was left is dropped
    assert train["packs"] is None
    assert (val["samples"], val["duplicates"], val["in_train"], val["dropped"]) == (2, 0, 1, {})
    assert sum(train["supervised_share_histogram"]) == 4
    assert train["lengths"]["max"] == 40
    short = train["lengths"]["min"]
    assert train["tokens"] == train["tokens_per_epoch"] == 3 * short + 40
    # of "b<|im_end|>" both tokens are learnt, and of the long answer what fits
    assert train["supervised_tokens"] == 3 * 2 + 40 - (short - 2)
    assert 0 < train["padding_share_unpacked"] < 0.5
    assert Path(train["cache"]).is_dir()
    assert record["template"] == {"name": "the tokenizer's own", "generation_marks": True}
    text = "\n".join(record["warnings"])
    assert "data.val: 1 of 2 samples are in data.train too" in text
    assert "data.train: 2 of 6 rows dropped: 1 without an assistant turn, 1 cut before the assistant's turn" in text
    assert "data.train: 1 of 4 samples are copies" in text
    json.dumps(record)


def test_packs(rows: dict[str, str]):
    record = describe(**rows, max_seq_length=64, packing=True)
    train = record["splits"]["train"]
    packs = train["packs"]
    assert packs["capacity"] == 64
    assert packs["fill"] == pytest.approx(train["tokens"] / (packs["count"] * 64))
    assert packs["count"] < train["samples"]


def test_val_split_says_where_its_rows_come_from(tmp_path: Path):
    train = write(tmp_path / "rows.jsonl", [chat(str(i), "x") for i in range(20)])
    splits = describe(train=train, val_split=5)["splits"]
    assert (splits["train"]["samples"], splits["val"]["samples"]) == (15, 5)
    assert splits["train"]["rows_read"] == 20
    assert (splits["val"]["rows_read"], splits["val"]["taken_out_of"]) == (None, "data.train")
    assert splits["val"]["in_train"] == 0
    assert [source["samples"] for source in splits["val"]["sources"]] == [5]


def test_sources_of_a_weighted_mix(tmp_path: Path):
    short = write(tmp_path / "short.jsonl", [chat("a", str(i)) for i in range(6)])
    long = write(tmp_path / "long.jsonl", [chat("a", "b" * 30 + str(i)) for i in range(2)])
    mix = [{"source": short, "weight": 1.0}, {"source": long, "weight": 3.0}]
    train = describe(train=mix)["splits"]["train"]
    first, second = train["sources"]
    assert [(s["name"], s["samples"], s["weight"], s["format"]) for s in (first, second)] == [
        (short, 6, 1.0, "messages"),
        (long, 2, 3.0, "messages"),
    ]
    assert first["tokens"] + second["tokens"] == train["tokens"]
    # 8 items per epoch: 2 of the 6 short ones, 6 of the 2 long ones
    assert train["tokens_per_epoch"] == 2 * first["tokens"] // 6 + 3 * second["tokens"]
    assert train["padding_share_unpacked"] == 0.0  # one row to a micro-batch
