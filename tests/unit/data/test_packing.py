"""Items of a split: packs that are full on real lengths, per source; rows held out by val_split."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig, SourceConfig
from lit_fsdp.data.packing import Samples, plan_packs, prepare_samples
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import encoder_of
from tests.unit.data.conversations import LETTERS as TEMPLATE

LENGTHS = Path(__file__).parent / "lengths"


def test_real_samples_fill_their_packs():
    """Lengths of real rows under the SmolLM2 tokenizer; files of numbers, as the rows are other people's."""
    for name in ("jargon", "dates", "prose"):
        lengths = np.array((LENGTHS / f"{name}.txt").read_text().partition("\n")[2].split(), dtype=np.int64)
        members, offsets = plan_packs(lengths, 512)
        assert sorted(members.tolist()) == list(range(len(lengths)))
        fills = np.add.reduceat(lengths[members], offsets[:-1])
        assert fills.max() <= 512
        assert fills.mean() / 512 >= 0.98
        firsts = [int(members[start]) for start in offsets[:-1]]
        assert firsts == sorted(firsts)  # so that a file that is not shuffled is trained on in its order
        assert all((np.diff(members[a:b]) > 0).all() for a, b in pairwise(offsets.tolist()))


# -- items of a split


def _row(number: int, **more: Any) -> str:
    turns = [("user", f"u{number}"), ("assistant", "x" * (1 + number % 13))]
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns], **more})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(_row(n) for n in range(100)))
    return path


def _prepare(tokenizer: Any, source: Path, splits: tuple[str, ...] = ("train", "val"), **options: Any) -> Any:
    names = {"train": str(source), "cache_dir": str(source.parent / "cache"), "max_seq_length": 32}
    config = DataConfig(**{**names, **options})
    return prepare_samples(config, splits, encoder_of(tokenizer, config, TEMPLATE))


def _contents(samples: Samples) -> list[bytes]:
    return [samples.rows.row(int(row))[0].tobytes() for row in samples.row_ids]


def test_packs_of_each_split_alone(small: Any, source: Path):
    found = _prepare(small, source, ("train", "val", "predict"), packing=True, val_split=20, predict=str(source))
    for split in ("train", "val"):
        samples = found[split]
        assert samples.capacity == 32
        assert 0 < samples.item_tokens().max() <= 32
        members = np.concatenate([samples.members(item) for item in range(len(samples))])
        assert sorted(members) == sorted(set(members.tolist()))
        assert len(samples) < len(members)
    assert not set(_contents(found["train"])) & set(_contents(found["val"]))
    assert (found["predict"].capacity, len(found["predict"])) == (None, 100)


@pytest.mark.parametrize(("val_split", "least", "most"), [(7, 7, 7), (1, 1, 1), (99, 99, 99), (0.3, 15, 45)])
def test_rows_held_out(small: Any, source: Path, val_split: float, least: int, most: int):
    """As many as asked for, none on both sides, and the same ones wherever they stand in the file."""
    found = _prepare(small, source, val_split=val_split)
    assert least <= len(found["val"]) <= most
    held_out = set(_contents(found["val"]))
    assert len(found["train"]) + len(found["val"]) == 100
    assert not held_out & set(_contents(found["train"]))
    source.write_text("\n".join(_row(n, id=n) for n in reversed(range(100))))
    assert set(_contents(_prepare(small, source, val_split=val_split)["val"])) == held_out


def test_copies_and_pieces_are_on_one_side(small: Any, source: Path):
    source.write_text("\n".join(_row(n % 20) for n in range(100)))
    found = _prepare(small, source, val_split=30)
    assert not set(_contents(found["val"])) & set(_contents(found["train"]))
    source.write_text("\n".join(json.dumps({"text": f"text {n} " * 20}) for n in range(20)))
    found = _prepare(small, source, val_split=5)
    numbers = {split: set(samples.rows.numbers[samples.row_ids].tolist()) for split, samples in found.items()}
    assert (len(numbers["val"]), len(numbers["train"])) == (5, 15)
    assert not numbers["val"] & numbers["train"]
    assert len(found["val"]) > 5
    for val_split in (20, 1000, 1e-9, 1 - 1e-9):
        with pytest.raises(DataError, match=r"takes \d+ of 20 rows\n.*\n  fix:     set data\.val_split: 2$"):
            _prepare(small, source, val_split=val_split)


def test_the_order_is_another_one_with_another_split_or_packs(small: Any, source: Path):
    variants: list[dict[str, Any]] = [
        {},
        {"val_split": 10},
        {"val_split": 11},
        {"packing": True},
        {"packing": True, "max_seq_length": 40},
        {"train": [SourceConfig(source=str(source), weight=2.0)]},
    ]
    found = [_prepare(small, source, ("train",), **options)["train"] for options in variants]
    assert len({samples.order_fingerprint for samples in found}) == len(variants)
    again = _prepare(small, source, ("train",), val_split=10)["train"]
    assert again.order_fingerprint == found[1].order_fingerprint


def _mix(source: Path, *numbers: range) -> list[SourceConfig]:
    entries = []
    for part, rows in enumerate(numbers):
        path = source.with_name(f"part{part}.jsonl")
        path.write_text("\n".join(_row(n) for n in rows))
        entries.append(SourceConfig(source=str(path), weight=part + 1.5))
    return entries


@pytest.mark.parametrize("options", [{}, {"packing": True}, {"packing": True, "val_split": 0.2}])
def test_packs_of_a_mix_have_rows_of_one_source(small: Any, source: Path, options: dict[str, Any]):
    train = _mix(source, range(60), range(60, 80), range(80, 130))
    samples = _prepare(small, source, train=train, **options)["train"]
    assert samples.weights == (1.5, 2.5, 3.5)
    assert sum(samples.groups) == len(samples)
    item = 0
    for items, rows in zip(samples.groups, (range(60), range(60, 80), range(80, 130)), strict=True):
        for _ in range(items):
            assert set(samples.members(item).tolist()) <= set(rows)
            item += 1


def test_weights_that_cannot_count_are_refused_before_training(small: Any, source: Path):
    first, second = _mix(source, range(20), range(20, 40))
    train = [replace(first, weight=1e6), replace(second, weight=1.0)]
    with pytest.raises(ConfigError, match=r"weight 1 of 1e\+06 for source 2\n.* one of the 40 samples"):
        _prepare(small, source, ("train",), train=train)
    with pytest.raises(DataError, match=r"source [12] of the 2 in data\.train has a weight but no row left"):
        _prepare(small, source, train=_mix(source, range(60), range(200, 201)), val_split=60)
    with pytest.raises(ConfigError, match=r"^val: got a source with a weight\n  allowed: none"):
        DataConfig(val=[SourceConfig(source="a.jsonl", weight=1.0)])
