"""Tokenized rows on disk: what is kept, what the key is made of, that it is made once, and what a bad row does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig, TurnsConfig
from lit_fsdp.data import cache, chat_template
from lit_fsdp.data.cache import TokenizedRows, prepare_rows
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.errors import DataError
from tests.unit.data.conftest import encoder_of, metaspace_tokenizer
from tests.unit.data.conversations import LETTERS as TEMPLATE
from tests.unit.data.conversations import say


def _row(*turns: str) -> str:
    return json.dumps({"messages": say(*turns)})


def _written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def _prepare(tokenizer: Any, source: Path, template: str = TEMPLATE, **options: Any) -> TokenizedRows:
    config = DataConfig(**{"train": str(source), "cache_dir": str(source.parent / "cache"), **options})
    return prepare_rows(str(source), config, encoder_of(tokenizer, config, template))


def test_the_key_is_of_everything_that_tokens_depend_on(small, tmp_path, monkeypatch):
    rows = [_row("u:12", "a:34"), _row("u:nobody"), _row("u:abcdefgh", "a:X"), _row("u:1", "a:2345678")]
    source, copy = _written(tmp_path / "rows.jsonl", *rows), tmp_path / "copy.jsonl"
    found = [
        _prepare(small, source),
        _prepare(small, source, supervise="last"),
        _prepare(small, source, train_on_prompt=True),
        _prepare(small, source, truncation="start"),
        _prepare(small, source, columns={"messages": "messages"}),
        _prepare(small, source, template=TEMPLATE.replace("<s>", "[INST]")),
        _prepare(metaspace_tokenizer(), source),
        _prepare(small, source, max_seq_length=9),
        _prepare(small, source, turns=TurnsConfig(roles={"x": "user"})),
        _prepare(small, source, split_turns=True),
        _prepare(small, _written(copy, source.read_text(), _row("u:1", "a:1"))),
    ]
    assert len({rows.meta["fingerprint"] for rows in found}) == len(found)
    # what the order depends on is of the rows alone; 9 tokens leave nothing of one of them
    orders = [(rows.meta["digests"], rows.numbers.tolist()) for rows in found]
    assert [orders.index(order) for order in orders] == [0, 0, 2, 0, 0, 0, 0, 7, 0, 0, 10]
    with monkeypatch.context() as other:  # renderings may change with a release
        other.setattr(chat_template, "version", lambda package: "0.0")
        assert _prepare(small, source).folder != found[0].folder
    monkeypatch.setattr(RowEncoder, "encode", lambda *args: pytest.fail("tokenized again"))
    again = _prepare(small, _written(copy, source.read_text()))
    assert again.folder == found[0].folder
    assert not again.input_ids.flags.writeable
    assert [source["name"] for source in again.meta["sources"]] == [str(copy)]  # not the file that was tokenized


def test_dropped_rows_are_named_in_the_file_that_is_read(small, tmp_path, caplog):
    for name in ("first.jsonl", "second.jsonl"):
        source = _written(tmp_path / name, _row("u:12", "a:34"), "no JSON")
        caplog.clear()
        _prepare(small, source, on_bad_row="drop")
        assert f"{source}:2: " in caplog.text
    assert "first.jsonl" not in caplog.text
    caplog.clear()
    rows = [source.read_text(), source.read_text()]
    for folder in (tmp_path / "a", tmp_path / "a" / "a"):  # a name within another one, and both within the new ones
        folder.mkdir()
        given = [str(_written(folder / "a.jsonl", rows[0])), str(_written(folder / "b-a.jsonl", rows[1]))]
        config = DataConfig(train=given, cache_dir=str(tmp_path / "both"), on_bad_row="drop")
        prepare_rows(given, config, encoder_of(small, config, TEMPLATE))
        said = [one.getMessage().partition(": ")[2].rpartition(":2")[0] for one in caplog.records]
        assert [line.partition(":2:")[0] for line in said] == given
        caplog.clear()


@pytest.fixture
def many(monkeypatch) -> list[str]:
    """120 rows in many tasks."""
    monkeypatch.setattr(cache, "_ROWS", 5)
    return [_row(f"u:{n}", "a:" + "x" * (n % 7)) for n in range(120)]


def test_the_first_bad_row_is_told_or_all_are_dropped(small, tmp_path, many, caplog):
    """Whatever is wrong with it and with later ones, by any number of processes; nothing of it is left behind."""
    clean = _prepare(small, _written(tmp_path / "clean.jsonl", *many), num_tokenizers=1)
    many[71:71] = ['{"messages": 3}', "no JSON"]
    path = _written(tmp_path / "rows.jsonl", *many)
    for number in (1, 2):
        with pytest.raises(DataError, match=rf"^{path}:72: "):
            _prepare(small, path, num_tokenizers=number)
    assert len([entry for entry in (tmp_path / "cache" / "data").iterdir() if entry.suffix != ".lock"]) == 1
    rows = _prepare(small, path, num_tokenizers=2, on_bad_row="drop")
    for file in ("input_ids.bin", "supervised.bin", "keys.bin"):
        assert (rows.folder / file).read_bytes() == (clean.folder / file).read_bytes()
    assert (rows.meta["rows_read"], rows.meta["rows"], rows.meta["dropped"]) == (122, 120, {"refused": 2})
    assert [line.split(": ")[0] for line in rows.meta["refused"]] == [f"{path}:72", f"{path}:73"]
    assert f"dropped (data.on_bad_row): {path}:73: not JSON" in caplog.text


def test_errors_of_rows_say_what_to_do(small, tmp_path):
    long = _row("u:" + "x" * 30, "a:y")
    start = r"increase data\.max_seq_length, or set data\.truncation: start$"
    for lines, options, fix in (
        (
            ["[1]"],
            {},
            r"^.*:2: list, not an object with columns\n  fix:     correct the row, or set data\.on_bad_row: drop$",
        ),
        (["no JSON"], {}, r"\n  fix:     correct the line, or set data\.on_bad_row: drop$"),
        ([long], {"truncation": "error"}, r"\n  fix:     set data\.max_seq_length: 34, or data\.truncation: drop$"),
        ([long, _row("u:nobody"), long], {}, rf"2 cut before the assistant's turn.*\n  fix:     {start}"),
        ([long], {"truncation": "drop"}, r"1 longer than max_seq_length\n  fix:     increase data\.max_seq_length$"),
    ):
        first = [] if "cut" in fix or "longer" in fix else [_row("u:1", "a:2")]
        path = _written(tmp_path / "rows.jsonl", *first, *lines)
        with pytest.raises(DataError, match=fix):
            _prepare(small, path, max_seq_length=16, **options)
    with pytest.raises(
        DataError, match=r"rows dropped: 1 without a supervised token\n  fix:     each row needs an ass"
    ):
        _prepare(small, _written(tmp_path / "rows.jsonl", _row("u:nobody")))


def test_many_dropped_rows_are_a_warning(small, tmp_path, caplog):
    good, long = [_row(f"u:{n}", "a:2") for n in range(18)], _row("u:" + "x" * 30, "a:y")
    for lost, warns in ((2, False), (3, True)):  # a tenth, and more
        path = _written(tmp_path / "rows.jsonl", *good, *[long] * lost)
        for _ in range(2):  # also from the cache
            caplog.clear()
            _prepare(small, path, max_seq_length=16)
            text = f"{path}: {lost} of {18 + lost} rows dropped: {lost} cut before the assistant's turn\n  fix: "
            assert (text in caplog.text) == warns


def test_a_tokenizer_that_has_used_its_threads_before(small, tmp_path, many, monkeypatch):
    """They are gone after a fork, so that a tokenizer would wait for them for ever."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    small.backend_tokenizer.encode_batch(["a" * 50] * 200)
    assert len(_prepare(small, _written(tmp_path / "rows.jsonl", *many), num_tokenizers=2)) == 120
    assert "TOKENIZERS_PARALLELISM" not in os.environ
