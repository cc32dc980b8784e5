"""What is learnt of a conversation, for templates of every temper; the supervised text stands in ⟦brackets⟧."""

from __future__ import annotations

import logging
from itertools import groupby
from typing import Any

import pytest

from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Encoded
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.errors import ConfigError, DataError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# no generation prompt; the system text goes into the last user turn; a blank before what the assistant says
INSTRUCT = (
    "<s>{% set system = messages[0].content if messages[0].role == 'system' %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{% if system and loop.revindex0 <= (messages[-1].role == 'assistant') | int %}"
    "{{ system }}-{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
# thoughts are shown in the last turn only, where they are put in if there are none
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set said = m.content.split('</think>')[-1] %}"
    "{% if loop.last %}<think>{{ m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content }}"
    "</think>{% endif %}{{ said }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _say(*turns: str) -> list[dict[str, Any]]:
    """``u:Hi`` → a user's message."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def _encode(tokenizer: Any, template: str, *turns: str, **options: Any) -> Encoded:
    return ChatTemplate(tokenizer, template, **options).encode([Conversation(_say(*turns))], ["rows.jsonl:7"])[0]


def _shown(tokenizer: Any, encoded: Encoded) -> str:
    pairs = zip(encoded.supervised.tolist(), encoded.input_ids.tolist(), strict=True)
    parts = [
        (learnt, tokenizer.decode([token for _, token in part])) for learnt, part in groupby(pairs, lambda p: p[0])
    ]
    return "".join(f"⟦{text}⟧" if learnt else text for learnt, text in parts)


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        (["u:Hi", "a:Yo"], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n"),
        (
            ["s:S", "u:1", "a:2", "u:3", "a:4"],
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧\n"
            "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n",
        ),
        (["u:Hi", "a:"], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n"),
        (["a:Yo", "u:Hi"], "<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n<|im_start|>user\nHi<|im_end|>\n"),
        (
            ["u:x", "a:x", "a:x"],
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦x<|im_end|>⟧\n<|im_start|>assistant\n"
            "⟦x<|im_end|>⟧\n",
        ),
        (["u:Hi"], "<|im_start|>user\nHi<|im_end|>\n"),
        (["u:é", "a:né 日本"], "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n⟦né 日本<|im_end|>⟧\n"),
        (
            ["u:qzx0xzq", "a:qzx0xzq"],
            "<|im_start|>user\nqzx0xzq<|im_end|>\n<|im_start|>assistant\n⟦qzx0xzq<|im_end|>⟧\n",
        ),
    ],
)
def test_chatml(small: Any, turns: list[str], wanted: str):
    assert _shown(small, _encode(small, CHATML, *turns)) == wanted


def test_last_turn_alone(small: Any):
    turns = ["u:1", "a:2", "u:3", "a:4"]
    last = _shown(small, _encode(small, CHATML, *turns, supervise="last"))
    assert last.count("⟦") == 1
    assert "⟦4<|im_end|>⟧" in last
    assert (
        _shown(small, _encode(small, MARKED, *turns, supervise="last"))
        == "[user]1[assistant]2</s>[user]3[assistant]⟦4</s>⟧"
    )


def test_a_token_across_the_border_is_split(small: Any):
    """The merge of two line breaks would join the header's with the answer's; at inference they come apart."""
    encoded = _encode(small, CHATML, "u:Hi", "a:\nYo")
    assert _shown(small, encoded).endswith("<|im_start|>assistant\n⟦\nYo<|im_end|>⟧\n")
    assert small.convert_tokens_to_ids("ĊĊ") not in encoded.input_ids
    inner = _encode(small, CHATML, "u:Hi", "a:Yo\n\nHi")
    assert small.convert_tokens_to_ids("ĊĊ") in inner.input_ids[inner.supervised]


def test_marks_of_the_template(small: Any):
    assert (
        _shown(small, _encode(small, MARKED, "u:1", "a:", "u:3", "a:4"))
        == "[user]1[assistant]⟦</s>⟧[user]3[assistant]⟦4</s>⟧"
    )
    fewer = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(DataError, match=r"rows\.jsonl:7: the chat template marks 1 of 2 assistant turns"):
        _encode(small, fewer, "u:1", "a:2", "u:3", "a:4")


def test_marks_of_the_turns_that_are_learnt_suffice(small: Any):
    """Those of turns that are not learnt may be missing, wherever the marked turns stand."""
    turns, condition = ["u:1", "a:2", "u:3", "a:4"], "m.role == 'assistant'"
    first, last = (MARKED.replace(condition, f"{condition} and {which}") for which in ("not loop.last", "loop.last"))
    shown = "[user]1[assistant]2[user]3[assistant]⟦4</s>⟧"
    plain = shown.replace("⟦", "").replace("⟧", "")
    assert _shown(small, _encode(small, last, *turns, supervise="last")) == shown
    assert _shown(small, _encode(small, last, *turns, supervise="flagged")) == plain
    assert _shown(small, _encode(small, last, *turns, train_on_prompt=True)) == f"{plain[0]}⟦{plain[1:]}⟧"
    with pytest.raises(DataError, match=r"rows\.jsonl:7: the chat template marks 1 of 2 assistant turns"):
        _encode(small, first, *turns, supervise="last")
    for learnt, template, wanted in ((1, first, "[user]1[assistant]⟦2</s>⟧[user]3[assistant]4"), (3, last, shown)):
        talk = _say(*turns)
        talk[learnt]["train"], talk[4 - learnt]["train"] = True, False
        for supervise in ("all", "flagged"):
            (row,) = ChatTemplate(small, template, supervise).encode([Conversation(talk)], ["x"])
            assert _shown(small, row) == wanted


def test_marks_that_hold_no_turn_or_several_are_refused(small: Any):
    thought = MARKED.replace("{{ m.content }}</s>", "<think>{% endgeneration %}{% generation %}{{ m.content }}</s>", 1)
    both = "{% generation %}{% for m in messages %}{{ m.content }}</s>{% endfor %}{% endgeneration %}"
    for template in (thought, both):
        with pytest.raises(DataError, match=r"^rows\.jsonl:7: the chat template"):
            _encode(small, template, "u:1", "a:2", "u:3", "a:4", supervise="last")


def test_without_a_generation_prompt(small: Any):
    """The model takes over after the user's end mark, or after a header that it is not asked to write."""
    assert _shown(small, _encode(small, INSTRUCT, "u:1", "a:2")) == "<s>[INST]1[/INST]⟦ 2</s>⟧"
    bare = CHATML.split("{% if add_generation_prompt")[0]
    assert _shown(small, _encode(small, bare, "u:1", "a:2")).endswith("<|im_start|>assistant\n⟦2<|im_end|>⟧\n")


def test_system_text_in_the_last_user_turn(small: Any, sentencepiece: Any):
    assert _shown(small, _encode(small, INSTRUCT, "s:S", "u:1", "a:2", "u:3", "a:4")) == (
        "<s>[INST]1[/INST]⟦ 2</s>⟧[INST]S-3[/INST]⟦ 4</s>⟧"
    )
    encoded = _encode(sentencepiece, INSTRUCT, "s:b", "u:a", "a:b", "u:a", "a:b")
    learnt = sentencepiece.convert_ids_to_tokens(encoded.input_ids[encoded.supervised].tolist())
    assert learnt == ["▁b", "</s>", "▁b", "</s>"]


def test_thoughts_of_earlier_turns_are_dropped(small: Any):
    first, last = "a:<think>why</think>one", "a:<think>how</think>two"
    assert _shown(small, _encode(small, THINKING, "u:1", first, "u:2", last)) == (
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n"
        "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n⟦<think>how</think>two<|im_end|>⟧\n"
    )
    assert _shown(small, _encode(small, THINKING, "u:2", "a:two")).endswith("⟦<think></think>two<|im_end|>⟧\n")


def test_tool_calls_are_learnt_and_results_are_not(small: Any):
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42!"},
    ]
    encoded = ChatTemplate(small, CHATML).encode([Conversation(messages)], ["x"])[0]
    assert _shown(small, encoded) == (
        "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n⟦<tool_call>look<|im_end|>⟧\n"
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n⟦42!<|im_end|>⟧\n"
    )


def test_tools_reach_the_template(small: Any):
    talk = Conversation(_say("u:1", "a:2"), [{"type": "function", "function": {"name": "look"}}])
    template = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + CHATML
    assert _shown(small, ChatTemplate(small, template).encode([talk], ["x"])[0]).startswith("look;<|im_start|>user\n1")


def test_end_of_turn_is_not_the_next_header(small: Any):
    """Turns end with nothing but the header of the next; only the conversation has an end."""
    template = "{% for m in messages %}{{ '<s>' if m.role == 'user' }}{{ m.content }};{% endfor %}</s>"
    assert _shown(small, _encode(small, template, "u:1", "a:2", "u:3", "a:4")) == "<s>1;⟦2⟧;<s>3;⟦4⟧;</s>"
    template = "{% for m in messages %}{{ '<s>' if m.role == 'user' }}{{ m.content }}{% endfor %}</s>"
    assert _shown(small, _encode(small, template, "u:1", "a:2", "u:3", "a:4")) == "<s>1⟦2⟧<s>3⟦4</s>⟧"


def test_a_template_that_never_stops_is_told(small: Any, caplog: pytest.LogCaptureFixture):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with caplog.at_level(logging.WARNING, "lit_fsdp"):
        made = ChatTemplate(small, template)
        rows = made.encode([Conversation(_say("u:1", "a:2"))] * 3, ["a", "b", "c"])
    assert _shown(small, rows[0]) == "user: 1\nassistant: ⟦2⟧\n"
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == ["a"]
    assert "does not learn to stop" in caplog.text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "does not show assistant turn 1"),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), "does not show assistant turn 1"),
        (CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"), "does not show assistant turn 1"),
        (CHATML.replace("{{ m.content }}", "{{ m.content[:1] }}"), "does not show assistant turn 1"),
        ("{{ raise_exception('roles must alternate') }}", "refuses it .roles must alternate"),
        ("{{ missing.attribute }}", "refuses it"),
    ],
)
def test_refused_with_the_place_of_the_row(small: Any, template: str, message: str):
    with pytest.raises(DataError, match=rf"(?s)^rows\.jsonl:7: .*{message}"):
        _encode(small, template, "u:one", "a:two")


def test_a_border_that_cannot_be_exact_is_refused(sentencepiece: Any):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}</s>"
    backend = sentencepiece.backend_tokenizer
    assert len(backend.encode(" a", add_special_tokens=False).ids) > 0
    with pytest.raises(DataError, match=r"rows\.jsonl:7: token .* lies across the border"):
        _encode(sentencepiece, template, "u:a", "a:x\u2581", "u:b", "a:b")


def test_no_bos_or_eos_beyond_the_templates(small: Any):
    from tokenizers import processors

    wrapped = small.__class__(tokenizer_object=small.backend_tokenizer.from_str(small.backend_tokenizer.to_str()))
    wrapped.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(mark, small.convert_tokens_to_ids(mark)) for mark in ("<s>", "</s>")]
    )
    assert _shown(wrapped, _encode(wrapped, INSTRUCT, "u:1", "a:2")) == "<s>[INST]1[/INST]⟦ 2</s>⟧"


def test_blanks_are_learnt_though_offsets_are_trimmed(small: Any):
    """Many tokenizers cut blanks off the offsets, which leaves nothing of a lone one."""
    from tokenizers import processors

    trimmed = small.__class__(tokenizer_object=small.backend_tokenizer.from_str(small.backend_tokenizer.to_str()))
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    offsets = trimmed("a ", return_offsets_mapping=True)["offset_mapping"]
    assert offsets == [(0, 1), (2, 2)]
    for template in (CHATML, MARKED):
        assert "⟦ \na\n\nb \n <" in _shown(trimmed, _encode(trimmed, template, "u:1", "a: \na\n\nb \n "))


def test_first_token_is_never_learnt(small: Any):
    assert _encode(small, "{{ messages[0].content }}</s>", "a:abc").supervised.tolist() == [False, True, True, True]


def test_no_template_or_no_offsets(small: Any):
    with pytest.raises(ConfigError, match="no chat template of its own") as caught:
        ChatTemplate(small, None)
    assert caught.value.field == "data.chat_template"

    class Slow:
        chat_template, is_fast = CHATML, False

    with pytest.raises(ConfigError, match="Slow, which does not tell where its tokens lie"):
        ChatTemplate(Slow(), None)
