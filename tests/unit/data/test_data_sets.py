"""Sources of the ``datasets`` package: by name, streamed, resumed."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.data.sources import Source, find_sources
from lit_fsdp.data.windows import RowWindows, Window
from lit_fsdp.errors import DataError

MANY = "imdb:train[:10%](pct1_dropremainder)+test[-5:]"
ROWS = [{"text": f"row {i}"} for i in range(2500)]


def test_a_data_set_that_is_streamed():
    datasets = pytest.importorskip("datasets")
    from lit_fsdp.data.saved import StreamedPart

    loaded = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)
    part = StreamedPart("name", loaded, "name")
    chunks = list(part.chunks(None))
    assert [row for chunk in chunks for _, row in chunk.rows()] == ROWS
    start = json.loads(json.dumps(chunks[2].start))
    assert [row for chunk in part.chunks(start) for row in chunk.rows()] == chunks[2].rows()


@pytest.mark.parametrize("parsed", [False, True], ids=["arrow", "parsed"])
def test_a_stream_that_was_resumed_begins_its_next_epoch_at_the_first_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parsed: bool
):
    datasets = pytest.importorskip("datasets")
    from lit_fsdp.data import saved

    monkeypatch.setattr(saved, "_ROWS", 4)
    rows = [{"text": str(i)} for i in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def part() -> saved.StreamedPart:
        loaded = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        if parsed:
            file, cache = str(tmp_path / "a.jsonl"), str(tmp_path / "cache")
            loaded = datasets.load_dataset("json", data_files=file, split="train", streaming=True, cache_dir=cache)
        return saved.StreamedPart("name", loaded, "name")

    def read(part: saved.StreamedPart, start: Any) -> list[Any]:
        return [row for chunk in part.chunks(start) for _, row in chunk.rows()]

    start = json.loads(json.dumps(list(part().chunks(None))[1].start))
    resumed = part()
    assert [read(resumed, at) for at in (start, None, start, None)] == [rows[4:], rows, rows[4:], rows]

    def windows(start: Any, count: int) -> list[Window]:
        return list(islice(RowWindows([Source("name", (part(),), "text")], 5).read(start), count))

    whole = windows(None, 8)
    assert [window.epoch for window in whole] == [0, 0, 0, 1, 1, 1, 2, 2]
    for number in range(1, 5):
        again = windows(json.loads(json.dumps(whole[number].start)), 8 - number)
        assert [(window.epoch, window.rows) for window in again] == [
            (window.epoch, window.rows) for window in whole[number:]
        ]


def test_folders_and_slices_are_no_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Brackets in a folder's name, or in what ``datasets`` takes as rows of a split."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "[mine]"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    (found,) = find_sources(f"{folder}:validation")
    assert [row for _, row in found.rows()] == [{"text": "validation"}]

    asked = []

    def load(*words: Any, **options: Any) -> Any:
        asked.append((*words, options["split"]))
        return datasets.Dataset.from_list([{"text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    names = ("imdb", "imdb:test", "imdb:train[:10%]", "gsm8k:main:test", "gsm8k:main:train[5:]", "a/b:c:", MANY)
    for name in names:
        (found,) = find_sources(name)
        assert [row for _, row in found.rows()] == [{"text": "a"}]
    wanted = [("imdb", None, "train"), ("imdb", None, "test"), ("imdb", None, "train[:10%]")]
    wanted += [
        ("gsm8k", "main", "test"),
        ("gsm8k", "main", "train[5:]"),
        ("a/b", "c", "train"),
        ("imdb", None, "train[:10%](pct1_dropremainder)+test[-5:]"),
    ]
    assert asked == wanted
    with pytest.raises(DataError, match="no file matches this pattern"):
        find_sources(str(tmp_path / "x" / "*.jsonl"))
