"""Whatever stands in a file is read, or refused with a DataError that names the file; nothing else ever comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.data.formats import Conversation, find_format, to_conversation
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.errors import ConfigError, DataError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
