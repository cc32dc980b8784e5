"""Sources: every kind gives the same rows, from its head and from any position, and a bad one says what is wrong."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig, SourceConfig
from lit_fsdp.data.readers import Row, generated_rows
from lit_fsdp.data.sources import find_sources, pinned
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import write_rows

TEXT = 'x, "y"\nz é\u2028'
ROWS: list[dict[str, Any]] = [{"prompt": f"p{i}", "completion": TEXT * (i % 3) + "007"} for i in range(1100)]


def _read(name: object, **options: Any) -> list[Row]:
    return [row for source in find_sources([str(name)], DataConfig(**options)) for row in source.rows()]


def _rows(name: object) -> list[Any]:
    return [row for _, row in _read(name)]


def _write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_same_rows_from_any_position(tmp_path: Path):
    import datasets

    for name in ("a[1].jsonl", "a.jsonl.gz", "list.json", "lines.json", "a.csv", "a[1].parquet", "file.arrow", "saved"):
        if name == "saved":
            datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / name))
        elif name == "lines.json":
            (tmp_path / name).write_text("\n" + (tmp_path / "a[1].jsonl").read_text())
        else:
            write_rows(tmp_path / name, ROWS)
        (source,) = find_sources(str(tmp_path / name))
        assert source.row_format == "prompt_completion"
        found = list(source.read())
        assert [source.parse(raw)[1] for _, raw in found] == ROWS
        assert len({location for _, (location, _) in found}) == len(ROWS)
        for number in (0, 600, len(ROWS) - 1):
            assert list(source.read(*json.loads(json.dumps(found[number][0])))) == found[number + 1 :]


def test_what_a_row_says_is_not_changed(tmp_path: Path):
    """Texts that look like dates stay texts, numbers keep their kind, and no key comes from another row."""
    rows = [
        {"prompt": "2020-01-01", "completion": "2021-02-03T04:05:06"},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1, "b": "y"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "g", "arguments": {"c": 1.5, "a": 2}}]}]},
    ]
    assert _rows(write_rows(tmp_path / "a.jsonl", rows)) == rows
    assert _rows(_write(tmp_path / "one.json", json.dumps(rows[1], indent=1))) == rows[1:2]  # a row, and no messages
    assert _rows(write_rows(tmp_path / "a.parquet", rows[1:])) == rows[1:]  # without the keys that Arrow added


def test_locations_marks_and_blank_lines(tmp_path: Path):
    lines = b"\xef\xbb\xbf" + b"\r\n\n  \r\n".join(json.dumps(row).encode() for row in ROWS[:2])
    path = _write(tmp_path / "rows.jsonl", lines)
    assert _read(path) == [(f"{path}:1", ROWS[0]), (f"{path}:4", ROWS[1])]
    path = _write(tmp_path / "rows.txt", "\ufeffone\r\n\ntwo é\u2028 2020-01-01")
    assert _read(path) == [(f"{path}:1", {"text": "one"}), (f"{path}:3", {"text": "two é\u2028 2020-01-01"})]
    path = _write(tmp_path / "rows.csv", '\ufeffprompt,completion\nNA,007\n"",null\n')
    assert _read(path) == [
        (f"{path}:2", {"prompt": "NA", "completion": "007"}),
        (f"{path}:3", {"prompt": "", "completion": "null"}),
    ]


def test_a_broken_line_is_named_and_the_others_are_read(tmp_path: Path):
    good = json.dumps(ROWS[0]).encode()
    for line, message in [
        (b'{"prompt": "a"', "not JSON .*Expecting"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 at byte 15"),
        (b"\x00\x00\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["a"]', "list, not an object with columns"),
    ]:
        path = _write(tmp_path / "rows.jsonl", good + b"\n\n" + line + b"\n" + good)
        first, (location, error), last = _read(path)
        assert (first[1], last, location) == (ROWS[0], (f"{path}:4", ROWS[0]), f"{path}:3")
        with pytest.raises(DataError, match=rf"^{path}:3: {message}"):
            raise error  # type: ignore[misc]
    for line in ("a,b,c", "a"):  # in the first record too, where pandas would shift all columns
        error, second = _rows(_write(tmp_path / "a.csv", f"prompt,completion\n{line}\na,b\n"))
        assert second == {"prompt": "a", "completion": "b"}
        with pytest.raises(DataError, match=r"a\.csv:2: \d cells? for the 2 columns prompt, completion"):
            raise error
    with pytest.raises(
        DataError, match=r"c\.csv: duplicate column names in a, b, a\n  fix:     give each column its own"
    ):
        _read(_write(tmp_path / "c.csv", "a,b,a\n1,2,3\n"))


def test_tables_of_excel(tmp_path: Path):
    """Separated as the region of the user has it, with commas in the cells; one column stays one."""
    for head, lines in (
        ("\ufeffprompt;completion", 'a, b;"x;\ny"\r\n'),
        ("prompt\tcompletion", 'a, b\t"x;\ny"\n'),
        ('"prompt";"completion"', 'a, b;"x;\ny"\n'),
        ("prompt,completion", '"a, b","x;\ny"\n'),
    ):
        path = _write(tmp_path / "rows.csv", f"{head}\n{lines}")
        assert _read(path) == [(f"{path}:3", {"prompt": "a, b", "completion": "x;\ny"})]
    path = _write(tmp_path / "excel.csv", "\ufeffsep=|\r\nprompt|completion\r\na;b|x\r\n")
    assert _read(path) == [(f"{path}:3", {"prompt": "a;b", "completion": "x"})]
    assert _rows(_write(tmp_path / "one.csv", "text\na;b\n")) == [{"text": "a;b"}]
    assert _rows(_write(tmp_path / "one.tsv", "a;b\nc;d\n")) == [{"a;b": "c;d"}]


def test_files_that_are_not_utf8_or_compressed_otherwise_say_what_to_do(tmp_path: Path):
    to_utf8 = r"\n  fix:     convert the file to UTF-8, for example with iconv -f WINDOWS-1252 -t UTF-8$"
    for name, content in (
        ("a.csv", b"prompt,completion\na,caf\xe9\n"),
        ("a.txt", b"caf\xe9\n"),
        ("a.jsonl", b'{"text": "caf\xe9"}'),
        ("a.json", b'[{"text": "caf\xe9"}]'),
    ):
        with pytest.raises(DataError, match=rf"^{_write(tmp_path / name, content)}.*{to_utf8}"):
            _ = find_sources(str(tmp_path / name))[0].row_format
    for name, text in (("b.jsonl", '{"text": "a"}'), ("b.csv", "text\na\n"), ("b.json", '[{"text": "a"}]')):
        with pytest.raises(DataError, match=r"with iconv -f UTF-16 -t UTF-8$"):
            _ = find_sources(str(_write(tmp_path / name, text.encode("utf-16"))))[0].row_format
    with pytest.raises(DataError, match=r"rows\.xlsx: spreadsheets are not supported\n.*\n  fix:     save it as CSV"):
        _read(_write(tmp_path / "rows.xlsx", b"PK"))
    for suffix in (".bz2", ".xz", ".zst", ".zip", ".ZIP"):
        path = _write(tmp_path / f"rows.jsonl{suffix}", b"BZh9")
        with pytest.raises(DataError) as error:
            _read(path)
        assert str(error.value) == (
            f"{path}: compression {suffix.lower()} is not supported\n  allowed: .gz\n  fix:     decompress it"
        )
    for name in ("a.jsonl.gz", "a.csv.gz"):
        path = tmp_path / name.upper()
        content = "prompt,completion\np0,007\n" if "csv" in name else json.dumps(ROWS[0])
        path.write_bytes(gzip.compress(content.encode()))
        assert _rows(path) == ROWS[:1]


def test_parquet_files_without_rows(tmp_path: Path):
    """As Spark writes them; also a first row group without rows."""
    import pyarrow
    import pyarrow.parquet

    full, empty = (pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}) for texts in (["a", "b"], []))
    parts = {"0": [empty], "1": [full], "2": [], "3": [empty, full]}
    for name, tables in parts.items():
        with pyarrow.parquet.ParquetWriter(tmp_path / f"part-{name}.parquet", full.schema) as writer:
            for table in tables:
                writer.write_table(table)
    wanted = [{"text": "a"}, {"text": "b"}] * 2
    for name in (tmp_path, tmp_path / "part-*.parquet"):
        (source,) = find_sources(str(name))
        found = list(source.read())
        assert [source.parse(raw)[1] for _, raw in found] == wanted
        assert list(source.read(*found[1][0])) == found[2:]
    for number in (0, 2):
        with pytest.raises(DataError, match=rf"part-{number}\.parquet: no rows"):
            _ = find_sources(str(tmp_path / f"part-{number}.parquet"))[0].row_format


def test_a_folder_is_divided_as_datasets_does_it(tmp_path: Path):
    import datasets

    folder = tmp_path / "mine"
    train = [f"train-0000{i}-of-00002.jsonl" for i in range(2)]
    for name in (*reversed(train), "val.jsonl"):
        _write(folder / name, json.dumps({"text": name}) + "\n")
    for words, names in (("", train), (":train", train), ("/train-*.jsonl", train), (":validation", ["val.jsonl"])):
        assert [row["text"] for row in _rows(f"{folder}{words}")] == names
    with pytest.raises(DataError, match=r"no split 'test'\n  allowed: train, validation"):
        find_sources(f"{folder}:test")
    parts = {"train": ROWS[:1], "held_out": ROWS[:3]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    assert [len(_rows(f"{tmp_path}/saved{split}")) for split in ("", ":held_out")] == [1, 3]


def test_names_on_the_hub_are_pinned_to_a_commit(hub: Any, monkeypatch: pytest.MonkeyPatch):
    import datasets

    many = "imdb:train[:10%](pct1_dropremainder)+test[-5:]"
    for name in ("gsm8k:main:train[5:]", "a/b:c:", many):
        assert _rows(name)[:2] == [{"text": "0 abc"}, {"text": "1 abc"}]
    assert hub.asked == [
        ("gsm8k", "main", "train[5:]", "a"),
        ("a/b", "c", "train", "a"),
        ("imdb", None, many.removeprefix("imdb:"), "a"),
    ]
    (old,) = find_sources([SourceConfig(source="imdb", revision="old")], streaming=True)
    found = list(old.read())
    assert list(old.read(*found[19][0])) == found[20:]
    assert [old.parse(raw)[1] for _, raw in found] == _rows("imdb")
    assert old.digest(None) != find_sources("imdb", streaming=True)[0].digest(None)
    entries = pinned(["imdb", SourceConfig(source="gsm8k:main", revision="old", format="text"), "generated:3"])
    assert [(entry.format, entry.revision) for entry in entries] == [(None, "a" * 40), ("text", "b" * 40), (None, None)]
    monkeypatch.setattr(datasets, "load_dataset_builder", None)  # whoever has the commit does not ask again
    assert pinned(entries[:1]) == entries[:1]
    cache = type("Cache", (), {"hash": "d" * 40})  # what datasets makes of its cache where the hub does not answer
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *words, **more: cache())
    with pytest.raises(DataError, match=f"its cache has commit {'d' * 40}, not revision old"):
        find_sources([SourceConfig(source="imdb", revision="old")])
    with pytest.raises(ConfigError, match="revision of generated:3"):
        find_sources([SourceConfig(source="generated:3", revision="old")])


def test_names_that_are_not_there(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    for missing in ("people.xlsx", "people.xlxs", "rows.jsnol", "rows.parqet"):  # no data sets on the hub
        with pytest.raises(DataError, match=rf"^{missing}: no such file"):
            find_sources(missing)
    for name in ("somebody/code.js", "somebody/x.xml", "somebody/ru.tv"):  # may be on the hub
        with pytest.raises(DataError, match="looked up on the hub"):
            _ = find_sources(name)[0].row_format
    with pytest.raises(DataError, match=rf"^{path}x\.csv: no such file\n  fix:     check the path, relative to /"):
        find_sources(f"{path}x.csv")
    assert _rows("generated:7") == generated_rows(20)[:7]
    with pytest.raises(DataError, match=r"^generated:1k: cannot be read"):
        _rows("generated:1k")
    for content in ("3", '[{"a": 1}', '{"a": 1} {"a": 2}\n'):
        with pytest.raises(DataError, match=r"rows\.json: (not JSON|row 0: int, not an object)"):
            _ = find_sources(str(_write(tmp_path / "rows.json", content)))[0].row_format
    for name, content in {"a.jsonl": "", "b.jsonl": "\n \n", "c.json": "[]", "d.csv": "a,b\n"}.items():
        with pytest.raises(DataError, match=f"{name}: no rows"):
            _ = find_sources(str(_write(tmp_path / name, content)))[0].row_format


def test_files_that_datasets_leaves_out_of_a_folder_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "mixed"
    for name in ("a.jsonl", "b.jsonl", ".hidden/c.parquet", "__x/d.csv", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(folder / name, [{"text": name}])
    (folder / "dataset_infos.json").write_text("{}")
    assert _rows(folder)[:2] == [{"text": "a.jsonl"}, {"text": "b.jsonl"}]
    assert capsys.readouterr().err == ""
    (folder / "more").mkdir()
    write_rows(folder / "more/e.parquet", [{"text": "e"}])
    assert {"text": "e"} not in _rows(folder)
    wanted = f"chooses by the names of splits: more/e.parquet\n  fix:     list the sources: data.train: [{folder}, "
    assert wanted in capsys.readouterr().err
    _rows(folder)
    assert capsys.readouterr().err == ""  # once
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: more/*.parquet\n---\n")
    assert _rows(folder) == [{"text": "e"}]
    assert capsys.readouterr().err == ""


def test_columns_and_formats(tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", [{"q": "x", "a": "y", "prompt": "no"}])
    assert _read(path, columns={"prompt": "q", "completion": "a"})[0][1] == {"prompt": "x", "completion": "y"}
    fix = r"set columns for one source, not data.columns for all: \[\{source: FILE, columns: "
    with pytest.raises(DataError, match=rf"a\.jsonl: no column 'z', .*\n  allowed: \['a', 'q'\]\n  fix:     {fix}"):
        _ = find_sources(str(path), DataConfig(columns={"prompt": "z"}))[0].row_format
    typo = str(write_rows(tmp_path / "b.jsonl", [{"question": "x", "answer": "y"}]))
    with pytest.raises(DataError) as error:
        _ = find_sources(typo, DataConfig(columns={"prompt": "question", "completion": "answr"}))[0].row_format
    assert str(error.value).splitlines()[1:] == [
        "  allowed: ['answer', 'question']",
        "  fix:     set data.columns: {prompt: question, completion: answer}",
    ]
    entry = SourceConfig(source=str(path), format="sharegpt")
    assert find_sources([entry], DataConfig(format="text"))[0].row_format == "sharegpt"
    entry = SourceConfig(source=str(path), columns={"prompt": "a"})
    ((_, row),) = find_sources([entry], DataConfig(columns={"prompt": "q"}))[0].rows()
    assert row == {"prompt": "y", "q": "x"}
    with pytest.raises(ConfigError, match=r"columns\.chat: .*\n  allowed: .*\n  fix: .*\{messages: chat\}"):
        DataConfig(columns={"chat": "messages"})


def test_files_of_lines_are_read_without_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # whoever imports it gets an ImportError
    for name, content in (
        ("a.jsonl", '{"text": "x"}'),
        ("a.json", '[{"text": "x"}]'),
        ("a.csv", "text\nx"),
        ("a.txt", "x"),
    ):
        assert _rows(_write(tmp_path / name, content)) == [{"text": "x"}], name


def test_a_digest_is_of_content_and_kind(tmp_path: Path):
    import datasets

    content = "".join(json.dumps(row) + "\n" for row in ROWS[:2])
    names = {"a.jsonl": content, "copy.jsonl": content, "a.ndjson": content, "more.jsonl": content + "\n"}
    digests = [find_sources(str(_write(tmp_path / name, text)))[0].digest(tmp_path) for name, text in names.items()]
    assert [digests.index(digest) for digest in digests] == [0, 0, 2, 3]
    ends = (_write(tmp_path / "long.jsonl", "a" * 2**18 + end) for end in "bc")
    assert len({find_sources(str(path))[0].digest(None) for path in ends}) == 2
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    saved = [find_sources(str(tmp_path / "saved"))[0].digest(tmp_path)]
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes().replace(b"p7", b"p8"))  # beside it lies the old fingerprint of datasets
    assert find_sources(str(tmp_path / "saved"))[0].digest(tmp_path) not in saved


def test_bytes_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Any number of ranks, at any number of starts; but a file that was written just now may be written again."""
    path = Path(write_rows(tmp_path / "a.jsonl", ROWS))
    hashed: list[Any] = []
    real = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *words: hashed.append(words) or real(*words))
    digests = [find_sources(str(path))[0].digest(tmp_path / "cache") for _ in range(2)]
    assert len(hashed) == 2
    os.utime(path, (1e9, 1e9))
    digests += [find_sources(str(path))[0].digest(tmp_path / "cache") for _ in range(3)]
    assert len(hashed) == 3
    assert len(set(digests)) == 1
    write_rows(path, ROWS[1:])
    os.utime(path, (1e9, 1e9))
    assert find_sources(str(path))[0].digest(tmp_path / "cache") not in digests
