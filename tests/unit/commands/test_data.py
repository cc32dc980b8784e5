"""``data inspect`` and ``data prepare``: what is shown is what is trained on, whatever the rows hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp import commands
from lit_fsdp.config.data import DataConfig
from lit_fsdp.data import cache
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.packing import prepare_samples
from lit_fsdp.errors import ConfigError, DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.report import data_tables
from lit_fsdp.report.samples import visible

Out = pytest.CaptureFixture[str]
MODEL = {"name": "meta-llama/Llama-3.2-1B", "miniature": True}
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202e\x00 שלום 日本 [bold]x[/bold] ⟦no⟧"


def chat(question: str, answer: str | None = None) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    return {"messages": turns + ([] if answer is None else [{"role": "assistant", "content": answer}])}


def write(name: str, *rows: dict[str, Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder and a cache of its own with a recipe; log lines go where the test's end takes them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    Path("r.yaml").write_text(json.dumps({"model": MODEL, "data": {"max_seq_length": 64, "num_tokenizers": 1}}))
    log = logging.getLogger("lit_fsdp")
    before, level = list(log.handlers), log.level
    yield
    log.handlers[:] = before
    log.setLevel(level)


def data(verb: str, *words: str) -> int:
    return commands.run(["data", verb, "--config", "r.yaml", *words])


def inspected(capsys: Out, *words: str, code: int = 0) -> dict[str, Any]:
    assert data("inspect", *words, "--json") == code
    return json.loads(capsys.readouterr().out)


def test_what_is_shown_is_what_is_trained_on(capsys: Out):
    train = write("t.jsonl", chat("a", "b"), chat("dropped"), chat("c", "d"))
    record = inspected(capsys, "--data.train", train, "--n", "9")
    config = DataConfig(train=train, max_seq_length=64)
    rows = prepare_samples(config, ["train"], RowEncoder(miniature_tokenizer(), config))["train"].rows
    shown = record["samples"]
    assert [sample["location"] for sample in shown] == ["t.jsonl:1", "t.jsonl:3"]
    for index, sample in enumerate(shown):
        ids, supervised = rows.row(index)
        assert (sample["input_ids"], sample["supervised"]) == (ids.tolist(), supervised.tolist())
        supervised_text = "".join(piece["text"] for piece in sample["pieces"] if piece["supervised"])
        assert supervised_text == "bd"[index] + "<|im_end|>"
        assert "".join(p["text"] for p in sample["pieces"]) == miniature_tokenizer().decode(ids)
    assert record["data"]["splits"]["train"]["fingerprint"]


def test_marks_stand_where_there_is_no_color(capsys: Out):
    assert data("inspect", "--data.train", write("t.jsonl", chat("a\tq", "b\nc"))) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>user↵\na⇥   q<|im_end|>↵\n<|im_start|>assistant↵\n⟦b↵\nc<|im_end|>⟧" in out
    assert "loss on all assistant turns, samples of at most 64 tokens, padded, 1 to a micro-batch" in " ".join(
        out.replace("\n", " ").split()
    )
    assert "t.jsonl:1: " in out


def test_nothing_of_a_row_reaches_the_terminal_raw(capsys: Out):
    train = write("t.jsonl", chat(EVIL, EVIL), chat(EVIL))
    for words in ([], ["--ids"], ["--row", "1"]):
        assert data("inspect", "--data.train", train, "--data.max_seq_length", "900", *words) == 0
        out, err = capsys.readouterr()
        assert not set(out + err) & set("\x1b\x07\x9b\x00\r\u202e")
        assert "[bold]" in out or "--ids" in words
    Path("loud.jinja").write_text("{{ raise_exception(messages[0]['content']) }}")
    assert data("inspect", "--data.train", train, "--data.chat_template", "loud.jinja") == 1
    out, err = capsys.readouterr()
    assert "owned" in err
    assert not set(out + err) & set("\x1b\x07\x9b\x00\r\u202e")
    assert "⟨U+001B⟩[2J⟨U+001B⟩]0;owned⟨U+0007⟩⟨U+009B⟩31m⟨U+000D⟩⟨U+202E⟩⟨U+0000⟩ שלום 日本" in visible(EVIL)


def test_what_becomes_of_one_row(capsys: Out):
    train = write("t.jsonl", chat("a", "b"), chat("x"), chat("q" * 100, "z"))
    reasons = [None, "without a supervised token", "cut before the assistant's turn"]
    for number, dropped in enumerate(reasons):
        (sample,) = inspected(capsys, "--data.train", train, "--row", str(number))["samples"]
        assert (sample["location"], sample["dropped"]) == (f"t.jsonl:{number + 1}", dropped)
    assert data("inspect", "--data.train", train, "--row", "2") == 0
    out = capsys.readouterr().out
    assert "not trained on: cut before the assistant's turn" in out
    with pytest.raises(ConfigError, match=r"^--row: got 3\n  allowed: the number of a row of data\.train"):
        data("inspect", "--data.train", train, "--row", "3")


def test_what_could_not_be_trained_on_is_shown_and_fails(capsys: Out):
    Path("bad.jinja").write_text("{{ raise_exception('not with me') }}")
    boss: Any = {"messages": [{"role": "boss", "content": "x"}]}
    cases: tuple[tuple[list[Any], list[str], str], ...] = (
        ([], [], "no rows"),
        ([chat("only asked")], [], "no token of any row is supervised"),
        ([chat("q" * 100, "z"), chat("q" * 99, "z"), chat("a", "b")], [], "data.max_dropped_share"),
        ([chat("a", "b"), boss], [], "t.jsonl:2: message 0: role 'boss'"),
        ([chat("a", "b")], ["--data.chat_template", "bad.jinja"], "t.jsonl:1: the chat template"),
    )
    for rows, words, said in cases:
        train = write("t.jsonl", *rows)
        assert data("inspect", "--data.train", train, *words) == 1
        out, err = capsys.readouterr()
        assert said in err
        assert not rows or "t.jsonl:1: " in out
        with pytest.raises(DataError):
            data("prepare", "--data.train", train, *words)


def test_a_wrong_command_line():
    train = write("t.jsonl", chat("a", "b"))
    for words, field in (
        (["--row", "-1"], "--row"),
        (["--n", "many"], "lit-fsdp data inspect"),
        (["--split", "test"], "--split"),
        (["--plot", "nowhere/x.png"], "--plot"),
        (["--color", "1"], "color"),
        (["--print_config"], "--print_config"),
        (["--data.train", "null"], "data.train"),
    ):
        with pytest.raises(ConfigError) as caught:
            data("inspect", "--data.train", train, *words)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="lit-fsdp data prepare"):
        commands.run(["data", "prepair"])


def test_a_picture(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    train = write("t.jsonl", chat("a", "b"), chat("c", "d"))
    words = ["--data.train", train, "--data.packing", "true", "--data.val", train, "--n", "0", "--plot"]
    assert data("inspect", *words, "x.png") == 0
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    found = data_tables.importlib.util.find_spec
    monkeypatch.setattr(data_tables.importlib.util, "find_spec", lambda name: None if "plot" in name else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'lit-fsdp\[plot\]'"):
        data("inspect", *words, "y.png")


# -- prepare


def test_prepared_once_and_for_the_run(capsys: Out, monkeypatch: pytest.MonkeyPatch):
    from lit_fsdp import CausalLMDataModule

    train, val = write("t.jsonl", chat("a", "b"), chat("c", "d")), write("v.jsonl", chat("e", "f"))
    words = ["--data.train", train, "--data.val", val, "--data.packing", "true", "--json"]
    records = []
    for _ in range(2):
        assert data("prepare", *words) == 0
        records.append(json.loads(capsys.readouterr().out)["data"]["splits"])
    assert records[0] == records[1]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(cache, "encode_rows", refuse)
    options = {"train": train, "val": val, "packing": True, "max_seq_length": 64}
    module = CausalLMDataModule(**options)
    module.attach(miniature_tokenizer(), 0)
    found = module.prepare(["train", "val"])
    assert {name: split.rows.meta["fingerprint"] for name, split in found.items()} == {
        name: record["fingerprint"] for name, record in records[0].items()
    }


def test_a_stream_is_seen_by_its_first_rows(capsys: Out):
    train = write("t.jsonl", *(chat(str(i), "x") for i in range(9)))
    words = ["--data.train", train, "--data.streaming", "true", "--data.shuffle_window", "4"]
    record = inspected(capsys, *words, "--n", "2")
    split = record["data"]["splits"]["train"]
    assert (split["seen"], split["rows_read"], split["samples"]) == ("the first 4 rows of a stream", 4, 4)
    assert [sample["location"] for sample in record["samples"]] == ["t.jsonl:1", "t.jsonl:2"]
    with pytest.raises(ConfigError, match=r"data\.streaming"):
        data("prepare", *words)
