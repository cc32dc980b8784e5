"""Tokenised rows on disk: what is kept, what the key is made of, and that it is made once."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.cache import TokenisedRows, open_rows, prepare_rows
from lit_fsdp.data.templates import ChatTemplate
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
    return prepare_rows(str(source), config, ChatTemplate(small, template, config.supervise))


def test_rows_and_counts(small: Any, source: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "lit_fsdp"):
        rows = _prepare(small, source, max_seq_length=8)
    assert [small.decode(rows.row(i)[0]) for i in range(len(rows))] == ["<s>12<s>34</s>", "<s>1<s>23456", "<s><s></s>"]
    assert [rows.row(i)[1].tolist() for i in range(3)] == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0] + [1] * 5, [0, 0, 1]]
    assert (rows.input_ids.dtype, rows.supervised.dtype, rows.offsets.dtype) == (np.int32, np.uint8, np.int64)
    fingerprints = {rows.meta.pop("fingerprint"), rows.meta.pop("order_fingerprint")}
    assert {len(text) for text in fingerprints} == {32}
    assert rows.meta == {
        "rows_read": 5,
        "rows": 3,
        "dropped": {"without an assistant turn": 1, "cut before the assistant's turn": 1},
        "truncated": 1,
        "tokens": 18,
        "supervised_tokens": 9,
        "longest": 8,
    }
    assert "rows of format messages" in caplog.text
    assert (
        f"{source}: 5 rows read, dropped 1 without an assistant turn, 1 cut before the assistant's turn, truncated 1, "
        "50.0 % of 18 tokens supervised, mean length 6"
    ) in caplog.text


def test_second_time_is_read_from_the_cache(small: Any, source: Path, monkeypatch: pytest.MonkeyPatch):
    first = _prepare(small, source)
    monkeypatch.setattr(ChatTemplate, "encode", lambda *args: pytest.fail("tokenised again"))
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
    rows = prepare_rows([str(source), str(other)], config, ChatTemplate(small, TEMPLATE))
    assert rows.meta["rows_read"] == 6
    assert small.decode(rows.row(len(rows) - 1)[0]) == "<s>x<s>y</s>"


def test_damage_is_told(small: Any, source: Path):
    folder = _prepare(small, source).folder
    os.truncate(folder / "supervised.bin", 3)
    with pytest.raises(DataError, match=r"damaged tokenised rows .*\n  fix:     delete this folder"):
        _prepare(small, source)
    (folder / "meta.json").unlink()
    with pytest.raises(DataError, match="damaged tokenised rows"):
        open_rows(folder)


def test_other_processes_get_the_folder_not_the_tokens(small: Any, source: Path):
    rows = _prepare(small, source)
    sent = pickle.dumps(rows)
    assert len(sent) < 500
    assert pickle.loads(sent).input_ids.tolist() == rows.input_ids.tolist()


WORKER = """
import sys, time
from pathlib import Path
from lit_fsdp.host import make_once
folder, log, wait = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
def make(partial):
    open(log, "a").write("made\\n")
    time.sleep(wait)
    (partial / "file").write_text("whole")
make_once(folder, make, "tokenising")
print((folder / "file").read_text())
"""


def test_processes_that_start_together_make_it_once_and_survive_a_kill(tmp_path: Path, root: Path):
    folder, log = tmp_path / "cache" / "x", tmp_path / "log"

    def start(wait: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(folder), str(log), str(wait)]
        return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)

    killed = start(60)
    while not log.exists():
        time.sleep(0.02)
    others = [start(0.3), start(0.3)]
    time.sleep(0.3)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=10)
    assert [other.communicate(timeout=20)[0] for other in others] == ["whole\n", "whole\n"]
    assert log.read_text() == "made\n" * 2
    assert sorted(p.name for p in folder.parent.iterdir()) == ["x", "x.lock"]
