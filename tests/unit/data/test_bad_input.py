"""Whatever stands in a file is read, or refused with a DataError that names the file; nothing else ever comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.data.formats import Conversation, find_format, to_conversation
from lit_fsdp.data.sources import find_sources
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.errors import ConfigError, DataError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a 1"}, {"role": "assistant", "content": "b é"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "do", "input": "x", "output": "y"},
    {"prompt": "p", "completion": "c", "tools": '[{"name": "f"}]'},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
]


def _use(source: str, template: ChatTemplate) -> int:
    """The number of rows, each of them read, understood and tokenised."""
    count = 0
    for found in find_sources(source):
        form = None
        for place, row in found.rows():
            form = form or find_format(set(row), place)
            template.encode([to_conversation(row, form, place)], [place])
            count += 1
    return count


def test_a_parquet_string_that_is_no_text(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    offsets = pyarrow.array([0, 2], pyarrow.int32()).buffers()[1]
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, offsets, pyarrow.py_buffer(b"\xff\xfe")])
    days = pyarrow.array([2**30], pyarrow.date32())  # beyond what a date can be
    for name, columns in {"text": {"prompt": bad, "completion": ["c"]}, "day": {"prompt": ["a"], "day": days}}.items():
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(DataError, match=rf"^{path}: not a Parquet file, broken after row 0"):
            list(find_sources(str(path))[0].rows())


def test_an_arrow_text_that_ends_beside_the_file(tmp_path: Path):
    """Reading it would take whatever lies in memory there."""
    pyarrow = pytest.importorskip("pyarrow")
    offsets = pyarrow.array([0, 10**6, 2], pyarrow.int32()).buffers()[1]
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"ab")])
    table = pyarrow.table({"text": bad})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"a\.arrow: not an Arrow file, broken after row 0"):
        list(find_sources(str(tmp_path / "a.arrow"))[0].rows())


@pytest.mark.parametrize(
    "name", ["~nobody-of-this-name/x.jsonl", "x" * 300 + ".jsonl", "y" * 300 + "/x.jsonl", "a\0b.csv"]
)
def test_a_name_that_no_file_can_have(name: str):
    with pytest.raises(DataError, match="no such file"):
        find_sources(name)


@pytest.mark.parametrize("count", ["9" * 5000, "10000000"])
def test_too_many_generated_rows(count: str):
    with pytest.raises(ConfigError, match="N from 1 to 1000000"):
        find_sources(f"generated:{count}")


def test_a_split_of_a_saved_folder(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    parts = {"train": ROWS[:1], "held_out": ROWS[:1] * 3}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    assert [len(list(find_sources(f"{tmp_path}/saved{split}")[0].rows())) for split in ("", ":held_out")] == [1, 3]
    with pytest.raises(DataError, match="no split 'dev'\n  allowed: train, held_out"):
        find_sources(f"{tmp_path}/saved:dev")


def test_conversations_in_cells_of_a_csv_file(small: Any, tmp_path: Path):
    import csv

    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(ROWS[0]["messages"])], ['[{"role": "us']])
    template = ChatTemplate(small, TEMPLATE)
    with pytest.raises(DataError, match=rf"^{path}:3: messages are not JSON"):
        _use(str(path), template)
    (place, row), *_ = find_sources(str(path))[0].rows()
    assert to_conversation(row, "messages", place).messages == ROWS[0]["messages"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, r"turn 0: from \['gpt'\]"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "[" * 5000}, "tools are not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "tool_calls are a list of calls with a function"),
    ],
)
def test_rows_of_an_odd_shape(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=f"^rows:1: .*{message}"):
        to_conversation(row, find_format(set(row), "rows:1"), "rows:1")


def _chat(**last: Any) -> Conversation:
    return Conversation([{"role": "user", "content": "q"}, {"role": "assistant", "content": "", **last}])


def test_half_a_character_in_a_call_of_a_tool(small: Any):
    talk = _chat(tool_calls=[{"name": "f", "arguments": "\ud83d"}])
    raw = TEMPLATE.replace("c | tojson", "c.name + c.arguments")
    with pytest.raises(DataError, match=r"^rows:1: half a character .*d83d"):
        ChatTemplate(small, raw).encode([talk], ["rows:1"])


def test_calls_of_tools_that_the_template_does_not_show_are_refused(small: Any):
    """Or the model would learn to answer with nothing."""
    talk = _chat(tool_calls=[{"type": "function", "function": {"name": "weather", "arguments": {}}}])
    silent = TEMPLATE.replace("m.tool_calls or []", "[]")
    with pytest.raises(DataError, match="does not show assistant turn 1 whole"):
        ChatTemplate(small, silent).encode([talk], ["rows:1"])
    (encoded,) = ChatTemplate(small, TEMPLATE).encode([talk], ["rows:1"])
    assert "weather" in small.decode(encoded.input_ids[encoded.supervised])


HEAD = "{% for m in messages %}[{{ m.role }}]"
TURN = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% macro turn(m) %}[{{ m.role }}]" + TURN + "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
        HEAD.replace("[{{", "{% set x %}[{{") + TURN + "{% endset %}{{ x }}{% endfor %}",
        HEAD + TURN.replace("'assistant'", "'user'") + "{% endfor %}",
        HEAD + TURN.replace("{{ m.content }}", "{{ m.content | upper }}") + "{% endfor %}",
        HEAD + "{{ m.content }}" + TURN.replace("{{ m.content }}</s>", "") + "{% endfor %}",
    ],
    ids=["macro", "set block", "user", "changed", "empty"],
)
def test_marks_around_something_else_are_refused(small: Any, template: str):
    talk = Conversation([{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}])
    with pytest.raises(DataError, match=r"^rows:1: the chat template's \{% generation %\} marks do not hold"):
        ChatTemplate(small, template).encode([talk], ["rows:1"])


def test_a_header_that_depends_on_what_follows_is_refused(small: Any):
    template = "{% for m in messages %}[{{ m.content | length }}]{{ m.content }}</s>{% endfor %}"
    talk = Conversation([{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}])
    with pytest.raises(DataError, match="does not show assistant turn 1 whole"):
        ChatTemplate(small, template).encode([talk], ["rows:1"])


@pytest.mark.parametrize("write", [lambda p: p.write_text(" \n"), lambda p: p.write_bytes(b"\xff")])
def test_a_chat_template_file_that_is_none(small: Any, tmp_path: Path, write: Callable[[Path], Any]):
    """An empty one must not leave the tokenizer's own in its place."""
    from lit_fsdp.datamodule import CausalLMDataModule

    path = tmp_path / "template.jinja"
    write(path)
    data = CausalLMDataModule(train="generated:2", chat_template=str(path))
    data.attach(small, seed=0)
    with pytest.raises(ConfigError, match=rf"^data\.chat_template: got {path}"):
        data.prepare(("train",))
