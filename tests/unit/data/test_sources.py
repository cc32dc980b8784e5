"""Sources: what is read, and what a bad one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.data.generated import generated_rows
from lit_fsdp.data.sources import find_sources
from lit_fsdp.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [{"prompt": "a", "completion": "b"}, {"prompt": 'c, "d"', "completion": "é\nf"}]


def _read(*names: object) -> list[tuple[str, dict[str, Any]]]:
    return [row for source in find_sources([str(name) for name in names]) for row in source.rows()]


def _write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return _write(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))


def test_jsonl_with_places(jsonl: Path):
    assert _read(jsonl) == [(f"{jsonl}:1", ROWS[0]), (f"{jsonl}:2", ROWS[1])]


def test_jsonl_bom_blank_lines_and_windows_ends(tmp_path: Path):
    lines = b"\xef\xbb\xbf" + b"\r\n\n  \r\n".join(json.dumps(row).encode() for row in ROWS)
    path = _write(tmp_path / "rows.jsonl", lines)
    assert _read(path) == [(f"{path}:1", ROWS[0]), (f"{path}:4", ROWS[1])]


def test_line_separators_inside_text_end_no_line(tmp_path: Path):
    row = {"prompt": "a\u2028b\x85c", "completion": "d"}
    path = _write(tmp_path / "rows.jsonl", json.dumps(row, ensure_ascii=False) + "\n")
    assert _read(path) == [(f"{path}:1", row)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"', "not JSON .*Expecting"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8 at byte 15 of the line"),
        (b'{"prompt": "a\x00"}', "not JSON .*Invalid control character"),
        (b"\x00\x00\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", "not JSON .*digits"),
        (b'["a"]', "list, not an object with columns"),
        (b'"text"', "str, not an object with columns"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str):
    path = _write(tmp_path / "rows.jsonl", json.dumps(ROWS[0]).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"^{path}:3: {message}"):
        _read(path)


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"data": rows}, lambda rows: {"v": 1, "rows": rows}])
def test_json(tmp_path: Path, wrap: Any):
    path = _write(tmp_path / "rows.json", json.dumps(wrap(ROWS)))
    assert _read(path) == [(f"{path}: row 0", ROWS[0]), (f"{path}: row 1", ROWS[1])]


def test_json_of_another_shape(tmp_path: Path):
    for content in ('{"a": [1], "b": [2]}', '"text"', "3", '{"a": 1}'):
        with pytest.raises(DataError, match="holds a list of rows"):
            _read(_write(tmp_path / "rows.json", content))
    with pytest.raises(DataError, match=r"rows\.json: row 1: int, not an object"):
        _read(_write(tmp_path / "rows.json", '[{"a": 1}, 2]'))
    with pytest.raises(DataError, match=r"not JSON .*\n  fix: .*name \.jsonl what has one object per line"):
        _read(_write(tmp_path / "rows.json", '{"a": 1} {"a": 2}\n'))


@pytest.mark.parametrize("head", ["", "\ufeff", "\n \n"])
def test_json_with_an_object_per_line_is_read_by_line(tmp_path: Path, head: str):
    path = _write(tmp_path / "rows.json", head + "".join(json.dumps(row) + "\n" for row in ROWS))
    first = 1 + head.count("\n")
    assert _read(path) == [(f"{path}:{first}", ROWS[0]), (f"{path}:{first + 1}", ROWS[1])]
    broken = _write(tmp_path / "broken.json", json.dumps(ROWS[0]) + "\n{\n")
    with pytest.raises(DataError, match=rf"^{broken}:2: not JSON"):
        _read(broken)


def test_csv_and_tsv(tmp_path: Path):
    text = '\ufeffprompt,completion\na,b\n"c, ""d""","é\nf"\n'
    path = _write(tmp_path / "rows.csv", text)
    assert _read(path) == [(f"{path}:2", ROWS[0]), (f"{path}:4", ROWS[1])]
    path = _write(tmp_path / "rows.tsv", "prompt\tcompletion\na\tb\n")
    assert _read(path) == [(f"{path}:2", ROWS[0])]
    long = "x" * 200_000
    assert _read(_write(tmp_path / "long.csv", f"prompt,completion\na,{long}\n"))[0][1]["completion"] == long


@pytest.mark.parametrize("row", ["a", "a,b,c", '"a'])
def test_csv_with_a_broken_row(tmp_path: Path, row: str):
    path = _write(tmp_path / "rows.csv", f"prompt,completion\na,b\n{row}\n")
    with pytest.raises(DataError, match=rf"{path}(:3: another number of cells than the 2 columns|:3: not CSV)"):
        _read(path)
    with pytest.raises(DataError, match=r"latin\.csv:2: not UTF-8 at byte 3 of the line"):
        _read(_write(tmp_path / "latin.csv", b"prompt,completion\ncaf\xe9,b\n"))


def test_parquet(tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import Table

    path = tmp_path / "rows.parquet"
    rows = [{"messages": [{"role": "user", "content": str(i)}]} for i in range(2500)]
    parquet.write_table(Table.from_pylist(rows), path, row_group_size=700)
    assert _read(path) == [(f"{path}: row {i}", row) for i, row in enumerate(rows)]
    with pytest.raises(DataError, match="not a Parquet file"):
        _read(_write(path, path.read_bytes()[:100]))


def test_saved_data_set(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert _read(tmp_path / "saved") == [(f"{tmp_path}/saved: row {i}", row) for i, row in enumerate(ROWS)]
    first, second = (find_sources(str(tmp_path / "saved"))[0].digest for _ in range(2))
    assert first == second
    (tmp_path / "plain").mkdir()
    with pytest.raises(DataError, match="no row files in this folder, and datasets has not saved it"):
        find_sources(str(tmp_path / "plain"))


def test_a_saved_data_set_whose_bytes_change_is_another_one(tmp_path: Path):
    """Beside them lies the old fingerprint of datasets."""
    datasets = pytest.importorskip("datasets")
    found = []
    for word in ("one", "two"):
        place = tmp_path / word
        datasets.Dataset.from_list([{"text": word}]).save_to_disk(str(place))
        if found:
            data = (place / "data-00000-of-00001.arrow").read_bytes()
            place = tmp_path / "one"
            (place / "data-00000-of-00001.arrow").write_bytes(data)
        found.append(find_sources(str(place))[0].digest)
    assert found[0] != found[1]


def test_a_name_without_a_network():
    with pytest.raises(DataError, match=r"nobody/nothing:test: no such file .*datasets cannot load it"):
        find_sources("nobody/nothing:test")


def test_missing_files(tmp_path: Path, jsonl: Path):
    with pytest.raises(DataError, match=rf"no such file in {tmp_path}\n  fix:     did you mean {jsonl}\?"):
        find_sources(str(tmp_path / "row.jsonl"))
    with pytest.raises(DataError, match=rf"the folder {tmp_path}/none does not exist"):
        find_sources(str(tmp_path / "none" / "rows.jsonl"))
    with pytest.raises(DataError, match=r"\*\.csv: no file matches this pattern"):
        find_sources(str(tmp_path / "*.csv"))
    with pytest.raises(DataError, match=r"unknown kind of file '\.txt'"):
        find_sources(str(_write(tmp_path / "rows.txt", "a")))
    with pytest.raises(ConfigError, match="at least one source"):
        find_sources([])


def test_several_files_and_patterns(tmp_path: Path):
    for name in ("b", "a", "c[1]"):
        _write(tmp_path / f"{name}.jsonl", json.dumps({"name": name}))
    found = [row["name"] for _, row in _read(tmp_path / "[ab].jsonl", tmp_path / "c[1].jsonl")]
    assert found == ["a", "b", "c[1]"]


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("b.jsonl", "\n \n"), ("c.json", "[]"), ("d.csv", "a,b\n")]
)
def test_an_empty_source_is_refused(tmp_path: Path, name: str, content: str):
    path = _write(tmp_path / name, content)
    with pytest.raises(DataError, match=f"{path}: no rows"):
        _read(path)


def test_digest_is_of_content_and_kind(tmp_path: Path, jsonl: Path):
    digest = find_sources(str(jsonl))[0].digest
    copy = _write(tmp_path / "copy.jsonl", jsonl.read_bytes())
    assert find_sources(str(copy))[0].digest == digest
    assert find_sources(str(_write(tmp_path / "copy.ndjson", jsonl.read_bytes())))[0].digest != digest
    assert find_sources(str(_write(copy, jsonl.read_bytes() + b"\n")))[0].digest != digest


def test_a_file_that_grows_is_noticed(jsonl: Path):
    (source,) = find_sources(str(jsonl))
    rows = source.rows()
    next(rows)
    _write(jsonl, jsonl.read_bytes() + b"{}\n")
    with pytest.raises(DataError, match="changed while it was read"):
        list(rows)


def test_generated_rows():
    rows = _read("generated:7")
    assert rows == _read("generated:7")
    assert [row for _, row in rows] == generated_rows(7) == generated_rows(20)[:7]
    assert len({json.dumps(row) for row in generated_rows(300)}) > 200
    for name in ("generated:", "generated:0", "generated:-3", "generated:ten", "generated:²"):
        with pytest.raises(ConfigError, match="generated:N, N from 1 to"):
            find_sources(name)
