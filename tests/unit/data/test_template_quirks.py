"""What the templates of known families do beyond writing turns: derived masks are those of generation marks."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from tokenizers import AddedToken

from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Encoded
from lit_fsdp.data.render import Renderer
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.errors import DataError
from tests.unit.data.conftest import byte_level_tokenizer, metaspace_tokenizer
from tests.unit.data.families import unmarked

# thoughts stand in the turns after the last question, also empty ones; a system message only at the beginning, and no
# conversation without a question
THINKING = """
{%- set state = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set state.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if state.last < 0 %}{{ raise_exception('no question') }}{% endif %}
{%- for m in messages %}
    {%- set thought = m.reasoning_content or '' %}
    {%- set said = m.content %}
    {%- if '</think>' in said %}
        {%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set said = said.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ m.role ~ '\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' if loop.index0 > state.last }}
            {{- said }}
            {%- for c in m.tool_calls or [] %}{{ '<tool_call>' ~ (c.function or c) | tojson }}{% endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- said ~ '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# the generation prompt opens a thought that no earlier turn shows
OPENING = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>' }}{% generation %}{{ m.content.split('</think>')[-1] ~ '</s>' }}{% endgeneration %}
    {%- else %}
        {{- '[INST]' ~ m.content ~ '[/INST]' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|><think>\n' }}{% endif %}
"""
# no generation prompt, a header in words, calls of tools, texts trimmed
HEADERS = """
{%- for m in messages %}
    {{- '<s>' ~ m.role ~ ':\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {{- m.content | trim }}
            {%- for c in m.tool_calls or [] %}{{ '<tool_call>' ~ (c.function or c) | tojson }}{% endfor %}
            {{- '</s>' }}
        {%- endgeneration %}
    {%- else %}
        {{- m.content | trim ~ '</s>' }}
    {%- endif %}
{%- endfor %}
"""
# headers and ends of turn that take in the line breaks beside them
TAKING = """
{%- for m in messages %}
    {{- '<|' ~ m.role ~ '|>\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ m.content ~ '<|end|>' }}{% endgeneration %}
    {%- else %}
        {{- m.content ~ '<|end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
"""
CALL = {"type": "function", "function": {"name": "look", "arguments": {"city": "Oslo"}}}


def _taking_blanks(tokenizer: Any, **sides: bool) -> Any:
    """The tokenizer with special tokens that take in the blanks on these sides."""
    marks = [AddedToken(f"<|{w}|>", special=True, normalized=False, **sides) for w in ("user", "assistant", "end")]
    tokenizer.add_tokens(marks, special_tokens=True)
    return tokenizer


def _learnt(tokenizer: Any, row: Encoded) -> list[str]:
    pairs = zip(row.supervised.tolist(), row.input_ids.tolist(), strict=True)
    return [tokenizer.decode([t for _, t in part]) for learnt, part in groupby(pairs, lambda p: p[0]) if learnt]


def _both(tokenizer: Any, template: str, messages: list[dict[str, Any]]) -> list[str]:
    marked, derived = (
        ChatTemplate(tokenizer, text).encode([Conversation(messages)], ["rows:1"])[0]
        for text in (template, unmarked(template))
    )
    assert derived.input_ids.tolist() == marked.input_ids.tolist()
    assert derived.supervised.tolist() == marked.supervised.tolist()
    return _learnt(tokenizer, derived)


def _say(*turns: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        (["u:1", "a:2"], ["<think>\n\n</think>\n\n2<|im_end|>"]),
        (["u:1", "a:<think>\nwhy\n</think>\n\n2"], ["<think>\nwhy\n</think>\n\n2<|im_end|>"]),
        (
            ["s:S", "u:1", "a:<think>\nwhy\n</think>\n\n2", "u:3", "a:<think>\nhow\n</think>\n\n4"],
            ["2<|im_end|>", "<think>\nhow\n</think>\n\n4<|im_end|>"],
        ),
        (["u:1", "a:2", "u:3"], ["2<|im_end|>"]),
        (["u:1", "a: 2 \n"], ["<think>\n\n</think>\n\n 2 \n<|im_end|>"]),
        (["u:1", "a:2", "t:r", "a:3"], ["<think>\n\n</think>\n\n2<|im_end|>", "<think>\n\n</think>\n\n3<|im_end|>"]),
    ],
)
def test_thoughts_after_the_last_question(small: Any, turns: list[str], wanted: list[str]):
    assert _both(small, THINKING, _say(*turns)) == wanted


def test_a_turn_that_the_template_cannot_end_with_is_refused(small: Any):
    """The conversation up to the first turn has no question, so where that turn ends cannot be told without marks."""
    messages = _say("s:S", "a:0", "u:1", "a:2")
    (row,) = ChatTemplate(small, THINKING).encode([Conversation(messages)], ["rows:1"])
    assert _learnt(small, row) == ["0<|im_end|>", "<think>\n\n</think>\n\n2<|im_end|>"]
    derived = ChatTemplate(small, unmarked(THINKING))
    with pytest.raises(DataError, match=r"^rows:1: the chat template does not show assistant turn 1 whole"):
        derived.encode([Conversation(messages)], ["rows:1"])
    last = ChatTemplate(small, unmarked(THINKING), "last")
    assert _learnt(small, last.encode([Conversation(messages)], ["rows:1"])[0]) == [
        "<think>\n\n</think>\n\n2<|im_end|>"
    ]


def test_thoughts_and_calls_beside_the_text(small: Any):
    messages = _say("u:1", "a:", "t:r", "a:2")
    messages[1] |= {"tool_calls": [CALL], "reasoning_content": "why"}
    messages[3] |= {"reasoning": "how"}
    call, answer = _both(small, THINKING, messages)
    assert call == '<think>\nwhy\n</think>\n\n<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}<|im_end|>'
    assert answer == "<think>\nhow\n</think>\n\n2<|im_end|>"


def test_a_generation_prompt_that_no_turn_shows(small: Any):
    assert _both(small, OPENING, _say("u:1", "a:2", "u:3", "a:<think>x</think>4")) == ["2</s>", "4</s>"]


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        (["u:1", "a:2", "u:3", "a:4"], ["2</s>", "4</s>"]),
        (["u: 1\n", "a: 2\n\n", "u:3", "a:\n4 5 "], ["2</s>", "4 5</s>"]),
        (["s: ", "u:1", "a: "], ["</s>"]),
        (["a:1"], ["1</s>"]),
    ],
)
def test_headers_and_trimmed_texts(small: Any, turns: list[str], wanted: list[str]):
    assert _both(small, HEADERS, _say(*turns)) == wanted


def test_several_calls_after_a_text(small: Any):
    messages = [*_say("u:1"), {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, CALL["function"]]}]
    call = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}'
    assert _both(small, HEADERS, messages) == [f"Let me look.{call}{call}</s>"]


@pytest.mark.parametrize(
    "arguments",
    ["''", "(c.function or c).name | tojson", "(c.function or c).name ~ ((c.function or c).arguments | length)"],
)
def test_calls_without_their_arguments_are_refused(small: Any, arguments: str):
    """Or the model would learn to call without them."""
    template = HEADERS.replace("(c.function or c) | tojson", arguments)
    messages = [*_say("u:1"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for text in (template, unmarked(template)):
        with pytest.raises(DataError, match=r"^rows:1: the chat template"):
            ChatTemplate(small, text).encode([Conversation(messages)], ["rows:1"])


def test_a_flag_of_a_message_does_not_reach_the_template(small: Any):
    template = unmarked(HEADERS).replace("m.role ~", "(m.keys() | join('+')) ~ m.role ~")
    messages = _say("u:1", "a:2")
    messages[1]["train"] = True
    (row,) = ChatTemplate(small, template, "flagged").encode([Conversation(messages)], ["rows:1"])
    assert small.decode(row.input_ids) == "<s>role+contentuser:\n1</s><s>role+contentassistant:\n2</s>"


def test_another_role_than_the_assistant_is_not_learnt(small: Any, caplog: pytest.LogCaptureFixture):
    messages = _say("u:1", "a:2")
    messages[0]["train"] = True
    for supervise in ("all", "last", "flagged"):
        with pytest.raises(DataError, match=r"^rows:1: message 0: train: true on a message of the role user"):
            ChatTemplate(small, HEADERS, supervise).encode([Conversation(messages)], ["rows:1"])
    (flagged,) = ChatTemplate(small, HEADERS, train_on_prompt=True).encode([Conversation(messages)], ["rows:1"])
    messages[0]["train"] = False
    (row,) = ChatTemplate(small, HEADERS).encode([Conversation(messages)], ["rows:1"])
    assert _learnt(small, row) == ["2</s>"]
    assert flagged.supervised.tolist() == [False, *[True] * (len(row.input_ids) - 1)]
    ChatTemplate(small, HEADERS, train_on_prompt=True).encode([Conversation(messages)], ["rows:1"])
    assert "rows:1: a message of another role than the assistant's says train: false, and is learnt" in caplog.text


@pytest.mark.parametrize("make", [byte_level_tokenizer, metaspace_tokenizer])
@pytest.mark.parametrize("sides", [("rstrip",), ("lstrip",), ("lstrip", "rstrip"), ()])
def test_special_tokens_that_take_in_blanks(make: Any, sides: tuple[str, ...]):
    """The blanks go with their token: those after a header are not learnt, those after an end of turn are no border."""
    tokenizer = _taking_blanks(make(), **dict.fromkeys(sides, True))
    messages = _say("u:a", "a:b", "u:b", "a:", "u:a", "a:a b", "u:b")
    messages[5]["train"] = True
    for options, wanted in (
        ({}, ["b<|end|>", "<|end|>", "a b<|end|>"]),
        ({"supervise": "last"}, ["a b<|end|>"]),
        ({"supervise": "flagged"}, ["a b<|end|>"]),
    ):
        for template in (TAKING, unmarked(TAKING)):
            (row,) = ChatTemplate(tokenizer, template, **options).encode([Conversation(messages)], ["rows:1"])
            text = Renderer(template, {}).render(messages, None, "")[0]
            assert row.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
            assert [said.strip() for said in _learnt(tokenizer, row)] == wanted


@pytest.mark.parametrize("template", [TAKING, unmarked(TAKING)], ids=["marks", "none"])
def test_blanks_that_a_header_takes_in_are_not_learnt(template: str):
    for sides, wanted in (({"rstrip": True}, "b\n<|end|>"), ({"rstrip": True, "lstrip": True}, "b<|end|>")):
        tokenizer = _taking_blanks(byte_level_tokenizer(), **sides)
        (row,) = ChatTemplate(tokenizer, template).encode([Conversation(_say("u:a", "a:\n b\n", "u:c"))], ["rows:1"])
        assert _learnt(tokenizer, row) == [wanted]


def test_another_token_across_a_border_is_split_all_the_same():
    """Where the header leaves its line break, which merges with the answer's, and the end of turn takes its own in."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)], special_tokens=True)
    for template in (TAKING, unmarked(TAKING)):
        messages = _say("u:a", "a:\nb", "u:c", "a:\nd")
        (row,) = ChatTemplate(tokenizer, template).encode([Conversation(messages)], ["rows:1"])
        assert _learnt(tokenizer, row) == ["\nb<|end|>", "\nd<|end|>"]
        assert tokenizer.decode(row.input_ids).count("\n") == 2 * 2 + 2
