"""Which template is used, what a named one needs, and what templates of every temper are refused or told for."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.named import NAMES, find_template
from lit_fsdp.data.render import TODAY, Renderer
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import byte_level_tokenizer
from tests.unit.data.conversations import SPECIAL, conversation, with_tools

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture
def tokenizer() -> Any:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def fitted() -> Any:
    """With the special tokens of all named templates."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([t for t in SPECIAL if t not in tokenizer.get_vocab()], special_tokens=True)
    return tokenizer


def _text(tokenizer: Any, template: Any, messages: Any, tools: Any = None) -> str:
    (row,) = ChatTemplate(tokenizer, template).encode([Conversation(messages, tools)], ["rows:1"])
    return str(tokenizer.decode(row.input_ids))


def test_the_tokenizers_own_and_its_one_for_tools(tokenizer: Any):
    assert find_template(None, tokenizer) is None
    tokenizer.chat_template = CHATML
    assert _text(tokenizer, None, TALK).startswith("<|im_start|>user\n1")
    tokenizer.chat_template = {"default": CHATML, "tool_use": "tools: {{ tools | length }}" + CHATML}
    assert _text(tokenizer, None, TALK).startswith("<|im_start|>user\n1")
    assert _text(tokenizer, None, TALK, [TOOL]).startswith("tools: 1<|im_start|>user\n1")
    both = RowEncoder(tokenizer, DataConfig()).text
    tokenizer.chat_template = CHATML
    assert RowEncoder(tokenizer, DataConfig()).text != both
    tokenizer.chat_template = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(ConfigError, match="the chat templates rag, tool_use, none of them its default"):
        find_template(None, tokenizer)


def test_a_file(tokenizer: Any, tmp_path: Path):
    path = tmp_path / "template.jinja"
    path.write_text(CHATML, encoding="utf-8")
    assert find_template(str(path), tokenizer) == find_template(str(path), tokenizer)
    encoder = RowEncoder(tokenizer, DataConfig(chat_template=str(path)))
    assert encoder.chat_template == CHATML
    with pytest.raises(
        ConfigError, match=r"nowhere\.jinja\n  allowed: chatml, llama3, mistral, gemma, zephyr, plain, or "
    ):
        find_template(str(tmp_path / "nowhere.jinja"), tokenizer)
    path.write_text("{% for m in messages %}\n{{ m.role ", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^data\.chat_template: got a template that is not Jinja \(line 2: "):
        RowEncoder(tokenizer, DataConfig(chat_template=str(path)))


@pytest.mark.parametrize("name", NAMES)
def test_a_named_template_says_what_it_lacks(tokenizer: Any, fitted: Any, name: str):
    """Special tokens of its own: those in its text, and no others."""
    found = find_template(name, fitted)
    assert found is not None
    in_text = {token for token in SPECIAL if token in found.default.partition("-#}")[2]}
    missing = sorted(token for token in in_text if token not in tokenizer.get_vocab() and "TOOL" not in token)
    if not missing:
        assert find_template(name, tokenizer) is not None
        return
    with pytest.raises(ConfigError) as caught:
        find_template(name, tokenizer)
    assert sorted(re.findall(r"'(\S+)'", caught.value.fix)) == missing
    assert "write model.add_tokens: ['" in caught.value.fix


def test_tokens_that_only_rows_with_tools_need(tokenizer: Any):
    template = find_template("mistral", tokenizer)
    assert _text(tokenizer, template, TALK) == "[INST]1[/INST]2</s>"
    with pytest.raises(
        ConfigError, match=r"mistral for rows with tools \(rows:1\), and the tokenizer lacks \[AVAILABLE"
    ):
        _text(tokenizer, template, TALK, [TOOL])


@pytest.mark.parametrize("name", ["zephyr", "plain", "mistral"])
def test_a_named_template_that_ends_with_eos_needs_one(tokenizer: Any, name: str):
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=f"{name}, and the tokenizer has no EOS"):
        find_template(name, tokenizer)


@pytest.mark.parametrize(
    ("name", "talk", "said"),
    [
        *((name, [{"role": "developer", "content": "x"}, *TALK], "shows") for name in NAMES),
        *(
            (name, [TALK[0], {"role": "tool", "content": "x"}, TALK[1]], "shows")
            for name in ("gemma", "zephyr", "plain")
        ),
        *((name, [TALK[1], TALK[0]], "in turns, the user first") for name in ("mistral", "gemma")),
        *((name, [*TALK, {"role": "system", "content": "x"}], "at the beginning") for name in ("mistral", "gemma")),
    ],
)
def test_roles_that_a_family_cannot_show(fitted: Any, name: str, talk: Any, said: str):
    with pytest.raises(DataError, match=rf"(?s)^rows:1: the chat template refuses it \({name}.* {said}\b.*fix: "):
        _text(fitted, find_template(name, fitted), talk)


@pytest.mark.parametrize("name", ["gemma", "zephyr", "plain"])
def test_tools_that_a_family_cannot_show(fitted: Any, name: str):
    with pytest.raises(DataError, match=f"{name} shows no tools"):
        _text(fitted, find_template(name, fitted), TALK, [TOOL])


def test_text_is_what_transformers_renders(fitted: Any):
    """For every named template, with the generation prompt and with tools."""
    import random

    draw = random.Random(1)
    for name in NAMES:
        found = find_template(name, fitted)
        assert found is not None
        renderer = Renderer(found.default, fitted.special_tokens_map)
        rows = [{"messages": conversation(draw)} for _ in range(20)]
        rows += [with_tools(draw) for _ in range(5)] if name in ("chatml", "llama3", "mistral") else []
        for row in rows:
            for prompt in (False, True):
                theirs = fitted.apply_chat_template(
                    row["messages"], row.get("tools"), chat_template=found.default, tokenize=False,
                    add_generation_prompt=prompt,
                )  # fmt: skip
                assert renderer.render(row["messages"], row.get("tools"), "", prompt)[0] == theirs


def test_what_a_template_sees_is_what_transformers_shows_it(fitted: Any):
    """Filters, globals, thoughts under each of their names, values of other types than JSON's."""
    template = (
        "{% for m in messages %}{{ m.content }}|{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.x | tojson }}|"
        "{{ m.x | tojson(indent=2, sort_keys=true) }}|{{ dict(a=1) }}|{{ namespace(a=2).a }}|{{ bos_token }}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ documents }}"
    )
    messages = [
        {"role": "user", "content": "<é>", "reasoning": "why", "x": {"b": (1, 2.5, None, True), "a": "日"}},
        {"role": "user", "content": "", "thinking": "how", "x": []},
    ]
    ours = Renderer(template, fitted.special_tokens_map).render(messages, None, "")[0]
    assert ours == fitted.apply_chat_template(messages, chat_template=template, tokenize=False)


def test_today_is_the_same_day_in_every_run(tokenizer: Any, caplog: pytest.LogCaptureFixture):
    template = "{{ strftime_now('%d %b %Y') }};" + CHATML
    with caplog.at_level(logging.WARNING, "lit_fsdp"):
        assert _text(tokenizer, template, TALK).startswith("26 Jul 2024;<|im_start|>user")
    assert f"taken to be {TODAY:%d %B %Y} in every run" in caplog.text


def _putting_bos() -> Any:
    """A tokenizer that puts BOS in front of every text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_bos_that_the_template_leaves_out(caplog: pytest.LogCaptureFixture):
    """The tokenizer would put it in front of a text, so it is in front of a conversation, and only once."""
    tokenizer = _putting_bos()
    with caplog.at_level(logging.WARNING, "lit_fsdp"):
        assert _text(tokenizer, CHATML, TALK).startswith("<s><|im_start|>user\n1")
    assert "the chat template writes no BOS, which the tokenizer puts first" in caplog.text
    caplog.clear()
    assert _text(tokenizer, "{{ bos_token }}" + CHATML, TALK).startswith("<s><|im_start|>user\n1")
    assert _text(tokenizer, find_template("plain", tokenizer), TALK) == "<s>User:\n1\n\nAssistant:\n2</s>"
    assert caplog.text == ""


@pytest.mark.parametrize("blanks", ["{# of ours #}\n\n", " ", "\n \n\n"])
def test_bos_behind_blanks_is_there(caplog: pytest.LogCaptureFixture, blanks: str):
    tokenizer, template = _putting_bos(), blanks + "{{ bos_token }}" + CHATML
    with caplog.at_level(logging.WARNING, "lit_fsdp"):
        text = _text(tokenizer, template, TALK)
    assert text.lstrip().startswith("<s><|im_start|>user\n1")
    assert (text.count("<s>"), text[:1].isspace(), caplog.text) == (1, True, "")
    for options, learnt in (({}, "2<|im_end|>"), ({"train_on_prompt": True}, text.lstrip().removeprefix("<s>"))):
        (row,) = ChatTemplate(tokenizer, template, **options).encode([Conversation(TALK)], ["row"])
        assert tokenizer.decode(row.input_ids[row.supervised]).strip() == learnt.strip()


def test_bos_that_is_there_twice_is_written_once(caplog: pytest.LogCaptureFixture):
    for tokenizer in (byte_level_tokenizer(), _putting_bos()):
        for template in ("<s>{{ bos_token }}<s>" + CHATML, " <s><s>" + CHATML):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "lit_fsdp"):
                (row,) = ChatTemplate(tokenizer, template).encode([Conversation(TALK)], ["row:1"])
            text = "<s><|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
            assert tokenizer.decode(row.input_ids).lstrip() == text
            assert tokenizer.decode(row.input_ids[row.supervised]) == "2<|im_end|>"
            assert [record.getMessage() for record in caplog.records] == [
                "row:1: the chat template begins with BOS twice; one is left out, which inference will not do"
            ]
            marks = "{% for m in messages %}<s>{{ m.content }}{% endfor %}</s>"
            empty = [{"role": "user", "content": ""}, TALK[1]]
            assert _text(tokenizer, marks, empty) == "<s><s>2</s>"


def test_a_template_cannot_reach_python(tokenizer: Any):
    for inside in ("''.__class__.__mro__", "namespace.__init__.__globals__", "messages.append(1)", "dict.__class__"):
        with pytest.raises(DataError, match="the chat template refuses it"):
            _text(tokenizer, "{{ " + inside + ".x }}" + CHATML, TALK)
