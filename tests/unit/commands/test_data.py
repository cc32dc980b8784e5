"""``data inspect``: what is shown is what is trained on, whatever the rows hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_fsdp import CausalLMDataModule, commands
from lit_fsdp.data import cache
from lit_fsdp.errors import ConfigError, DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.report.data import data_table
from tests.unit.data.conversations import NEMO, say

Out = pytest.CaptureFixture[str]
MODEL = {"name": "meta-llama/Llama-3.2-1B", "miniature": True}
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202e\x00 שלום 日本 [bold]x[/bold] ⟦no⟧"


def write(name: str, *rows: tuple[str, ...]) -> str:
    Path(name).write_text("".join(json.dumps({"messages": say(*turns)}) + "\n" for turns in rows))
    return name


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder and a cache of its own with a recipe; log lines go where the test's end takes them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lit_fsdp.logs.setup_logging", lambda: None)
    Path("r.yaml").write_text(json.dumps({"model": MODEL, "data": {"max_seq_length": 64, "num_tokenizers": 1}}))


def inspect(*words: str) -> int:
    return commands.run(["data", "inspect", "--config", "r.yaml", *words])


def test_what_is_shown_is_what_is_trained_on(capsys: Out, monkeypatch: pytest.MonkeyPatch):
    train = write("t.jsonl", ("u:a", "a:b"), ("u:dropped",), ("u:c", "a:d"), ("u:" + "q" * 100, "a:z"))
    assert inspect("--data.train", train, "--data.val", train, "--data.packing", "true", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(cache, "encode_rows", lambda *_: pytest.fail("tokenized again"))
    module = CausalLMDataModule(train=train, val=train, packing=True, max_seq_length=64)
    module.attach(miniature_tokenizer(), 0)
    rows = module.prepare(["train", "val"])["train"].rows
    split = record["data"]["splits"]["val"]
    assert (split["from"], split["rows_read"], split["samples"]) == (str(rows.folder), 4, 2)
    assert split["dropped"] == {"without a supervised token": 1, "cut before the assistant's turn": 1}
    assert split["supervised_share"] == split["supervised_tokens"] / split["tokens"]
    for index, sample in enumerate(record["samples"]):
        ids, supervised = rows.row(index)
        assert (sample["input_ids"], sample["supervised"]) == (ids.tolist(), supervised.tolist())
        assert "".join(text for text, is_marked, _ in sample["pieces"] if is_marked) == "bd"[index] + "<|im_end|>"
        assert "".join(text for text, *_ in sample["pieces"]) == miniature_tokenizer().decode(ids)


def test_turns_that_are_split_are_counted(capsys: Out):
    train = write("t.jsonl", ("u:a", "a:b", "u:c", "a:d"), ("u:e",), ("u:f", "a:g", "u:" + "q" * 90, "a:z"))
    assert inspect("--data.train", train, "--data.split_turns", "true", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    split, said = record["data"]["splits"]["train"], [sample["pieces"] for sample in record["samples"]]
    assert (split["rows_read"], split["samples"], split["truncated"]) == (3, 3, 0)
    assert split["dropped"] == {"without a supervised token": 1, "cut before the assistant's turn": 1}
    assert ["".join(text for text, is_marked, _ in pieces if is_marked)[:1] for pieces in said] == ["b", "d", "g"]
    assert record["data"]["loss_on"] == "assistant turns (all, each a sample)"


def test_nothing_of_a_row_reaches_the_terminal_raw(capsys: Out):
    train = write("t.jsonl", ("u:" + EVIL, "a:" + EVIL))
    assert inspect("--data.train", train, "--data.max_seq_length", "900") == 0
    out, err = capsys.readouterr()
    assert not set(out + err) & set("\x1b\x07\x9b\x00\r\u202e")
    shown = "⟨U+001B⟩[2J⟨U+001B⟩]0;owned⟨U+0007⟩⟨U+009B⟩31m⟨U+000D⟩⟨U+202E⟩⟨U+0000⟩ שלום 日本 [bold]x[/bold]"
    assert out.count(shown) == 2


@pytest.mark.parametrize("streams", ["false", "true"])
def test_what_the_template_does_not_write_is_counted(capsys: Out, streams: str):
    Path("nemo.jinja").write_text(NEMO)
    train = write("t.jsonl", ("u:a", "a:b"), ("s:Be brief.", "u:a", "a:b"), ("s:S", "u:c", "a:d", "u:e", "a:f"))
    words = ["--data.train", train, "--data.streaming", streams, "--data.chat_template", "nemo.jinja", "--json"]
    with pytest.raises(DataError, match=r"t\.jsonl:2: .*message 1 \(system\)(?s:.*)data\.unwritten_text: allow"):
        inspect(*words)
    drops, allows, splits = "--data.on_bad_row=drop", "--data.unwritten_text=allow", "--data.split_turns=true"
    for flags, counts in (
        ([drops], (1, {"refused": 2}, {})),
        ([allows], (3, {}, {"system": 2})),
        ([splits], (4, {}, {})),
    ):
        assert inspect(*words, *flags) == 0
        split = json.loads(capsys.readouterr().out)["data"]["splits"]["train"]
        assert (split["samples"], split["dropped"], split["unwritten"]) == counts


def test_plain_text_without_the_chat_template_is_counted_and_said(capsys: Out):
    plain, messages = {"prompt": "2 + 2?", "completion": " 4"}, {"completion": [{"role": "assistant", "content": "4"}]}
    messages["prompt"] = [{"role": "user", "content": "2 + 2?"}]
    pair = {"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"}
    for rows, count in (([plain, messages, plain], 2), ([messages], None), ([pair], 1)):
        Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert inspect("--data.train", "t.jsonl", "--json") == 0
        record = json.loads(capsys.readouterr().out)["data"]
        assert record["splits"]["train"].pop("plain_text") == count
        assert data_table(record).caption is None  # as older runs have written it
        assert inspect("--data.train", "t.jsonl") == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("plain text get no chat template; to get it, write them as messages" in shown) == bool(count)


def test_answers_without_text_are_counted_and_warned_of(capsys: Out, caplog: pytest.LogCaptureFixture):
    """As empty cells of a table give them; nothing is said where there are none, or of rejected ones."""
    Path("empty.csv").write_text('prompt,completion\na,b\nc,\nd," "\n')
    pairs = [{"prompt": "a", "chosen": "", "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": ""}]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    train = write("t.jsonl", ("u:a", "a:b"), ("u:c", "a:"))
    for words, counts in (
        (["empty.csv"], {"train": 2}),
        (["empty.csv", "--data.streaming", "true"], {"train": 2}),
        (["empty.csv", "--data.val", train], {"train": 2, "val": 1}),
        (["empty.csv", "--data.val_split", "1"], {"train": 2}),
        ([train, "--data.format", "messages"], {"train": 1}),
        (["pairs.jsonl"], {"train": 1}),
    ):
        caplog.clear()
        assert inspect("--data.train", *words, "--json") == 0
        record = json.loads(capsys.readouterr().out)["data"]
        found = {name: split["answers_without_text"] for name, split in record["splits"].items()}
        assert {name: count for name, count in found.items() if count} == counts
        said = [one.getMessage() for one in caplog.records if "have no text" in one.getMessage()]
        assert [one.partition(";")[0] for one in said] == [
            f"data.{name}: rows whose answers have no text besides special tokens: {count}"
            for name, count in counts.items()
        ]
        assert ("answers without text" in [*data_table(record).columns[0].cells]) == bool(counts)
    assert inspect("--data.train", "empty.csv", "--json") == 0
    file = Path(json.loads(capsys.readouterr().out)["data"]["splits"]["train"]["from"], "meta.json")
    older = json.loads(file.read_text())
    del older["answers_without_text"]
    file.write_text(json.dumps(older))
    assert inspect("--data.train", "empty.csv", "--json") == 0
    assert json.loads(capsys.readouterr().out)["data"]["splits"]["train"]["answers_without_text"] is None


def test_pairs_and_held_out_rows_are_counted_as_such(capsys: Out):
    pairs = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(80)]
    for name, part in (("a.jsonl", pairs[:50]), ("b.jsonl", pairs[50:])):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in part))
    sources = ["--data.train", "[a.jsonl, b.jsonl]"]
    assert inspect(*sources, "--json") == 0
    (whole,) = json.loads(capsys.readouterr().out)["data"]["splits"].values()
    assert [source["rows"] for source in whole["sources"]] == [50, 30]
    assert (whole["rows_read"], whole["pairs"], whole["samples"]) == (80, 80, 160)
    assert inspect(*sources, "--data.val_split", "6", "--json") == 0
    record = json.loads(capsys.readouterr().out)["data"]
    train, val = record["splits"].values()
    assert [one["rows_read"] for one in (train, val)] == [80, None]
    assert [(one["pairs"], one["samples"]) for one in (train, val)] == [(74, 148), (6, 12)]
    assert [sum(source["rows"] for source in one["sources"]) for one in (train, val)] == [74, 6]
    assert [one["rows"] + other["rows"] for one, other in zip(*(s["sources"] for s in (train, val)), strict=True)] == [
        50,
        30,
    ]
    assert val["from"] == "data.val_split of train"
    labels, *columns = ([*column.cells] for column in data_table(record).columns)
    shown = {label: [str(column[row]) for column in columns] for row, label in enumerate(labels)}
    assert shown["rows read"] == ["80", "-"]
    assert (shown["pairs"], shown["samples (two per pair)"]) == (["74", "6"], ["148", "12"])


def test_texts_and_tokens_are_not_described_as_conversations(capsys: Out):
    for row, header in (
        ({"text": "hello"}, "Data: no chat template, loss on every token, "),
        ({"input_ids": [1, 2, 3]}, "Data: no chat template, loss on the tokens that the rows supervise, "),
    ):
        Path("t.jsonl").write_text(json.dumps(row) + "\n")
        assert inspect("--data.train", "t.jsonl") == 0
        assert header in " ".join(capsys.readouterr().out.split())


def test_a_template_that_never_ends_an_answer_is_warned_of(caplog: pytest.LogCaptureFixture):
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}END\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    train = write("t.jsonl", ("u:a", "a:b"), ("u:" + "c" * 60, "a:d"))  # the second one is truncated
    Path("texts.jsonl").write_text(json.dumps({"text": "hello"}) + "\n")
    for rows, end, seen in ((train, "", 1), (train, "{{ eos_token }}", 0), ("texts.jsonl", "", 0)):
        Path("t.jinja").write_text(turns.replace("END", end) + prompt)
        caplog.clear()
        assert inspect("--data.train", rows, "--data.chat_template", "t.jinja", "--data.truncation", "end") == 0
        warned = [record.getMessage() for record in caplog.records if "end its answers" in record.getMessage()]
        assert len(warned) == seen, (rows, end)
        assert all("data.train: none of the first 1 samples supervises a special token" in one for one in warned)


def test_a_template_without_a_generation_prompt_is_warned_of(caplog: pytest.LogCaptureFixture):
    header = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    bare = (
        "{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
    )
    train = write("t.jsonl", ("u:a", "a:b"))
    for template, seen in ((header, 1), (header + prompt, 0), (bare, 0)):
        Path("t.jinja").write_text(template)
        caplog.clear()
        assert inspect("--data.train", train, "--data.chat_template", "t.jinja") == 0
        assert sum("ignores add_generation_prompt" in one.getMessage() for one in caplog.records) == seen, template
    Path("t.jsonl").write_text(json.dumps({"prompt": "2 + 2 =", "completion": " 4"}) + "\n")  # never rendered
    Path("t.jinja").write_text(header)
    caplog.clear()
    assert inspect("--data.train", "t.jsonl", "--data.chat_template", "t.jinja") == 0
    assert not [one for one in caplog.records if "add_generation_prompt" in one.getMessage()]


def test_generated_rows_keep_their_own_columns_and_format(capsys: Out):
    """As with the fragment debug/smoke, whose test rows are generated."""
    Path("qa.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": "4"}) + "\n")
    columns = '{"instruction": "question", "output": "answer"}'
    words = ["--data.train", "qa.jsonl", "--data.columns", columns, "--data.format", "instruction", "--json"]
    for split, source in (("train", "qa.jsonl"), ("test", "generated:4")):
        assert inspect(*words, "--data.test", "generated:4", "--split", split) == 0
        assert [one["name"] for one in json.loads(capsys.readouterr().out)["data"]["splits"][split]["sources"]] == [
            source
        ]


def test_a_wrong_command_line():
    train = write("t.jsonl", ("u:a", "a:b"))
    for words, field in (
        (["--n", "many"], "lit-fsdp data inspect --n"),
        (["--split", "test"], "--split"),
        (["--color", "1"], "color"),
        (["--data.train", "null"], "data.train"),
    ):
        with pytest.raises(ConfigError) as caught:
            inspect("--data.train", train, *words)
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="lit-fsdp data inspect"):
        commands.run(["data", "inspcet"])


def test_a_picture():
    pytest.importorskip("matplotlib")
    train = write("t.jsonl", ("u:a", "a:b"), ("u:c", "a:d"))
    assert inspect("--data.train", train, "--data.packing", "true", "--data.predict", train, "--plot", "x.png") == 0
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")


def test_a_stream_is_seen_by_its_first_rows(capsys: Out):
    """By the same numbers as of rows that are tokenized as a whole."""
    rows = [(f"u:{i}", "a:" + "x" * i) for i in range(9)]
    first, train = write("first.jsonl", *rows[:4]), write("t.jsonl", *rows)
    splits = []
    for words in ((first,), (train, "--data.streaming", "true", "--data.shuffle_window", "4")):
        assert inspect("--data.train", *words, "--n", "2", "--json") == 0
        record = json.loads(capsys.readouterr().out)
        assert len(record["samples"]) == 2
        splits.append(record["data"]["splits"]["train"])
    assert splits[1].pop("from") == "the first 4 rows of a stream"
    assert splits[1].pop("sources")[0]["format"] == "messages"
    assert {name: splits[0][name] for name in splits[1]} == splits[1]
    with pytest.raises(DataError, match="the first 1 rows of a stream: no row is left with supervised tokens"):
        inspect("--data.train", write("t.jsonl", ("u:only asked",)), "--data.streaming", "true")
