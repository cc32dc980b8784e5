"""Tokenised rows on disk: what is kept, what the key is made of, and that it is made once."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data import cache, files, pool
from lit_fsdp.data.cache import prepare_rows
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.rows import ARRAYS, TokenisedRows, open_rows
from lit_fsdp.errors import DataError

# per row: prompt, then one token per letter and one for the end
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
    "{{ '<s>' if add_generation_prompt }}"
)


def _say(*turns: str) -> str:
    roles = {"u": "user", "a": "assistant"}
    return json.dumps({"messages": [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    rows = [_say("u12", "a34"), _say("unobody"), _say("uabcdefgh", "aX"), _say("u1", "a2345678"), _say("u", "a")]
    path.write_text("\n".join(rows))
    return path


def _prepare(small: Any, source: Path, template: str = TEMPLATE, **options: Any) -> TokenisedRows:
    config = DataConfig(train=str(source), cache_dir=str(source.parent / "cache"), **options)
    return prepare_rows(str(source), config, RowEncoder(small, config, template))


def test_rows_and_counts(small: Any, source: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "lit_fsdp"):
        rows = _prepare(small, source, max_seq_length=8)
    assert [small.decode(rows.row(i)[0]) for i in range(len(rows))] == ["<s>12<s>34</s>", "<s>1<s>23456", "<s><s></s>"]
    assert [rows.row(i)[1].tolist() for i in range(3)] == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0] + [1] * 5, [0, 0, 1]]
    assert (rows.input_ids.dtype, rows.supervised.dtype, rows.offsets.dtype) == (np.int32, np.uint8, np.int64)
    assert (rows.learnt.tolist(), rows.numbers.tolist()) == ([3, 5, 1], [0, 3, 4])
    meta = dict(rows.meta)
    assert len(meta.pop("fingerprint")) == len(meta.pop("order_fingerprint")) == 32
    assert set(meta.pop("spot_check")) == set(ARRAYS)
    counts = {
        "rows_read": 5,
        "rows": 3,
        "dropped": {"without an assistant turn": 1, "cut before the assistant's turn": 1},
        "truncated": 1,
        "split": 0,
        "tokens": 18,
        "supervised_tokens": 9,
    }
    assert meta.pop("entries") == [{"name": str(source), "format": "messages", **counts}]
    assert meta == {**counts, "longest": 8}
    assert "rows of format messages" in caplog.text
    assert (
        f"{source}: 5 rows read, dropped 1 without an assistant turn, 1 cut before the assistant's turn, truncated 1, "
        "50.0 % of 18 tokens supervised, mean length 6"
    ) in caplog.text


def test_what_follows_the_last_supervised_token_is_left_out(small: Any, source: Path):
    """No loss depends on it, and the row is shorter: the line break after the last turn, a user's last word."""
    source.write_text(_say("u12", "a34", "u56") + "\n" + _say("u1", "a2"))
    rows = _prepare(small, source, template=TEMPLATE + "!", max_seq_length=7)
    assert [small.decode(rows.row(i)[0]) for i in range(2)] == ["<s>12<s>34</s>", "<s>1<s>2</s>"]
    assert rows.meta["truncated"] == 0


def test_second_time_is_read_from_the_cache(small: Any, source: Path, monkeypatch: pytest.MonkeyPatch):
    first = _prepare(small, source)
    monkeypatch.setattr(RowEncoder, "encode", lambda *args: pytest.fail("tokenised again"))
    second = _prepare(small, source)
    assert second.folder == first.folder
    assert second.input_ids.tolist() == first.input_ids.tolist()
    assert not second.input_ids.flags.writeable


def test_the_key_is_of_everything_that_tokens_depend_on(small: Any, sentencepiece: Any, source: Path):
    first = _prepare(small, source)
    others = [
        _prepare(small, source, max_seq_length=9),
        _prepare(small, source, supervise="last"),
        _prepare(small, source, format="messages"),
        _prepare(small, source, template=TEMPLATE.replace("<s>", "[INST]")),
        _prepare(sentencepiece, source),
    ]
    copy = source.with_name("copy.jsonl")
    copy.write_bytes(source.read_bytes())
    assert _prepare(small, copy).folder == first.folder
    copy.write_bytes(source.read_bytes() + b"\n" + _say("u1", "a1").encode())
    others.append(_prepare(small, copy))
    assert len({rows.fingerprint for rows in [first, *others]}) == 7


def test_what_others_do_to_the_tokenizer_changes_nothing(small: Any, source: Path):
    first = _prepare(small, source).folder
    small(["a", "abc"], padding=True, truncation=True, max_length=2)
    small.backend_tokenizer.enable_truncation(1)
    try:
        assert _prepare(small, source).folder == first
    finally:
        small.backend_tokenizer.no_truncation()
        small.backend_tokenizer.no_padding()


def test_the_order_is_of_the_rows_alone(small: Any, sentencepiece: Any, source: Path):
    """Another tokenizer or template: the same rows in the same order. Other rows: another order."""
    first = _prepare(small, source)
    same = [_prepare(sentencepiece, source), _prepare(small, source, template=TEMPLATE.replace("<s>", "[INST]"))]
    assert {rows.order_fingerprint for rows in same} == {first.order_fingerprint}
    assert _prepare(small, source, max_seq_length=8).order_fingerprint != first.order_fingerprint


@pytest.mark.parametrize("options", [{}, {"max_seq_length": 3}])
def test_nothing_to_learn_is_refused(small: Any, tmp_path: Path, options: dict[str, int]):
    path = tmp_path / "rows.jsonl"
    path.write_text(_say("uabcd", "ax") if options else _say("uabcd"))
    with pytest.raises(DataError, match=r"rows\.jsonl: no token of any row is supervised; dropped 1 "):
        _prepare(small, path, **options)
    assert [p.suffix for p in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


def test_a_bad_row_leaves_nothing_behind(small: Any, source: Path):
    source.write_text(source.read_text() + '\n{"messages": 3}')
    with pytest.raises(DataError, match=rf"^{source}:6: a conversation is a list"):
        _prepare(small, source)
    assert [p.suffix for p in (source.parent / "cache" / "data").iterdir()] == [".lock"]


def test_several_sources_of_different_formats(small: Any, source: Path):
    other = source.with_name("more.csv")
    other.write_text("prompt,completion\nx,y\n")
    config = DataConfig(cache_dir=str(source.parent / "cache"))
    rows = prepare_rows([str(source), str(other)], config, RowEncoder(small, config, TEMPLATE))
    assert rows.meta["rows_read"] == 6
    assert [(entry["rows_read"], entry["rows"]) for entry in rows.meta["entries"]] == [(5, 4), (1, 1)]
    assert rows.numbers.tolist() == [0, 2, 3, 4, 5]
    assert small.decode(rows.row(len(rows) - 1)[0]) == "xy</s>"


@pytest.mark.parametrize("name", list(ARRAYS))
@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_damage_is_told(small: Any, source: Path, name: str, harm: str):
    folder = _prepare(small, source).folder
    file = folder / f"{name}.bin"
    if harm == "remove":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content[:-1] if harm == "cut" else content)
    with pytest.raises(
        DataError, match=rf"^{folder}: damaged tokenised rows \(.*{name}\.bin.*\n  fix:     delete this"
    ):
        _prepare(small, source)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rows": 3}'])
def test_damaged_counts_are_told(small: Any, source: Path, text: str):
    folder = _prepare(small, source).folder
    (folder / "meta.json").write_text(text)
    with pytest.raises(DataError, match="damaged tokenised rows"):
        open_rows(folder)


def test_another_version_is_another_folder(small: Any, source: Path, monkeypatch: pytest.MonkeyPatch):
    """What an older release has left is neither read nor in the way."""
    first = _prepare(small, source).folder
    (first / "meta.json").write_text("of another release")
    monkeypatch.setattr(cache, "_VERSION", 10_000)
    assert _prepare(small, source).folder != first


def test_more_rows_lost_than_allowed(small: Any, source: Path):
    kept = _prepare(small, source, max_seq_length=8, max_dropped_share=0.2)
    assert kept.meta["dropped"]["cut before the assistant's turn"] == 1
    with pytest.raises(DataError) as told:
        _prepare(small, source, max_seq_length=8, max_dropped_share=0.19)
    assert f"{source}: of 1 of 5 rows nothing is left within data.max_seq_length 8" in str(told.value)
    assert "data.max_dropped_share 0.19 of the rows" in str(told.value)


def test_keys_are_of_the_content_and_digests_of_the_tokens(small: Any, sentencepiece: Any, source: Path):
    """The same conversation with another id is the same one, in another tokenizer too."""
    lines = [_say("u12", "a34"), _say("u12", "a34")[:-1] + ', "id": 7}', _say("u12", "a35"), _say("u12", "a34567")]
    source.write_text("\n".join(lines))
    rows, other = _prepare(small, source, max_seq_length=6), _prepare(sentencepiece, source)
    assert [rows.keys.tolist().index(key) for key in rows.keys] == [0, 0, 2, 3]
    assert [rows.digests.tolist().index(digest) for digest in rows.digests] == [0, 0, 2, 0]  # as cut to 6 tokens
    assert other.keys.tolist() == rows.keys.tolist()


def test_pieces_of_a_text_have_its_number_and_key(small: Any, source: Path):
    source.write_text('{"text": "abcdefghij"}\n{"text": "k"}')
    rows = _prepare(small, source, max_seq_length=6)
    assert rows.numbers.tolist() == [0, 0, 1]
    assert rows.keys[0] == rows.keys[1] != rows.keys[2]
    assert (rows.meta["split"], rows.meta["rows_read"], rows.meta["rows"]) == (1, 2, 3)


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_bytes_do_not_depend_on_the_number_of_processes(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(pool, "_ALONE_SECONDS", 0.0)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(_say(f"u{n}", "a" + "x" * (n % 7)) for n in range(200)))
    made = []
    for number in (1, 3):
        config = DataConfig(cache_dir=str(tmp_path / str(number)), num_tokenizers=number)
        made.append(_content(prepare_rows(str(path), config, RowEncoder(small, config, TEMPLATE)).folder))
    assert made[0] == made[1]
    assert len(made[0]) == len(ARRAYS) + 1


@pytest.mark.parametrize("number", [1, 3])
def test_the_first_bad_row_of_the_file_is_told(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    """Whatever is wrong with it, and whatever is wrong with later ones."""
    monkeypatch.setattr(files, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(pool, "_ALONE_SECONDS", 0.0)
    lines = [_say(f"u{n}", "ax") for n in range(120)]
    lines[71] = '{"messages": 3}'
    lines[72] = "no JSON"
    lines[110] = "no JSON"
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"^{path}:72: a conversation is a list"):
        _prepare(small, path, num_tokenizers=number)
    lines[40] = "no JSON"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"^{path}:41: not JSON"):
        _prepare(small, path, num_tokenizers=number)
    assert [entry.suffix for entry in (tmp_path / "cache" / "data").iterdir()] == [".lock"] * 2


def test_other_processes_get_the_folder_not_the_tokens(small: Any, source: Path):
    rows = _prepare(small, source)
    sent = pickle.dumps(rows)
    assert len(sent) < 500
    assert pickle.loads(sent).input_ids.tolist() == rows.input_ids.tolist()
