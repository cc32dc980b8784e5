"""Which rows are items of a split: val_split by content, packs per split and source, and what the order depends on."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig, SourceConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.samples import Samples, open_samples, prepare_samples
from lit_fsdp.errors import ConfigError, DataError

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '<s>' if add_generation_prompt }}"
)


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
    return prepare_samples(config, splits, RowEncoder(tokenizer, config, TEMPLATE))


def _contents(samples: Samples) -> list[bytes]:
    return [samples.rows.row(int(row))[0].tobytes() for row in samples.row_ids]


def test_without_packing_an_item_is_a_row(small: Any, source: Path):
    found = _prepare(small, source, ("train", "val", "test", "predict"), val=str(source))
    assert list(found) == ["train", "val"]
    train = found["train"]
    assert [train.members(item).tolist() for item in range(len(train))] == [[n] for n in range(100)]
    assert (train.groups, train.weights, train.capacity) == ((100,), None, None)
    assert train.order_fingerprint == train.rows.order_fingerprint
    assert train.fingerprint != train.rows.fingerprint
    assert train.item_tokens().tolist() == np.diff(train.rows.offsets).tolist()


def test_packs_of_each_split_alone(small: Any, source: Path):
    found = _prepare(small, source, ("train", "val", "predict"), packing=True, val_split=20, predict=str(source))
    for split in ("train", "val"):
        samples = found[split]
        assert samples.capacity == 32
        assert 0 < samples.item_tokens().max() <= 32
        assert samples.item_tokens().sum() == samples.meta["tokens"]
        members = np.concatenate([samples.members(item) for item in range(len(samples))])
        assert sorted(members) == sorted(set(members.tolist()))
        assert len(samples) < samples.meta["rows"] == len(members)
        assert samples.order_fingerprint != samples.rows.order_fingerprint
    assert not set(_contents(found["train"])) & set(_contents(found["val"]))
    assert (found["predict"].capacity, len(found["predict"])) == (None, 100)


@pytest.mark.parametrize(("val_split", "least", "most"), [(7, 7, 7), (1, 1, 1), (99, 99, 99), (0.3, 15, 45)])
def test_a_number_or_share_of_the_rows(small: Any, source: Path, val_split: float, least: int, most: int):
    found = _prepare(small, source, val_split=val_split)
    assert least <= len(found["val"]) <= most
    assert sorted([*found["train"].row_ids, *found["val"].row_ids]) == list(range(100))
    for samples in found.values():
        assert samples.meta["rows"] == len(samples)
        assert samples.meta["supervised_tokens"] == sum(int(samples.rows.row(i)[1].sum()) for i in samples.row_ids)


@pytest.mark.parametrize("val_split", [0.2, 20])
def test_the_split_is_of_the_content_alone(small: Any, sentencepiece: Any, source: Path, val_split: float):
    """Neither the order of the rows, nor further columns, nor the tokenizer moves a row to the other side."""
    first = _prepare(small, source, val_split=val_split)
    other = source.with_name("other.jsonl")
    lines = [_row(n, id=n) for n in range(100)]
    random.Random(1).shuffle(lines)
    other.write_text("\n".join(lines))
    second = _prepare(small, other, val_split=val_split)
    assert sorted(_contents(first["val"])) == sorted(_contents(second["val"]))
    assert _prepare(sentencepiece, source, val_split=val_split)["val"].row_ids.tolist() == first["val"].row_ids.tolist()


def test_a_share_leaves_rows_where_they_are_when_others_come(small: Any, source: Path):
    first = _prepare(small, source, val_split=0.2)
    source.write_text("\n".join(_row(n) for n in range(150)))
    second = _prepare(small, source, val_split=0.2)
    assert set(first["val"].row_ids.tolist()) == {row for row in second["val"].row_ids.tolist() if row < 100}


@pytest.mark.parametrize("val_split", [0.3, 30])
def test_duplicates_stay_together(small: Any, source: Path, val_split: float):
    source.write_text("\n".join(_row(n % 25, id=n) for n in range(100)))
    found = _prepare(small, source, val_split=val_split)
    assert not set(_contents(found["train"])) & set(_contents(found["val"]))
    assert len(found["val"]) % 4 == 0


def test_a_number_counts_rows_and_not_the_pieces_of_texts(small: Any, source: Path):
    texts = "\n".join(json.dumps({"text": f"{n} " + "word " * 40}) for n in range(20))
    source.write_text(texts)
    found = _prepare(small, source, val_split=5)
    numbers = {split: set(samples.rows.numbers[samples.row_ids].tolist()) for split, samples in found.items()}
    assert (len(numbers["val"]), len(numbers["train"])) == (5, 15)
    assert not numbers["val"] & numbers["train"]
    assert len(found["val"]) > 5
    with pytest.raises(DataError, match=r"val_split 20 takes 20 of 20 rows\n.*\n  fix:     set data\.val_split: 2$"):
        _prepare(small, source, val_split=20)


@pytest.mark.parametrize("val_split", [100, 1000, 1e-9, 1 - 1e-9])
def test_a_side_without_rows_is_refused(small: Any, source: Path, val_split: float):
    with pytest.raises(
        DataError, match=r"data\.val_split .* takes \d+ of 100 rows\n  allowed.*\n  fix:     set data\.v"
    ):
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


def test_a_weight_that_never_counts_is_refused_before_training(small: Any, source: Path):
    first, second = _mix(source, range(20), range(20, 40))
    train = [replace(first, weight=1e6), replace(second, weight=1.0)]
    for _ in range(2):  # also where it is taken from the cache
        with pytest.raises(ConfigError, match=r"weight 1 of 1e\+06 for source 2\n.* one of the 40 samples"):
            _prepare(small, source, ("train",), train=train)


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


def test_a_source_of_a_mix_that_is_all_validation(small: Any, source: Path):
    train = _mix(source, range(60), range(200, 201))
    with pytest.raises(DataError, match=r"source [12] of the 2 in data\.train has a weight but no row left"):
        _prepare(small, source, train=train, val_split=60)


def test_other_processes_get_folders_not_arrays(small: Any, source: Path):
    samples = _prepare(small, source, packing=True)["train"]
    sent = pickle.dumps(samples)
    assert len(sent) < 600
    assert pickle.loads(sent).row_ids.tolist() == samples.row_ids.tolist()
    assert not samples.row_ids.flags.writeable


@pytest.mark.parametrize("name", ["row_ids.bin", "offsets.bin", "meta.json"])
def test_damage_is_told(small: Any, source: Path, name: str):
    samples = _prepare(small, source)["train"]
    content = bytearray((samples.folder / name).read_bytes())
    content[3] ^= 8
    (samples.folder / name).write_bytes(content)
    with pytest.raises(
        DataError, match=rf"^{samples.folder}: damaged plan of samples .*\n  fix:     delete this folder"
    ):
        open_samples(samples.rows.folder, samples.folder)


def test_sources_are_read_once_for_both_sides(small: Any, source: Path, monkeypatch: pytest.MonkeyPatch):
    from lit_fsdp.data import samples

    read = []
    real = samples.prepare_rows
    monkeypatch.setattr(samples, "prepare_rows", lambda *args: read.append(args) or real(*args))
    _prepare(small, source, val_split=10)
    assert len(read) == 1


@pytest.mark.parametrize("split", ["val", "test", "predict"])
def test_weights_where_every_row_counts_once_are_refused(split: str):
    with pytest.raises(ConfigError, match=f"^{split}: got a source with a weight\n  allowed: none"):
        DataConfig(**{split: [SourceConfig(source="a.jsonl", weight=1.0)]})  # type: ignore[arg-type]
