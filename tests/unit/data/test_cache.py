"""Tokenized rows on disk: what is kept, what the key is made of, that it is made once, and what a bad row does."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data import cache, readers
from lit_fsdp.data.cache import ARRAYS, TokenizedRows, open_rows, prepare_rows
from lit_fsdp.data.encode import RowEncoder
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


def _prepare(small: Any, source: Path, template: str = TEMPLATE, **options: Any) -> TokenizedRows:
    config = DataConfig(train=str(source), **{"cache_dir": str(source.parent / "cache"), **options})
    return prepare_rows(str(source), config, RowEncoder(small, config, template))


def test_rows_and_counts(small: Any, source: Path):
    rows = _prepare(small, source, max_seq_length=8)
    assert [small.decode(rows.row(i)[0]) for i in range(len(rows))] == ["<s>12<s>34</s>", "<s>1<s>23456", "<s><s></s>"]
    assert [rows.row(i)[1].tolist() for i in range(3)] == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0] + [1] * 5, [0, 0, 1]]
    assert (rows.input_ids.dtype, rows.supervised.dtype, rows.lengths.dtype) == (np.int32, np.uint8, np.int64)
    assert (rows.num_supervised.tolist(), rows.numbers.tolist()) == ([3, 5, 1], [0, 3, 4])
    meta = dict(rows.meta)
    assert len(meta.pop("fingerprint")) == len(meta.pop("order_fingerprint")) == 32
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
    assert meta == {**counts, "longest": 8, "refused": []}


def test_second_time_is_read_from_the_cache(small: Any, source: Path, monkeypatch: pytest.MonkeyPatch):
    first = _prepare(small, source)
    monkeypatch.setattr(RowEncoder, "encode", lambda *args: pytest.fail("tokenized again"))
    second = _prepare(small, source)
    assert second.folder == first.folder
    assert second.input_ids.tolist() == first.input_ids.tolist()
    assert not second.input_ids.flags.writeable


def test_the_key_is_of_everything_that_tokens_depend_on(
    small: Any, sentencepiece: Any, source: Path, monkeypatch: pytest.MonkeyPatch
):
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
    monkeypatch.setattr(cache, "_VERSION", 10_000)  # what an older release has left is neither read nor in the way
    others.append(_prepare(small, source))
    assert len({rows.meta["fingerprint"] for rows in [first, *others]}) == 8


def test_the_order_is_of_the_rows_alone(small: Any, sentencepiece: Any, source: Path):
    """Another tokenizer or template: the same rows in the same order. Other rows: another order."""
    first = _prepare(small, source)
    same = [_prepare(sentencepiece, source), _prepare(small, source, template=TEMPLATE.replace("<s>", "[INST]"))]
    assert {rows.meta["order_fingerprint"] for rows in same} == {first.meta["order_fingerprint"]}
    assert _prepare(small, source, max_seq_length=8).meta["order_fingerprint"] != first.meta["order_fingerprint"]


@pytest.mark.parametrize("options", [{}, {"max_seq_length": 3}])
def test_nothing_to_learn_is_refused(small: Any, tmp_path: Path, options: dict[str, int]):
    path = tmp_path / "rows.jsonl"
    path.write_text(_say("uabcd", "ax") if options else _say("uabcd"))
    with pytest.raises(DataError, match=r"rows\.jsonl: no token of any row is supervised; dropped 1 "):
        _prepare(small, path, **options)
    assert [p.suffix for p in (tmp_path / "cache" / "data").iterdir()] == [".lock"]


def test_several_sources_of_different_formats(small: Any, source: Path):
    other = source.with_name("more.csv")
    other.write_text("prompt,completion\nx,y\n")
    config = DataConfig(cache_dir=str(source.parent / "cache"))
    rows = prepare_rows([str(source), str(other)], config, RowEncoder(small, config, TEMPLATE))
    assert rows.meta["rows_read"] == 6
    assert [(entry["rows_read"], entry["rows"]) for entry in rows.meta["entries"]] == [(5, 4), (1, 1)]
    assert rows.numbers.tolist() == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("name", ["input_ids.bin", "keys.bin", "meta.json"])
def test_damage_is_told(small: Any, source: Path, name: str):
    folder = _prepare(small, source).folder
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"^{folder}: damaged tokenized rows \(.*\)\n  fix:     delete this"):
        open_rows(folder)


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
    source.write_text('{"text": "abcdefghij"}\n{"text": "k"}')
    rows = _prepare(small, source, max_seq_length=6)
    assert rows.numbers.tolist() == [0, 0, 1]  # the pieces of a text have its number and key
    assert rows.keys[0] == rows.keys[1] != rows.keys[2]
    assert (rows.meta["split"], rows.meta["rows_read"], rows.meta["rows"]) == (1, 2, 3)


# -- bad rows


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """120 rows in many small chunks, all of them done by other processes where there are any."""
    monkeypatch.setattr(readers, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(cache, "_ALONE", 0)
    return [_say(f"u{n}", "a" + "x" * (n % 7)) for n in range(120)]


def _written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("number", [1, 3])
def test_the_first_bad_row_of_the_file_is_told(small: Any, tmp_path: Path, many: list[str], number: int):
    """Whatever is wrong with it, and whatever is wrong with later ones; nothing of it is left behind."""
    many[71:73], many[110] = ['{"messages": 3}', "no JSON"], "no JSON"
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DataError, match=rf"^{path}:72: "):
        _prepare(small, _written(path, many), num_tokenizers=number)
    many[40] = "no JSON"
    with pytest.raises(DataError, match=rf"^{path}:41: not JSON"):
        _prepare(small, _written(path, many), num_tokenizers=number)
    assert [entry.suffix for entry in (tmp_path / "cache" / "data").iterdir()] == [".lock"] * 2


@pytest.mark.parametrize("number", [1, 3])
def test_bad_rows_are_dropped_counted_and_named(
    small: Any, tmp_path: Path, many: list[str], number: int, caplog: pytest.LogCaptureFixture
):
    clean = _prepare(small, _written(tmp_path / "clean.jsonl", many))
    many[71:71] = ['{"messages": 3}', "no JSON"]
    path = _written(tmp_path / "rows.jsonl", many)
    rows = _prepare(small, path, num_tokenizers=number, on_bad_row="drop")
    assert rows.input_ids.tolist() == clean.input_ids.tolist()
    assert (rows.meta["rows_read"], rows.meta["rows"], rows.meta["dropped"]) == (122, 120, {"refused": 2})
    assert [line.split(": ")[0] for line in rows.meta["refused"]] == [f"{path}:72", f"{path}:73"]
    assert f"dropped (data.on_bad_row): {path}:73: not JSON" in caplog.text
    with pytest.raises(DataError, match=rf"^{path}:72: "):  # also where it is taken from the cache
        _prepare(small, path)


# -- processes


def test_bytes_do_not_depend_on_the_number_of_processes(small: Any, tmp_path: Path, many: list[str]):
    path = _written(tmp_path / "rows.jsonl", many)
    made = []
    for number in (1, 3):
        folder = _prepare(small, path, num_tokenizers=number, cache_dir=str(tmp_path / str(number))).folder
        made.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert made[0] == made[1]
    assert len(made[0]) == len(ARRAYS) + 1


def test_other_processes_get_the_folder_not_the_tokens(small: Any, source: Path):
    rows = _prepare(small, source)
    sent = pickle.dumps(rows)
    assert len(sent) < 500
    assert pickle.loads(sent).input_ids.tolist() == rows.input_ids.tolist()


def test_a_tokenizer_that_has_used_its_threads_before(
    small: Any, tmp_path: Path, many: list[str], monkeypatch: pytest.MonkeyPatch
):
    """They are gone after a fork, so that a tokenizer would wait for them for ever."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    small.backend_tokenizer.encode_batch(["a" * 50] * 200)
    assert len(_prepare(small, _written(tmp_path / "rows.jsonl", many), num_tokenizers=2)) == 120
    assert "TOKENIZERS_PARALLELISM" not in os.environ


PARENT = """
import os, signal, sys, time
from lit_fsdp.data import cache
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
cache._ALONE = 0
def slow(number):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(0.2)
list(cache._in_order(iter(range(10_000)), slow, 3, ()))
"""


def _alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "stop", [lambda p: p.kill(), lambda p: os.killpg(p.pid, signal.SIGINT)], ids=["killed", "Ctrl-C"]
)
def test_no_process_outlives_its_parent(stop: Callable[[subprocess.Popen[str]], None], root: Path):
    """However it ends: killed, or with Ctrl-C, which the terminal sends to all of them."""
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    workers: set[int] = set()
    while len(workers) < 3:
        workers.add(int(parent.stdout.readline()))
    stop(parent)
    _, said = parent.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_alive(worker) for worker in workers)
    assert said.count("Traceback") <= 1
