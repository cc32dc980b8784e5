"""What is supervised of a conversation, for templates of every temper, in ⟦brackets⟧: with marks and without alike."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import CUT, NOTHING_LEFT, TOO_LONG
from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import SpanEncoder
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import byte_level_tokenizer, encoder_of, metaspace_tokenizer
from tests.unit.data.conversations import NEMO, encode, say, shown, supervised, unmarked

CALL = {"type": "function", "id": "c1", "function": {"name": "look", "arguments": {"city": "Oslo"}}}
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + ASKED
)
# thoughts stand in the turns after the last question, also empty ones; no conversation without a question
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
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
# as Gemma 4: results of tools stand in the model's turn, which goes on behind them
INSIDE = """
{%- set state = namespace(open=false) %}
{%- for m in messages if m.role != 'tool' %}
    {%- if not (m.role == 'assistant' and state.open) %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% endif %}
    {%- set state.open = false %}
    {%- for c in m.tool_calls or [] %}
        {{- '<tool_call>call:' ~ c.function.name ~ c.function.arguments | tojson ~ '<|result|>' }}
        {%- for r in messages if r.role == 'tool' %}
            {{- 'result:' ~ c.function.name ~ ' ' ~ r.content ~ '<|done|>' }}
            {%- set state.open = true %}
        {%- endfor %}
    {%- endfor %}
    {{- m.content }}
    {%- if not m.tool_calls %}{{ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# as gpt-oss: the conversation ends with another token than its turns, and a thought is a message of its own
CHANNELS = """
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.thinking %}
        {{- '<|im_start|>assistant why:' ~ m.thinking ~ '<|im_end|>' }}
    {%- endif %}
    {{- '<|im_start|>' ~ m.role ~ ' says:' ~ m.content }}
    {{- '</s>' if loop.last and m.role == 'assistant' and not add_generation_prompt else '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}
"""
# as GLM 4: nothing ends a turn but the token of the next role
ROLES = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{ '<|assistant|>\n<think></think>\n' ~ m.content }}
        {%- for c in m.tool_calls or [] %}{{ '\n<tool_call>' ~ c.function | tojson ~ '\n</tool_call>' }}{% endfor %}
    {%- else %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
# as Phi 3: the end of the conversation is a mark of its own; another one holds the thoughts
PIECES = """
{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{ '<think></think>' }}{% endgeneration %}{{ '\n' }}
        {%- generation %}{{ m.content ~ '<|im_end|>\n' }}{% endgeneration %}
    {%- else %}{{ m.content ~ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- elif messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}
"""
HEADER, FOUR = "<|im_start|>{{ m.role }}\n", ("u:1", "a:2", "u:3", "a:4")
THOUGHT = "<think>\nwhy\n</think>\n\n"


def _both(tokenizer: Any, template: str, messages: Any, **options: Any) -> list[str]:
    """What is supervised, which is the same with marks and without them, of the same tokens."""
    marked, derived = (encode(tokenizer, text, messages, **options) for text in (template, unmarked(template)))
    assert derived.input_ids.tolist() == marked.input_ids.tolist()
    assert shown(tokenizer, derived) == shown(tokenizer, marked)
    return [part.partition("⟧")[0] for part in shown(tokenizer, derived).split("⟦")[1:]]


def _calls(text: str = "", **more: Any) -> list[dict[str, Any]]:
    call = {"role": "assistant", "content": text, "tool_calls": [CALL], **more}
    return [*say("u:1"), call, {**say("t:cold")[0], "tool_call_id": "c1"}, *say("a:It is.")]


def test_marks_around_all_messages_supervise_those_of_the_assistant(small: Any):
    inside = "{% generation %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endgeneration %}"
    outside = "<|im_start|>{% generation %}{{ m.role }}\n{{ m.content }}{% endgeneration %}<|im_end|>\n"
    for one in (inside, outside):
        template = f"{{% for m in messages %}}{one}{{% endfor %}}{ASKED}"
        parts = shown(small, encode(small, template, say(*FOUR))).split("⟦")[1:]
        found = "".join(part.partition("⟧")[0] for part in parts)
        assert [number in found for number in "1234"] == [False, True, False, True], (one, found)


def _content_marked(header: str, end: str, last: str = "") -> str:
    """Marks around what turns say alone; what stands before and behind turns, and behind the conversation."""
    return (
        f"{{% for m in messages %}}{header}{{% if m.role == 'assistant' %}}{{% generation %}}{{{{ m.content }}}}"
        f"{{% for c in m.tool_calls or [] %}}<tool_call>{{{{ c.function | tojson }}}}</tool_call>{{% endfor %}}"
        f"{{% endgeneration %}}{{% else %}}{{{{ m.content }}}}{{% endif %}}{end}{{% endfor %}}{last}"
    )


def test_turns_of_templates_of_every_temper(small: Any):
    look = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}'
    empty = "<think>\n\n</think>\n\n"
    table: list[tuple[str, Any, list[str]]] = [
        (CHATML, say("a:Yo", "u:Hi"), ["Yo<|im_end|>"]),
        (CHATML, say("u:x", "a:x", "a:x"), ["x<|im_end|>", "x<|im_end|>"]),
        (CHATML, say("u:\ue000", "a:\ue001 z"), ["\ue001 z<|im_end|>"]),
        (CHATML, _calls(), [look + "<|im_end|>", "It is.<|im_end|>"]),
        (CHATML, say("u:1", f"a:{THOUGHT}2"), [THOUGHT + "2<|im_end|>"]),
        (THINKING, say("u:1", f"a:{THOUGHT}2", "u:3", f"a:{THOUGHT}4"), ["2<|im_end|>", THOUGHT + "4<|im_end|>"]),
        (THINKING, say("u:1", "a:2", "u:3"), ["2<|im_end|>"]),
        (THINKING, [*say("u:1"), {**say("a:2")[0], "reasoning": ""}, *say("u:3")], ["2<|im_end|>"]),
        (THINKING, say("u:1", "a:2", "t:r", "a:"), [empty + "2<|im_end|>", empty + "<|im_end|>"]),
        (THINKING, say("s:S", "a:0", "u:1", "a:2"), ["0<|im_end|>", empty + "2<|im_end|>"]),
        (THINKING, _calls(reasoning="why"), [THOUGHT + look + "<|im_end|>", empty + "It is.<|im_end|>"]),
    ]
    for template, messages, wanted in table:
        assert _both(small, template, messages) == wanted, (template, messages)


def test_what_else_stands_in_a_turn():
    """Results of tools are never supervised, also inside of a turn; ends of earlier turns are, whatever they are."""
    tokens = byte_level_tokenizer()
    tokens.add_tokens(["<|user|>", "<|assistant|>", "<|tool|>", "<|result|>", "<|done|>"], special_tokens=True)
    tokens.add_tokens([AddedToken("</tool_call>", special=False, normalized=False)])  # ends no turn
    call = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call>'
    content = _content_marked(HEADER, "<|im_end|>\n", ASKED)
    inside = '<tool_call>call:look{"city": "Oslo"}<|result|>'
    ended = INSIDE.replace("if not m.tool_calls", "if m.content")
    said = "<|im_start|>assistant says:2<|im_end|>"
    table: list[tuple[str, Any, list[str]]] = [
        (INSIDE, _calls(), [inside, "It is.<|im_end|>"]),
        (INSIDE, _calls("Let me."), [inside, "Let me.It is.<|im_end|>"]),
        (ended, _calls("Let me."), [inside, "Let me.<|im_end|>", "It is.<|im_end|>"]),
        (INSIDE, say(*FOUR), ["2<|im_end|>", "4<|im_end|>"]),
        (CHANNELS, say(*FOUR), [" says:2<|im_end|>", " says:4</s>"]),
        (CHANNELS, [*say("u:1"), {**say("a:2")[0], "thinking": "why"}, *say("u:3")], [f" why:why<|im_end|>{said}"]),
        (ROLES, say(*FOUR), ["\n<think></think>\n2<|user|>", "\n<think></think>\n4"]),
        (ROLES, _calls(), [f"\n<think></think>\n\n{call}<|tool|>", "\n<think></think>\nIt is."]),
        (PIECES, say(*FOUR), ["<think></think>", "2<|im_end|>\n", "<think></think>", "4<|im_end|>\n</s>"]),
        (content, _calls(), [call.replace("\n", "") + "<|im_end|>", "It is.<|im_end|>"]),
    ]
    for template, messages, wanted in table:
        assert supervised(tokens, template, messages) == wanted, (template, messages)
    assert supervised(tokens, PIECES, say(*FOUR), supervise="last") == ["<think></think>", "4<|im_end|>\n</s>"]


def test_kwargs_of_the_template(small: Any):
    """A row's own go before those of the recipe; what a turn shows of thoughts is supervised all the same."""
    encoder = encoder_of(small, DataConfig(chat_template_kwargs={"mood": "a"}), "{{ mood }}:" + unmarked(THINKING))
    own = {"chat_template_kwargs": {"enable_thinking": False, "mood": "b", "other": None}}
    talks = (say("u:1", "a:2"), say("u:1", f"a:{THOUGHT}2"))
    rows = [{"messages": talk, **more} for talk in talks for more in (own, {}, own)]  # alike but for these
    texts = [shown(small, found.samples[0]) for found in encoder.encode(rows, "messages", ["rows.jsonl:7"] * 6)]
    assert [text[0] for text in texts] == list("babbab")
    assert texts[0].endswith("assistant\n<think>\n\n</think>\n\n⟦2<|im_end|>⟧")
    assert texts[1].endswith("assistant\n⟦<think>\n\n</think>\n\n2<|im_end|>⟧")
    assert all(text.endswith(f"assistant\n⟦{THOUGHT}2<|im_end|>⟧") for text in texts[3:])


def test_reasoning_that_the_last_turn_loses_is_an_error(small: Any):
    """Of earlier turns it is omitted on purpose."""
    without = CHATML.replace("{{ m.content }}{% for", "{{ m.content.split('</think>')[-1] }}{% for")
    own = {**say("a:2")[0], "reasoning_content": "why so"}
    for template, last in ((without, say(f"a:{THOUGHT}2")[0]), (CHATML, own)):
        with pytest.raises(
            DataError, match=r"omits the reasoning of message 2 \(assistant\)(?s:.*)that writes the reason"
        ):
            encode(small, template, [*say("u:1"), last])
        for split in (False, True):
            options: dict[str, Any] = {"unwritten_text": "allow", "split_turns": split}
            assert supervised(small, template, [*say("u:1"), last], **options)[0].strip() == "2<|im_end|>"
        assert len(supervised(small, template, [*say("u:1"), last, *say("u:3", "a:4")])) == 2
    for template in (CHATML, THINKING):
        assert supervised(small, template, say("u:1", f"a:{THOUGHT}2")) == [THOUGHT + "2<|im_end|>"]
    assert supervised(small, THINKING, [*say("u:1"), own]) == ["<think>\nwhy so\n</think>\n\n2<|im_end|>"]


def test_a_call_without_text_has_null_content_where_a_template_tests_for_it(small: Any):
    """As DeepSeek R1, which else writes an empty answer after each call."""
    tests = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m['content'] is none %}"
        "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}{% endfor %}<|im_end|>{% else %}{{ m.content }}"
        "<|im_end|>{% endif %}\n{% endfor %}" + ASKED
    )
    call = '<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}<|im_end|>'
    assert supervised(small, tests, _calls()) == [call, "It is.<|im_end|>"]
    for broken in ("{{ m.content.strip() }}", "{{ m.content + '' }}"):  # a template that tests for it, and then fails
        fails = CHATML.replace(
            "{% generation %}", "{% generation %}{% if m.content is none %}" + broken + "{% endif %}"
        )
        assert supervised(small, fails, _calls()) == [call, "It is.<|im_end|>"]


def test_answers_that_are_not_wanted_are_rejected(small: Any):
    """Rows of KTO, with their label."""
    with pytest.raises(DataError, match="label: false marks an undesired answer"):
        encode(small, CHATML, say("u:1", "a:2"), row={"label": False})


def test_a_sample_per_turn_is_what_inference_sees(small: Any):
    """The conversation up to each turn rendered alone: as the model is asked, then what it says."""
    called = [*_calls("Look."), *say("u:3", "a:4")]
    for turn in called[1::2]:
        turn["reasoning_content"] = f"why {turn['content']}"
    plain = [*say("u:1", "a:Look.", "u:2"), *called[3:]]
    for template in (CHATML, THINKING, unmarked(THINKING), INSIDE, CHANNELS, PIECES):
        both = plain if template in (CHANNELS, PIECES) else called
        kept = [*both[:-1], {**both[-1], "train": False}]
        for messages, which, supervise in [
            (both, (1, 3, 5), "all"),
            (kept, (1, 3), "all"),
            (both, (5,), "last"),
            ([*both[:3], {**both[3], "train": True}, *both[4:]], (3,), "flagged"),
            ([*both, *say("u:5")], (1, 3, 5), "all"),
        ]:
            clean = [{key: value for key, value in turn.items() if key != "train"} for turn in messages]
            alone = [encode(small, template, clean[: turn + 1], supervise="last") for turn in which]
            encoder = encoder_of(small, DataConfig(split_turns=True, supervise=supervise), template)
            found, none = encoder.encode([{"messages": messages}, {"messages": say("u:1")}], "messages", ["a", "b"])
            assert [shown(small, one) for one in found.samples] == [shown(small, one) for one in alone]
            assert (found.truncated, found.dropped, none.dropped) == (0, (), (NOTHING_LEFT,))
    texts = [shown(small, encode(small, THINKING, called[: turn + 1], supervise="last")) for turn in (1, 3, 5)]
    assert [[f"why {said}" in text for said in ("Look.", "It is.", "4")] for text in texts] == [
        [True, False, False], [True, True, False], [False, False, True]]  # fmt: skip
    asked = small.apply_chat_template(called[:5], chat_template=THINKING, tokenize=False, add_generation_prompt=True)
    assert texts[2].startswith(asked + "⟦<think>\nwhy 4\n</think>\n\n4<|im_end|>⟧")


def test_a_turn_stands_behind_the_prompt_of_inference(small: Any):
    """Also where a template writes it otherwise later: the system's words as Mistral, thoughts of calls as GPT-OSS."""
    late = (
        "{% for m in messages[1:] %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}[INST] {{ "
        "messages[0].content if loop.last }}{{ m.content }}[/INST]{% endif %}{% endfor %}"
    )
    ended = "{% set ended = messages[-1].role == 'assistant' and not messages[-1].tool_calls %}" + unmarked(CHATML)
    ended = ended.replace("{{ m.content }}{% for c", "{{ '' if ended else m.thinking }}{{ m.content }}{% for c")
    plain = late.replace("[INST]", "Q:").replace("[/INST]", " A:")  # which are no tokens of their own
    called = [*say("u:1"), {**_calls()[1], "thinking": "why"}, *_calls()[2:]]
    user = "<|im_start|>user\n1<|im_end|><|im_start|>assistant\n"
    look = 'why<tool_call>{"name": "look", "arguments": {"city": "Oslo"}}<|im_end|>'
    for template, messages, wanted in [
        (late, say("s:S", *FOUR), ["[INST] S1[/INST]⟦ 2</s>⟧", "[INST] 1[/INST] 2</s>[INST] S3[/INST]⟦ 4</s>⟧"]),
        (plain, say("s:S", *FOUR), ["Q: S1 A:⟦ 2</s>⟧", "Q: 1 A: 2</s>Q: S3 A:⟦ 4</s>⟧"]),
        (ended, called, [f"{user}⟦{look}⟧",
         f"{user}{look}<|im_start|>tool\ncold<|im_end|><|im_start|>assistant\n⟦It is.<|im_end|>⟧"]),
    ]:  # fmt: skip
        encoder = encoder_of(small, DataConfig(split_turns=True), template)
        (found,) = encoder.encode([{"messages": messages}], "messages", ["x"])
        assert [shown(small, one) for one in found.samples] == wanted


def test_a_turn_keeps_the_conversation_before_it_also_if_an_answer_begins_with_reasoning(small: Any):
    """Whether or not the template has a generation prompt, and one for reasoning, which the turn writes itself."""
    bare = unmarked(CHATML).removesuffix(ASKED)
    marked = _content_marked(HEADER, "<|im_end|>")
    begun = unmarked(CHATML).replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    first, second = f"{THOUGHT}2", f"{THOUGHT}4"
    user, answer = "<|im_start|>user\n{}<|im_end|>", "<|im_start|>assistant\n{}"
    asked = user.format("<think>?") + answer.format("")
    whole = f"{asked}{first}<|im_end|>{user.format('3')}{answer.format('')}"
    talk = say("u:<think>?", f"a:{first}", "u:3", f"a:{second}")
    for template in (bare, marked, unmarked(CHATML), begun):
        encoder = encoder_of(small, DataConfig(split_turns=True), template)
        (found,) = encoder.encode([{"messages": talk}], "messages", ["x"])
        prompts, answers = zip(*(shown(small, one).split("⟦") for one in found.samples), strict=True)
        assert list(prompts) == [asked, whole]
        assert list(answers) == [f"{first}<|im_end|>⟧", f"{second}<|im_end|>⟧"]


def test_turns_that_cannot_be_split_are_refused(small: Any):
    messages = say("u:1", "a:2", "u:" + "3" * 40, "a:4")
    for truncation, lengths, truncated, lost in [
        ("end", [21], 0, (CUT,)), ("drop", [21], 0, (TOO_LONG,)), ("start", [21, 60], 1, ()),
    ]:  # fmt: skip
        options: dict[str, Any] = {"split_turns": True, "max_seq_length": 60, "truncation": truncation}
        (row,) = encoder_of(small, DataConfig(**options), CHATML).encode([{"messages": messages}], "messages", ["x"])
        assert ([len(one.input_ids) for one in row.samples], row.truncated, row.dropped) == (lengths, truncated, lost)
    encoder = encoder_of(small, DataConfig(split_turns=True), CHATML)
    for form, content in (("text", "a"), ("tokens", [1]), ("preference", "a"), ("prompt_completion", "a")):
        row_of = {"text": content, "input_ids": content, "prompt": "a", "completion": "b", "chosen": "a"}
        with pytest.raises(ConfigError, match=r"^data\.split_turns: got true\n  allowed: false for (rows|prompts)"):
            encoder.encode([row_of], form, ["x"])
    short = unmarked(CHATML).replace("in messages", "in messages if m.role != 'system' or messages | length < 4")
    row_of, options = {"messages": say("s:S", *FOUR)}, {"split_turns": True}  # the second sample lacks the system's
    with pytest.raises(DataError, match=r"^x: the chat template omits message 1 \(system\), in"):
        encoder_of(small, DataConfig(**options), short).encode([row_of], "messages", ["x"])
    (row,) = encoder_of(small, DataConfig(**options, unwritten_text="allow"), short).encode([row_of], "messages", ["x"])
    assert (len(row.samples), row.unwritten) == (2, ("system",))
    with pytest.raises(ConfigError, match=r"^split_turns: got true with train_on_prompt"):
        DataConfig(split_turns=True, train_on_prompt=True)


def test_which_turns(small: Any):
    """By ``supervise`` and by what messages say, which the template does not see; others need no marks."""
    keys = CHATML.replace("{{ m.role }}", "{{ m.role }}{{ m.keys() | join('+') }}")
    flagged = say(*FOUR, a1=False, a3=True)
    assert _both(small, CHATML, flagged, supervise="flagged") == ["4<|im_end|>"]
    assert "train" not in shown(small, encode(small, keys, flagged))
    last = CHATML.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    assert supervised(small, last, say(*FOUR), supervise="last") == ["4<|im_end|>"]
    with pytest.raises(DataError, match="does not write message 2 "):
        encode(small, last, say(*FOUR))
    for whole in (False, True):
        said = f"message 1: train: {str(not whole).lower()} on a message of the role user"
        with pytest.raises(DataError, match=rf"^rows\.jsonl:7: {said}"):
            encode(small, CHATML, say(*FOUR, u0=not whole), train_on_prompt=whole)
        assert encode(small, CHATML, say(*FOUR, u0=whole), train_on_prompt=whole).supervised.any()


def test_the_end_of_turn_behind_the_marks_is_supervised(small: Any):
    """In every turn alike, the last one or not, and as it is derived without marks."""
    asks = "{{ '[INST]' if m.role != 'assistant' }}"
    answers = "{{ '<|im_end|>' if m.role == 'assistant' else '[/INST]' }}"
    talk = say("s:S", "u:1", "a:2", "u:3", "a:4 ", "u:5")
    for header, end, last, wanted in [
        (HEADER, "<|im_end|>\n", ASKED, "<|im_end|>"),
        (HEADER, "<|im_end|>\n", "", "<|im_end|>"),
        (HEADER, "<|im_end|>\n", ASKED.replace("{% endif %}", "{% else %}</s>{% endif %}"), "<|im_end|>"),
        (HEADER, "<|im_end|></s>\n", "", "<|im_end|></s>"),
        ("", "</s>", "", "</s>"),
        (asks, answers, "", "<|im_end|>"),
        (HEADER, "\n", ASKED, ""),  # what begins a turn of the assistant's is not supervised
        (HEADER, "\n", "<|im_start|>assistant{{ '\n' }}", ""),
        ("<s>{{ m.role }}\n", "", "<s>assistant{{ '\n' }}", ""),
    ]:
        template = _content_marked(header, end, last)
        for length, said in ((3, ["2"]), (4, ["2"]), (5, ["2", "4 "]), (6, ["2", "4 "])):
            assert _both(small, template, talk[:length]) == [text + wanted for text in said]
            assert _both(small, template, talk[:length], supervise="last") == [said[-1] + wanted]


def test_special_tokens_that_take_in_blanks():
    """The blanks go with their token: those after a header are not supervised, those after an end are no border."""
    for make, sides in itertools.product((byte_level_tokenizer, metaspace_tokenizer), ((), ("lstrip",), ("rstrip",))):
        tokenizer, given = make(), dict.fromkeys(sides, True)
        marks = [AddedToken(f"<|{w}|>", special=True, normalized=False, **given) for w in ("user", "assistant", "end")]
        tokenizer.add_tokens(marks, special_tokens=True)
        messages = say("u:a", "a:b", "u:b", "a:", "u:a", "a:a b", "u:b")
        asked = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        template = _content_marked("<|{{ m.role }}|>\n", "<|end|>\n", asked)
        assert [text.strip() for text in _both(tokenizer, template, messages)] == ["b<|end|>", "<|end|>", "a b<|end|>"]
        text = tokenizer.apply_chat_template(messages, chat_template=unmarked(template), tokenize=False)
        ids = encode(tokenizer, template, messages).input_ids.tolist()
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"][: len(ids)]


def test_a_token_across_the_border_is_split(small: Any):
    """The merge of two line breaks would join the header's with the answer's; at inference they come apart."""
    merged = small.convert_tokens_to_ids("ĊĊ")
    row = encode(small, CHATML, say("u:Hi", "a:\nYo"))
    assert shown(small, row).endswith("<|im_start|>assistant\n⟦\nYo<|im_end|>⟧")
    assert merged not in row.input_ids
    inner = encode(small, CHATML, say("u:Hi", "a:Yo\n\nHi"))
    assert merged in inner.input_ids[inner.supervised]


def test_a_template_that_does_something_else_is_refused(small: Any):
    """And marks around something else; or the model would learn to call without arguments, or to say nothing."""
    shows, other = "does not write (the tool calls of )?message 2 ", "renders this conversation differently"
    head, talk = "{% for m in messages %}[{{ m.role }}]", say("u:one", "a:two", "u:three", "a:four")
    turn = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}"
    macro = "{% macro turn(m) %}[{{ m.role }}]" + turn + "{% endmacro %}"
    table: list[tuple[str, Any, str]] = [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", talk, shows),
        (CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"), talk, shows),
        (CHATML.replace("{{ m.content }}", "{{ m.content[:1] }}"), talk, other),
        (CHATML.replace("{{ m.role }}", "{{ m.content | length }}"), talk, other),
        ("{{ raise_exception('roles must alternate') }}", talk, "rejects this conversation .roles must alternate"),
    ]
    for said in ("''", "c.function.name | tojson", "c.function.name ~ (c.function.arguments | length)"):
        table.append((CHATML.replace("c.function | tojson", said), _calls(), shows))
    table += [(unmarked(template), messages, said) for template, messages, said in table]
    table += [
        (macro + "{% for m in messages %}{{ turn(m) }}{% endfor %}", talk, shows),
        (head + turn.replace("'assistant'", "'user'") + "{% endfor %}", talk, shows),
        (head + "{{ m.content }}" + turn.replace("{{ m.content }}</s>", "") + "{% endfor %}", talk, shows),
        ("{% generation %}{% for m in messages %}{{ m.content }}</s>{% endfor %}{% endgeneration %}", talk, shows),
    ]
    for template, messages, said in table:
        with pytest.raises(DataError, match=rf"(?s)^rows\.jsonl:7: .*{said}"):
            encode(small, template, messages)


TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {}}},
    {"name": "find_it", "description": "Finds."},
]


def test_a_text_that_the_template_does_not_write_is_refused(small: Any):
    """By what it writes for each text, not by words that stand elsewhere too; row after row of the same roles."""
    turn = "{%% for m in messages%s %%}<|im_start|>{{ m.role }}\n{{ %s }}<|im_end|>\n{%% endfor %%}"
    cut = turn % ("", "m.content.split('.')[0] if m.role == 'user' else m.content")
    kind = turn % ("", "m.content if m.content != 'Be kind.' else ''")
    talk = say("s:Be kind.", "u:Be kind.", "a:Be kind.")
    no_tool = CHATML.replace("in messages", "in messages if m.role != 'tool'")
    for template, messages, tools, said in [
        (NEMO, talk, None, "message 1 (system)"),
        (NEMO, say("s:S", "u:Go", "a:1", "u:Go", "a:2"), None, "message 1 (system)"),
        (NEMO, [*talk[:2], {**talk[2], "key": 1}], None, "message 1 (system)"),
        (NEMO, [*say("s:Look."), *_calls()], TOOLS, "message 1 (system)"),
        (turn % (" if m.role in ['user', 'assistant']", "m.content"), talk, None, "message 1 (system)"),
        (turn % (" if m.role != 'user'", "m.content"), talk, None, "message 2 (user)"),
        (no_tool, _calls(), None, "message 3 (tool)"),
        (CHATML, _calls(), TOOLS, "tool look, tool find_it"),
        (CHATML + "{{ tools[0] | tojson }}", talk, TOOLS, "tool find_it"),
        (CHATML + "{% for t in tools %}{{ t.name or t.function.name }}{% endfor %}", talk, TOOLS, "tool find_it"),
        (cut, say("u:One. Two.", "a:1"), None, "message 1 (user)"),
        (kind, say("s:Be kind.", "u:x", "a:1"), None, "message 1 (system)"),
    ]:
        row, names = {"messages": messages, "tools": tools}, said.split(", ")
        for whole in (False, True):
            encoder = encoder_of(small, DataConfig(train_on_prompt=whole), template)
            for _ in range(2):
                with pytest.raises(DataError, match=rf"^a:1: .* omits {re.escape(said)}, in") as error:
                    encoder.encode([row], "messages", ["a:1"])
                # where it would help: an answer to a tool lacks the system's words at inference too
                assert ("split_turns" in str(error.value)) == (template == NEMO and not (whole or tools))
            allowing = encoder_of(small, DataConfig(train_on_prompt=whole, unwritten_text="allow"), template)
            (found,) = allowing.encode([row], "messages", ["a:1"])
            assert (len(found.samples), len(found.unwritten)) == (1, len(names)), said
            assert encoder.text != allowing.text
    encoder, asked = encoder_of(small, DataConfig(), NEMO), Conversation(talk[:2])
    pair = {"prompt": talk[:2], "chosen": talk[2:], "rejected": say("a:No.")}
    with pytest.raises(DataError, match=r"fix:     data\.chat_template: chatml, or data\.on_bad_row: drop$"):
        encoder.encode([pair], "preference", ["a:1"])
    assert small.decode(encoder.open_conversation(asked, "a:1")) == "[INST]Be kind.\n\nBe kind.[/INST]"
    with pytest.raises(DataError, match=r"^a:1: .* omits message 1 \(system\)"):
        encoder.open_conversation(Conversation(talk), "a:1")


def test_a_text_that_the_template_writes_in_its_own_way_is_no_loss(small: Any):
    result = {**say('t:{"a": 1.50,\n "b": "<x>"}')[0], "tool_call_id": "c1"}
    talks = [
        say("s: Be  kind & <b>.\n", "u:\n日本\t'zq0xa' \"x\"\n\n", "a:1"),
        say("s:", "u: ", "a:1", "u:Go", "a:2", "u:Go", "a:2"),
        [*_calls()[:2], result, *say("a:It is.", "u:None", "a:ok")],
    ]
    for written in (
        *("c", "c | trim", "c.split() | join(' ')", "c | tojson", "c | e", "c | upper", "c | capitalize", "c | title"),
        *("c | replace('\n', ' ')", "c | tojson(ensure_ascii=true)", "c[1:-1] if c[:1] == '{' else c", "c | urlencode"),
        *("c | tojson | tojson", "{'result': c, 'n': c | length} | tojson", "c | list | join('')", "c.strip('{\"}')"),
    ):
        own = (
            "{%% if m.role == 'assistant' %%}{{ m.content }}{%% else %%}{%% set c = m.content %%}{{ %s }}{%% endif %%}"
        )
        calls = "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}{% endfor %}"
        template = "{% for m in messages %}" + HEADER + own % written + calls + "<|im_end|>\n{% endfor %}"
        for messages in talks:
            row = {"messages": messages, "tools": TOOLS}
            shows = template + "{{ tools | map(attribute='function.name') | join }}{{ tools[0].function.name | e }}"
            shows += "{{ tools[1].function.description | upper }}"
            (found,) = encoder_of(small, DataConfig(train_on_prompt=True), shows).encode([row], "messages", ["a:1"])
            assert (found.unwritten, len(found.samples)) == ((), 1), (written, messages)


def test_a_word_goes_with_the_blank_before_it_and_a_part_of_one_is_refused():
    backend = Tokenizer(models.WordLevel({"▁ab": 0, "▁c": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    encoder = SpanEncoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    ((ids, mask),) = encoder.encode(["c ab c"], [[(2, 4)]], ["x"])
    assert (ids, mask.tolist()) == ([1, 0, 1], [False, True, False])
    for span in ((2, 3), (3, 4), (3, 5)):
        with pytest.raises(DataError, match=r"^x: token '▁ab' crosses the boundary"):
            encoder.encode(["c ab c"], [[span]], ["x"])


def test_random_spans_are_what_comparing_every_token_gives(small: Any):
    draw, encoder = random.Random(1), SpanEncoder(small)
    for _ in range(300):
        text = "".join(draw.choices("ab \nñ日🙂", k=draw.randint(1, 30)))
        borders = sorted(draw.sample(range(len(text) + 1), k=min(len(text) + 1, draw.choice((2, 4)))) if text else ())
        spans = list(zip(borders[::2], borders[1::2], strict=False))
        ((ids, mask),) = encoder.encode([text], [spans], ["x"])
        learned = b"".join(text[a:b].encode() for a, b in spans)
        assert small.decode([t for t, m in zip(ids, mask, strict=True) if m]).encode() == learned
        assert small.decode(ids) == text
