"""Batches of a stream: in the same order with loader processes, with a position for every step, and errors in words."""

from __future__ import annotations

import json
import logging
import multiprocessing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data import saved, stream
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.generated import generated_rows
from lit_fsdp.data.saved import StreamedPart
from lit_fsdp.data.sources import Source
from lit_fsdp.data.stream import SampleStream, Share
from lit_fsdp.data.stream_loader import StreamLoader
from lit_fsdp.errors import DataError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in generated_rows(30)))
    return path


def _loader(small: Any, path: Path, **options: Any) -> StreamLoader:
    given = {"train": str(path), "streaming": True, "global_batch_size": 4, "shuffle_window": 9, **options}
    config = DataConfig(**given)
    return StreamLoader(SampleStream(config, RowEncoder(small, config, TEMPLATE), 3), Share(0, 1, 2), 0, config)


def _ids(batches: Any) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() for batch in batches]


def test_loader_processes_change_nothing(small: Any, rows: Path):
    alone = list(islice(_loader(small, rows), 14))
    assert [set(batch) for batch in alone] == [{"input_ids", "attention_mask", "labels", "row", "counts"}] * 14
    assert _ids(islice(_loader(small, rows, num_workers=2), 14)) == _ids(alone)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_loader_processes_lose_no_row_of_datasets(
    small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_shards: int
):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p{i}", "completion": "c" * (1 + i % 5)} for i in range(30)]

    def find_sources(*_: Any, **__: Any) -> list[Source]:
        loaded = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=num_shards)
        return [Source("name", (StreamedPart("name", loaded, "name"),))]

    monkeypatch.setattr(saved, "_ROWS", 5)
    monkeypatch.setattr(stream, "find_sources", find_sources)
    alone = _loader(small, Path("name"))
    batches = list(islice(alone, 40))
    assert len({tuple(row[row != 0].tolist()) for batch in batches[:15] for row in batch["input_ids"]}) == 30
    with caplog.at_level(logging.INFO):
        together = _loader(small, Path("name"), num_workers=2)
    assert "data.num_workers 2: a stream of datasets is read by one loader process" in caplog.text
    assert _ids(islice(together, 40)) == _ids(batches)
    for num_workers in (0, 2):
        resumed = _loader(small, Path("name"), num_workers=num_workers)
        resumed.begin = lambda: (8, json.loads(json.dumps(together.position(8))))
        assert _ids(islice(resumed, 24)) == _ids(batches[16:])


def test_from_the_position_of_any_step(small: Any, rows: Path):
    loader = _loader(small, rows, packing=True, max_seq_length=200)
    assert loader.position(0) is None
    batches, positions = [], []
    for number, batch in enumerate(islice(loader, 12), start=1):
        batches.append(batch)
        if number % 2 == 0:
            positions.append(json.loads(json.dumps(loader.position(number // 2))))
    assert {"position_ids", "row"} <= set(batches[0])
    for step in (1, 3, 5):
        resumed = _loader(small, rows, packing=True, max_seq_length=200)
        resumed.begin = lambda step=step: (step, positions[step - 1])  # type: ignore[misc]
        assert resumed.position(step) == positions[step - 1]
        assert _ids(islice(resumed, 12 - 2 * step)) == _ids(batches[2 * step :])
        assert resumed.position(6) == positions[5]


def test_fitting_once_more_goes_on(small: Any, rows: Path):
    whole = _ids(islice(_loader(small, rows), 8))
    loader = _loader(small, rows)
    first = _ids(islice(loader, 4))
    loader.begin = lambda: (2, None)
    assert first + _ids(islice(loader, 4)) == whole


def test_a_step_without_a_position_is_said(small: Any, rows: Path, caplog: pytest.LogCaptureFixture):
    loader = _loader(small, rows)
    loader.begin = lambda: (7, None)
    with caplog.at_level(logging.WARNING):
        next(iter(loader))
    assert "the checkpoint of step 7 has no position in a stream, which begins at its first rows" in caplog.text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_row_is_named_without_a_traceback(small: Any, rows: Path, num_workers: int):
    with rows.open("a") as file:
        file.write('{"messages": 3}\n')
    loader = _loader(small, rows, shuffle=False, num_workers=num_workers)
    with pytest.raises(DataError) as refused:
        list(islice(loader, 20))
    assert str(refused.value).startswith(f"{rows}:31: a conversation is a list")
    assert "Traceback" not in str(refused.value)
    assert multiprocessing.active_children() == []


def test_what_every_rank_has_to_do_is_said(small: Any, rows: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        _loader(small, rows)
        assert "every rank tokenises" not in caplog.text
        _loader(small, rows, packing=True, num_workers=3)
    assert (
        "packs depend on the lengths of all rows of a window, so every rank tokenises every row, in one" in caplog.text
    )


def test_a_place_without_anything_to_learn_is_a_filler(small: Any, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path.write_text("".join(json.dumps({"messages": talk[: 1 + i % 2]}) + "\n" for i in range(4)))
    batches = list(islice(_loader(small, path, shuffle=False), 2))
    assert [batch["row"].tolist() for batch in batches] == [[-1, 1], [-1, 3]]
    for batch in batches:
        assert (batch["labels"][0] == -100).all()
        assert torch.equal(batch["counts"][1], torch.tensor(1))
