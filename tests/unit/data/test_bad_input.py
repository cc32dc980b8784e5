"""Whatever stands in a file is read, or refused with a DataError that names the file; nothing else ever comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.data.sources import find_sources
from lit_fsdp.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a 1"}, {"role": "assistant", "content": "b é"}]},
]


def test_a_parquet_string_that_is_no_text(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    offsets = pyarrow.array([0, 2], pyarrow.int32()).buffers()[1]
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(b"\xff\xfe")])
    days = pyarrow.array([2**30], pyarrow.date32())  # beyond what a date can be
    for name, columns in {"text": {"prompt": bad, "completion": ["c"]}, "day": {"prompt": ["a"], "day": days}}.items():
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(DataError, match=rf"^{path}: not a Parquet file, broken after row 0"):
            list(find_sources(str(path))[0].rows())


def test_an_arrow_text_that_ends_beside_the_file(tmp_path: Path):
    """Reading it would take whatever lies in memory there."""
    pyarrow = pytest.importorskip("pyarrow")
    offsets = pyarrow.array([0, 10**6, 2], pyarrow.int32()).buffers()[1]
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"ab")])
    table = pyarrow.table({"text": bad})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"a\.arrow: not an Arrow file, broken after row 0"):
        list(find_sources(str(tmp_path / "a.arrow"))[0].rows())


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/x.jsonl", "x" * 300 + ".jsonl", "y" * 300 + "/x.jsonl", "a\0b.csv"]
)
def test_a_name_that_no_file_can_have(name: str):
    with pytest.raises(DataError, match="no such file"):
        find_sources(name)


@pytest.mark.parametrize("count", ["9" * 5000, "10000000"])
def test_too_many_generated_rows(count: str):
    with pytest.raises(ConfigError, match="N from 1 to 1000000"):
        find_sources(f"generated:{count}")


def test_a_split_of_a_saved_folder(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    parts = {"train": ROWS[:1], "held_out": ROWS[:1] * 3}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    assert [len(list(find_sources(f"{tmp_path}/saved{split}")[0].rows())) for split in ("", ":held_out")] == [1, 3]
    with pytest.raises(DataError, match="no split 'dev'\n  allowed: train, held_out"):
        find_sources(f"{tmp_path}/saved:dev")
