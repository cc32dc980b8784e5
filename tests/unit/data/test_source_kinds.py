"""Every kind of source gives the same rows, from its head and from any position; folders, columns, formats."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig, SourceConfig
from lit_fsdp.data.sources import find_sources
from lit_fsdp.errors import ConfigError, DataError

ROWS = [{"prompt": f"p{i}", "completion": 'x, "y"\nz é' * (i % 3) + "end"} for i in range(2500)]


def _jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def _gzipped(path: Path) -> None:
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS))


def _csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter="," if path.suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(ROWS)


def _parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=1700)


def _arrow(path: Path) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    new = pyarrow.ipc.new_file if "file" in path.name else pyarrow.ipc.new_stream
    with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1300)


def _saved(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(str(path))


KINDS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": _jsonl,
    "a.jsonl.gz": _gzipped,
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.csv": _csv,
    "a.tsv": _csv,
    "a.parquet": _parquet,
    "file.arrow": _arrow,
    "stream.arrow": _arrow,
    "saved": _saved,
}


@pytest.mark.parametrize("name", KINDS)
def test_the_same_rows_from_any_position(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_fsdp.data.files._BLOCK_BYTES", 2**14)
    KINDS[name](tmp_path / name)
    (source,) = find_sources(str(tmp_path / name))
    assert source.row_format == "prompt_completion"
    chunks = list(source.chunks())
    per_chunk = [pickle.loads(pickle.dumps(chunk)).rows() for chunk in chunks]
    assert [row for rows in per_chunk for _, row in rows] == ROWS
    assert len(chunks) > 1
    for number in {1, len(chunks) // 2, len(chunks) - 1}:
        start = json.loads(json.dumps(chunks[number].start))
        rest = [row for chunk in source.chunks(start) for row in chunk.rows()]
        assert rest == [row for rows in per_chunk[number:] for row in rows]
    assert len({place for rows in per_chunk for place, _ in rows}) == len(ROWS)


def test_keys_that_arrow_added_are_left_out(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "x"}}]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [call]}], "note": None} for call in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row for _, row in find_sources(str(tmp_path / "a.parquet"))[0].rows()] == rows


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}) + "\n")


def _names(name: str) -> list[str]:
    return [row["text"] for source in find_sources(name) for _, row in source.rows()]


@pytest.mark.parametrize(
    ("names", "train", "validation"),
    [
        (["b.jsonl", "a.jsonl"], ["a.jsonl", "b.jsonl"], None),
        (["train-00001-of-00002.jsonl", "train-00000-of-00002.jsonl", "val.jsonl"], [1, 0], [2]),
        (["data/train.jsonl", "data/my-dev_set.jsonl", "README.md", ".hidden/train.jsonl"], [0], [1]),
        (["train/x.jsonl", "valid/x.jsonl", "test/x.jsonl", "dataset_infos.json"], [0], [1]),
        (["training_7.jsonl", "validation.jsonl", "untrained.jsonl"], [0], [1]),
    ],
)
def test_a_folder_of_files(tmp_path: Path, names: list[str], train: list[Any], validation: list[Any] | None):
    _touch(tmp_path, *names)
    wanted = [names[i] if isinstance(i, int) else i for i in train]
    assert _names(str(tmp_path)) == _names(f"{tmp_path}:train") == wanted
    if validation is None:
        with pytest.raises(DataError, match=r"no row files of split 'validation'\n  allowed: train"):
            find_sources(f"{tmp_path}:validation")
        return
    assert _names(f"{tmp_path}:validation") == _names(f"{tmp_path}:dev") == [names[i] for i in validation]


def test_a_folder_whose_card_declares_its_files(tmp_path: Path):
    _touch(tmp_path, "x/one.jsonl", "x/two.jsonl", "y.jsonl", "train.jsonl")
    card = "---\nlicense: mit\nconfigs:\n- config_name: a\n  data_files:\n"
    card += "  - {split: train, path: 'x/*.jsonl'}\n  - {split: validation, path: [y.jsonl]}\n"
    (tmp_path / "README.md").write_text(card + "---\n# Rows\n")
    assert _names(str(tmp_path)) == ["x/one.jsonl", "x/two.jsonl"]
    assert _names(f"{tmp_path}:val") == ["y.jsonl"]
    (tmp_path / "README.md").write_text(card + "- config_name: b\n  data_files: train.jsonl\n---\n")
    with pytest.raises(DataError, match="declares the configurations a, b, and none as the default"):
        find_sources(str(tmp_path))
    (tmp_path / "README.md").write_text(card + "- {config_name: default, data_files: train.jsonl}\n---\n")
    assert _names(str(tmp_path)) == ["train.jsonl"]
    for pattern in ("gone.jsonl", "../*/y.jsonl"):
        (tmp_path / "README.md").write_text(f"---\nconfigs: [{{data_files: {pattern}}}]\n---\n")
        with pytest.raises(DataError, match=rf"declares '{re.escape(pattern)}' for train, but no file matches"):
            find_sources(str(tmp_path))
    (tmp_path / "README.md").write_text("---\n: [\n---\n")
    with pytest.raises(DataError, match=r"README\.md: cannot be read"):
        find_sources(str(tmp_path))


def test_files_of_no_split_beside_others_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    _touch(tmp_path, "train.jsonl", "more.jsonl", "sub/some.jsonl")
    assert _names(str(tmp_path)) == ["train.jsonl"]
    assert f"{tmp_path / 'more.jsonl'}, so left out, as other files have one: 2 row files" in caplog.text


def test_folders_that_are_refused(tmp_path: Path):
    _touch(tmp_path / "mixed", "train.jsonl", "train.json")
    with pytest.raises(DataError, match=r"several kinds \(\.json, \.jsonl\), which may well be the same rows"):
        find_sources(str(tmp_path / "mixed"))
    _touch(tmp_path / "script", "script.py", "train.jsonl")
    with pytest.raises(DataError, match="a loading script, which is not run"):
        find_sources(str(tmp_path / "script"))
    _touch(tmp_path / "only", "test.jsonl")
    with pytest.raises(DataError, match=r"no row files of split 'train'\n  allowed: test"):
        find_sources(str(tmp_path / "only"))


def test_a_pattern_is_one_source(tmp_path: Path):
    _touch(tmp_path, "a.jsonl", "b.jsonl")
    (source,) = find_sources([SourceConfig(source=f"{tmp_path}/*.jsonl", weight=2.0)])
    assert source.weight == 2.0
    assert [row["text"] for _, row in source.rows()] == ["a.jsonl", "b.jsonl"]
    first = source.digest
    _touch(tmp_path, "c.jsonl")
    assert find_sources(f"{tmp_path}/*.jsonl")[0].digest != first


def test_columns_are_renamed(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"q": "1", "a": "2", "prompt": "other"}) + "\n" + json.dumps({"q": "3"}) + "\n")
    config = DataConfig(columns={"prompt": "q", "completion": "a"})
    (source,) = find_sources(str(path), config)
    assert [row for _, row in source.rows()] == [{"prompt": "1", "completion": "2"}, {"prompt": "3"}]
    swapped = SourceConfig(source=str(path), columns={"prompt": "a", "completion": "prompt"})
    first = next(find_sources([swapped], config)[0].rows())[1]
    assert first == {"q": "1", "prompt": "2", "completion": "other"}
    (source,) = find_sources(str(path), DataConfig(columns={"prompt": "Q"}))
    with pytest.raises(DataError, match=r"a\.jsonl:1: no column 'Q', .* to 'prompt'\n  allowed: a, prompt, q$"):
        _ = source.row_format


def test_columns_that_are_not_ours():
    with pytest.raises(ConfigError, match=r"^columns\.chat: got messages\n  allowed: .*\n  fix: .*\{messages: chat\}"):
        DataConfig(columns={"chat": "messages"})
    with pytest.raises(ConfigError, match="'q' twice"):
        SourceConfig(source="a.jsonl", columns={"prompt": "q", "text": "q"})


def test_the_format_is_found_said_and_overridable(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n" + json.dumps({"messages": [], "text": "x"}) + "\n")
    with caplog.at_level(logging.INFO):
        (source,) = find_sources(str(path))
        assert (source.row_format, source.row_format) == ("messages", "messages")
    assert caplog.text.count("a.jsonl: rows of format messages, found from their columns") == 1
    assert find_sources(str(path), DataConfig(format="text"))[0].row_format == "text"
    entry = SourceConfig(source=str(path), format="sharegpt")
    assert find_sources([entry], DataConfig(format="text"))[0].row_format == "sharegpt"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "file.arrow", "stream.arrow"])
def test_a_file_that_is_cut_off(tmp_path: Path, name: str):
    KINDS[name](tmp_path / name)
    content = (tmp_path / name).read_bytes()
    for size in (1, 7, len(content) // 2, len(content) - 9):
        (tmp_path / name).write_bytes(content[:size])
        with pytest.raises(DataError, match=rf"^{tmp_path / name}"):
            list(find_sources(str(tmp_path / name))[0].rows())


def test_two_columns_of_one_name(tmp_path: Path):
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    with pytest.raises(DataError, match=r"a\.csv:1: two columns are called 'text'"):
        list(find_sources(str(tmp_path / "a.csv"))[0].rows())


def test_while_streaming_only_the_edges_are_hashed(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 500_000 + b'"}\n')
    digests = [find_sources(str(path), streaming=streaming)[0].digest for streaming in (False, True)]
    content = bytearray(path.read_bytes())
    content[250_000] = ord("y")
    path.write_bytes(content)
    again = [find_sources(str(path), streaming=streaming)[0].digest for streaming in (False, True)]
    assert (again[0] != digests[0], again[1] == digests[1]) == (True, True)
