"""Marks around the content alone: the end of turn behind them is learnt too, and nothing that may begin a next turn."""

from __future__ import annotations

import logging
from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken

from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Encoded
from lit_fsdp.data.templates import ChatTemplate
from tests.unit.data.conftest import byte_level_tokenizer
from tests.unit.data.families import unmarked

HEADER, ASKED = "<|im_start|>{{ m.role }}\n", "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ALWAYS = "<|im_start|>assistant{{ '\n' }}"
CALL = [{"type": "function", "function": {"name": "look"}}]
SAID = "4 <tool_call>look</think><|im_end|>"
TALK = [("system", "S"), ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4 "), ("user", "5")]


def _template(header: str, end: str, last: str = "", inside: str = "") -> str:
    """What stands before, what behind each turn's mark and behind the conversation, and what in the mark at its end."""
    return (
        f"{{% for m in messages %}}{header}{{% if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content }}}}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</think>{% endfor %}"
        f"{inside}{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{inside}{{% endif %}}{end}{{% endfor %}}{last}"
    )


def _say(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


def _row(tokenizer: Any, template: str, messages: list[dict[str, Any]], **options: Any) -> Encoded:
    return ChatTemplate(tokenizer, template, **options).encode([Conversation(messages)], ["rows:1"])[0]


def _learnt(tokenizer: Any, row: Encoded) -> list[str]:
    pairs = zip(row.supervised.tolist(), row.input_ids.tolist(), strict=True)
    return [tokenizer.decode([t for _, t in part]) for learnt, part in groupby(pairs, lambda p: p[0]) if learnt]


@pytest.mark.parametrize(
    ("header", "end", "last", "wanted"),
    [
        (HEADER, "<|im_end|>\n", ASKED, "<|im_end|>"),
        (HEADER, "<|im_end|>\n", "", "<|im_end|>"),
        (HEADER, "{{ '\n' }}<|im_end|>\n", ASKED, "\n<|im_end|>"),
        (HEADER, "<|im_end|>\n", ASKED.replace("{% endif %}", "{% else %}</s>{% endif %}"), "<|im_end|>"),
        (HEADER, "<|im_end|></s>\n", "", "<|im_end|>"),
        ("", "</s>", "", "</s>"),
        (HEADER, "</s>\n", ALWAYS, "</s>"),
        (
            "{{ '[INST]' if m.role != 'assistant' }}",
            "{{ '<|im_end|>' if m.role == 'assistant' else '[/INST]' }}",
            ASKED,
            "<|im_end|>",
        ),
    ],
)
def test_the_end_of_turn_behind_the_marks_is_learnt(small: Any, header: str, end: str, last: str, wanted: str):
    """In every turn alike, the last one or not, and as it is derived without marks."""
    template = _template(header, end, last)
    for length, said in ((3, ["2"]), (4, ["2"]), (5, ["2", "4 "]), (6, ["2", "4 "])):
        for options in ({}, {"supervise": "last"}):
            rows = [_row(small, text, _say(*TALK[:length]), **options) for text in (template, unmarked(template))]
            assert [_learnt(small, row) for row in rows] == [
                [text + wanted for text in (said[-1:] if options else said)]
            ] * 2


def test_it_is_said_once(small: Any, caplog: pytest.LogCaptureFixture):
    talks = [Conversation(_say(*TALK[:length])) for length in (3, 5, 3)]
    with caplog.at_level(logging.WARNING, "lit_fsdp"):
        ChatTemplate(small, _template(HEADER, "<|im_end|>\n", ASKED)).encode(talks, ["a", "b", "c"])
    assert [record.getMessage() for record in caplog.records] == [
        "a: the chat template's {% generation %} marks end before <|im_end|>, which ends the turn, so it is learnt "
        "too: the model has to emit it to stop"
    ]


@pytest.mark.parametrize("end", ["\n", "</s>\n", "<s>"])
def test_marks_that_hold_the_end_of_turn_stay_as_they_are(small: Any, end: str, caplog: pytest.LogCaptureFixture):
    """Also of calls of tools, which end with a special token of their own."""
    messages = _say(*TALK)
    messages[4] |= {"tool_calls": CALL}
    with caplog.at_level(logging.WARNING, "lit_fsdp"):
        for talk, wanted in ((messages, ["2<|im_end|>", SAID]), (messages[3:5], [SAID])):
            row = _row(small, _template(HEADER, end, "</s>", inside="<|im_end|>"), talk)
            assert _learnt(small, row) == wanted
    assert not caplog.records


def test_the_end_of_a_call_behind_the_marks_is_learnt(small: Any):
    messages = _say(*TALK)
    messages[4] |= {"tool_calls": CALL}
    for talk, wanted in ((messages, ["2<|im_end|>", SAID]), (messages[3:5], [SAID])):
        assert _learnt(small, _row(small, _template(HEADER, "<|im_end|>\n", ASKED), talk)) == wanted


@pytest.mark.parametrize(
    ("header", "end", "last", "follows"),
    [
        (HEADER, "\n", ASKED, None),
        (HEADER, "\n", ALWAYS, "<|im_start|>"),
        ("<s>{{ m.role }}\n", "", "<s>assistant{{ '\n' }}", "<s>"),
        ("<s>{{ m.role }}\n", "", "<s>", "<s>"),
        ("{{ '<s>' if m.role == 'user' }}", "", "", None),
        ("", "<|im_end|>", "", "<|im_end|>"),
    ],
)
def test_what_may_begin_the_next_turn_is_not_learnt(
    small: Any, caplog: pytest.LogCaptureFixture, header: str, end: str, last: str, follows: str | None
):
    """And the text of the warning says which token that is."""
    with caplog.at_level(logging.WARNING, "lit_fsdp"):
        row = _row(small, _template(header, end, last), _say(*TALK[1:5]))
    assert _learnt(small, row) == ["2", "4 "]
    (said,) = (record.getMessage() for record in caplog.records)
    if follows:
        assert f"the model does not learn to stop; {follows}, which follows, may begin the next turn; if it" in said
    else:
        assert said.endswith("has no special token that is learnt, so the model does not learn to stop")


def test_an_end_of_turn_that_takes_in_blanks():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)], special_tokens=True)
    row = _row(tokenizer, _template(HEADER, "<|end|>\n", ASKED), _say(*TALK))
    assert _learnt(tokenizer, row) == ["2<|end|>", "4 <|end|>"]


def test_the_end_of_a_turn_that_is_left_out_is_left_out_too(small: Any):
    messages = _say(*TALK)
    messages[2]["train"] = False
    template = _template(HEADER, "<|im_end|>\n", ASKED)
    row = _row(small, template, messages, train_on_prompt=True)
    left_out = [t for t, learnt in zip(row.input_ids[1:], row.supervised[1:], strict=True) if not learnt]
    assert small.decode(left_out) == "2<|im_end|>"
    assert _learnt(small, _row(small, template, messages)) == ["4 <|im_end|>"]


def test_what_is_learnt_of_a_row_does_not_depend_on_rows_before_it(small: Any):
    """Of a template whose marks hold the end of turn only where there are tools."""
    inside = "{% if tools %}<|im_end|>{% endif %}"
    outside = "{% if not tools or m.role != 'assistant' %}<|im_end|>{% endif %}\n"
    template = _template(HEADER, outside, ASKED).replace("{% endgeneration %}", inside + "{% endgeneration %}")
    talks = [Conversation(_say(*TALK[1:3])), Conversation(_say(*TALK[1:3]), [{"name": "look"}])]
    found = []
    for order in ((0, 1), (1, 0)):
        one = ChatTemplate(small, template)
        rows = dict(zip(order, one.encode([talks[i] for i in order], ["rows:1", "rows:2"]), strict=True))
        found.append([_learnt(small, rows[i]) for i in (0, 1)])
    assert found[0] == found[1] == [["2<|im_end|>"], ["2<|im_end|>"]]
