"""Tokenized rows on disk: what is kept, what the key is made of, that it is made once, and what a bad row does."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data import readers
from lit_fsdp.data.cache import TokenizedRows, open_rows, prepare_rows
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.errors import DataError
from tests.unit.data.conftest import encoder_of
from tests.unit.data.conversations import LETTERS as TEMPLATE


def _say(*turns: str) -> str:
    roles = {"u": "user", "a": "assistant"}
    return json.dumps({"messages": [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]})


def _written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def source(tmp_path) -> Path:
    rows = [_say("u12", "a34"), _say("unobody"), _say("uabcdefgh", "aX"), _say("u1", "a2345678"), _say("u", "a")]
    return _written(tmp_path / "rows.jsonl", *rows)


def _prepare(tokenizer: Any, source: Path, template: str = TEMPLATE, **options: Any) -> TokenizedRows:
    config = DataConfig(**{"train": str(source), "cache_dir": str(source.parent / "cache"), **options})
    return prepare_rows(config.train, config, encoder_of(tokenizer, config, template))


def test_rows_and_counts(small, source):
    rows = _prepare(small, source, max_seq_length=8)
    assert [small.decode(rows.row(i)[0]) for i in range(len(rows))] == ["<s>12<s>34</s>", "<s>1<s>23456", "<s><s></s>"]
    assert [rows.row(i)[1].tolist() for i in range(3)] == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0] + [1] * 5, [0, 0, 1]]
    assert (rows.input_ids.dtype, rows.supervised.dtype, rows.lengths.dtype) == (np.int32, np.uint8, np.int64)
    assert (rows.num_supervised.tolist(), rows.numbers.tolist()) == ([3, 5, 1], [0, 3, 4])
    meta = dict(rows.meta)
    assert len(meta.pop("fingerprint")) == len(*meta.pop("digests")) == 32
    counts = {
        **{"rows_read": 5, "rows": 3, "truncated": 1, "tokens": 18, "supervised_tokens": 9},
        "dropped": {"without a supervised token": 1, "cut before the assistant's turn": 1},
    }
    assert meta.pop("entries") == [{"name": str(source), "format": "messages", **counts}]
    assert meta == {**counts, "longest": 8, "refused": []}
    sent = pickle.dumps(rows)  # other processes get the folder, not the tokens
    assert len(sent) < 500
    assert pickle.loads(sent).input_ids.tolist() == rows.input_ids.tolist()


def test_the_key_is_of_everything_that_tokens_depend_on(small, sentencepiece, source, monkeypatch):
    first = _prepare(small, source)
    others = [
        _prepare(small, source, max_seq_length=9),
        _prepare(small, source, supervise="last"),
        _prepare(small, source, train_on_prompt=True),
        _prepare(small, source, truncation="start"),
        _prepare(small, source, format="messages"),
        _prepare(small, source, columns={"messages": "messages"}),
        _prepare(small, source, template=TEMPLATE.replace("<s>", "[INST]")),
        _prepare(sentencepiece, source),
    ]
    copy = source.with_name("copy.jsonl")
    others.append(_prepare(small, _written(copy, source.read_text(), _say("u1", "a1"))))
    assert len({rows.meta["fingerprint"] for rows in [first, *others]}) == 10
    # what the order depends on is of the rows alone: the same ones in another tokenizer or template have the same
    orders = [(rows.meta["digests"], rows.numbers.tolist()) for rows in (first, *others)]
    assert [orders.index(order) for order in orders] == [
        0,
        1,
        0,
        3,
        0,
        0,
        0,
        0,
        0,
        9,
    ]  # 9 tokens leave nothing of one row
    monkeypatch.setattr(RowEncoder, "encode", lambda *args: pytest.fail("tokenized again"))
    again = _prepare(small, _written(copy, source.read_text()))
    assert again.folder == first.folder
    assert not again.input_ids.flags.writeable


def test_nothing_to_learn_too_much_lost_and_damage_are_told(small, source):
    for line, options in ((_say("uabcd", "ax"), {"max_seq_length": 3}), (_say("uabcd"), {})):
        path = _written(source.with_name("none.jsonl"), line)
        with pytest.raises(DataError, match=r"none\.jsonl: no token of any row is supervised; dropped 1 "):
            _prepare(small, path, **options)
    assert {entry.suffix for entry in (source.parent / "cache" / "data").iterdir()} == {".lock"}
    _prepare(small, source, max_seq_length=8, max_dropped_share=0.2)
    with pytest.raises(DataError, match=r"of 1 of 5 rows nothing is left within data\.max_seq_length 8\n.*share 0\.19"):
        _prepare(small, source, max_seq_length=8, max_dropped_share=0.19)
    for length, name in enumerate(("input_ids.bin", "keys.bin", "meta.json"), start=9):
        folder = _prepare(small, source, max_seq_length=length).folder
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])
        with pytest.raises(DataError, match=rf"^{folder}: damaged tokenized rows \(.*\)\n  fix:     delete this"):
            open_rows(folder)


# -- bad rows, and processes


@pytest.fixture
def many(monkeypatch) -> list[str]:
    """120 rows in many small chunks."""
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 300)
    return [_say(f"u{n}", "a" + "x" * (n % 7)) for n in range(120)]


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
    with pytest.raises(DataError, match=rf"^{path}:72: "):  # also where it is taken from the cache
        _prepare(small, path)


def test_a_tokenizer_that_has_used_its_threads_before(small, tmp_path, many, monkeypatch):
    """They are gone after a fork, so that a tokenizer would wait for them for ever."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    small.backend_tokenizer.encode_batch(["a" * 50] * 200)
    assert len(_prepare(small, _written(tmp_path / "rows.jsonl", *many), num_tokenizers=2)) == 120
    assert "TOKENIZERS_PARALLELISM" not in os.environ
