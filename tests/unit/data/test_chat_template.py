"""Which template is used, what a named one needs and marks, and that the text is what transformers renders."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.chat_template import NAMES, ChatTemplate, find_template
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.formats import to_conversation
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data import tokenizers as shipped
from tests.unit.data.conftest import byte_level_tokenizer
from tests.unit.data.conversations import CHATML, ENDS, SPECIAL, TRIMS, encode, say, supervised, unmarked

TALK = say("u:1", "a:2")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture
def tokenizer() -> Any:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    """Tokenizers with the special tokens of all named templates."""
    found = {"small": byte_level_tokenizer(), "with BOS": byte_level_tokenizer("<s> $A </s>")}
    found["mistral"] = deepcopy(shipped.mistral())
    for tokenizer in found.values():
        tokenizer.add_tokens([token for token in SPECIAL if token not in tokenizer.get_vocab()], special_tokens=True)
    return found


def _text(tokenizer: Any, messages: Any = TALK, tools: Any = None, **options: Any) -> str:
    row = encode(tokenizer, None, messages, row={"tools": tools}, **options)
    return str(tokenizer.decode(row.input_ids))


def test_the_tokenizers_own_and_its_one_for_tools(tokenizer: Any):
    assert find_template(None, tokenizer) is None
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools[0].function.name }}: " + CHATML}
    assert _text(tokenizer).startswith("<|im_start|>user\n1")
    assert _text(tokenizer, tools=[TOOL]).startswith("look: <|im_start|>user\n1")
    both = RowEncoder(tokenizer, DataConfig()).text
    tokenizer.chat_template = CHATML
    assert RowEncoder(tokenizer, DataConfig()).text != both


def test_a_file(tokenizer: Any, tmp_path: Path):
    path = tmp_path / "template.jinja"
    path.write_text(CHATML, encoding="utf-8")
    assert RowEncoder(tokenizer, DataConfig(chat_template=str(path))).chat_template == CHATML
    path.write_text("{% for m in messages %}\n{{ m.role ", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"got chatlm (?s:.*)fix:     write data\.chat_template: chatml$"):
        RowEncoder(tokenizer, DataConfig(chat_template="chatlm"))
    with pytest.raises(ConfigError, match=r"^data\.chat_template: got .* error in line 2: unexpected end of template"):
        _text(tokenizer, chat_template=str(path))
    with pytest.raises(ConfigError, match=r"nowhere\.jinja .*\n  allowed: chatml, llama3, mistral, gemma, zephyr, pla"):
        find_template(str(tmp_path / "nowhere.jinja"), tokenizer)


def test_a_named_template_says_what_it_lacks(fitted: Any):
    """Special tokens of its own: those in its text, and no others; and EOS, if nothing else ends its turns."""
    for name in NAMES:
        found, tokenizer = find_template(name, fitted["small"]), byte_level_tokenizer()
        assert found is not None
        in_text = {token for token in SPECIAL if token in found.source.partition("-#}")[2]}
        missing = sorted(token for token in in_text if token not in tokenizer.get_vocab())
        if missing:
            with pytest.raises(ConfigError) as caught:
                find_template(name, tokenizer)
            assert sorted(re.findall(r'"(\S+)"', caught.value.fix)) == missing
        tokenizer.add_tokens(missing, special_tokens=True)
        assert find_template(name, tokenizer) is not None
        tokenizer.eos_token = None
        if name not in ENDS:
            with pytest.raises(ConfigError, match=f"{name}, and the tokenizer has no EOS"):
                find_template(name, tokenizer)


def test_what_a_family_cannot_show(fitted: Any):
    tokenizer = fitted["small"]
    table = [(name, say("u:1", "a:2"), [TOOL], "shows no tools") for name in ("gemma", "zephyr", "plain")]
    table += [(name, [{"role": "developer", "content": "x"}, *TALK], None, "shows") for name in NAMES]
    table += [(name, say("u:1", "t:x", "a:2"), None, "shows") for name in ("gemma", "zephyr", "plain")]
    table += [(name, say("a:2", "u:1"), None, "in turns, the user first") for name in ("mistral", "gemma")]
    table += [(name, say("u:1", "a:2", "s:x"), None, "at the beginning") for name in ("mistral", "gemma")]
    for name, messages, tools, said in table:
        error = rf"(?s)^rows\.jsonl:7: the chat template rejects this conversation \({name}.*{said}.*fix: "
        with pytest.raises(DataError, match=error):
            _text(tokenizer, messages, tools, chat_template=name)


def test_arguments_that_have_to_be_text():  # as DeepSeek V3 adds them to other text
    call = {"name": "look", "arguments": {"city": "Tromsø"}}
    row = {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}]}
    template = ChatTemplate("{{ messages[0].content + messages[0].tool_calls[0].function.arguments }}", {})
    assert template.render(to_conversation(row, "messages", "rows:1"), "rows:1")[0] == 'x{"city": "Tromsø"}'


def test_today_is_always_one_day(tokenizer: Any):
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }};" + CHATML
    assert _text(tokenizer).startswith("26 Jul 2024;<|im_start|>user")


def test_a_template_cannot_reach_python(tokenizer: Any):
    for inside in ("''.__class__.__mro__", "namespace.__init__.__globals__"):
        tokenizer.chat_template = "{{ " + inside + ".x }}" + CHATML
        with pytest.raises(DataError, match="the chat template rejects this conversation"):
            _text(tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_assistant_says_and_its_end_is_supervised(fitted: Any, name: str):
    """Nothing else is, with marks or without; BOS stands first where the tokenizer has it."""
    row = {"messages": [*say("s:S é", "u:1\n\n", "a: 2 <b> ", "u:|qzx1xzq|", "a:"), {**say("u:{{x}}")[0], "key": 1}]}
    call = {"id": "abc012xyz", "type": "function", "function": {"name": "look", "arguments": {"city": "Tromsø"}}}
    asked = [*say("u:1"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": "cold", "tool_call_id": "abc012xyz"}
    for kind, tokenizer in fitted.items():
        found = find_template(name, tokenizer)
        assert found is not None
        end = ENDS.get(name, tokenizer.eos_token)
        templates = (found.source, unmarked(found.source))
        learned = [supervised(tokenizer, template, row["messages"]) for template in templates]
        said = "2 <b>" if name in TRIMS else " 2 <b> "
        if kind == "mistral":  # a part that is decoded alone loses the blank before it
            said, learned = said.lstrip(), [[text.lstrip() for text in found] for found in learned]
        assert learned == [[said + end, end]] * 2, kind
        ids = encode(tokenizer, templates[0], row["messages"]).input_ids
        assert (ids[0] == tokenizer.bos_token_id) == (kind != "small")
        if name in ("chatml", "llama3", "mistral"):
            for template in templates:
                first, last = supervised(tokenizer, template, [*asked, result, *say("a:It is.")], row={"tools": [TOOL]})
                assert ("look" in first, "cold" in first, last) == (True, False, "It is." + end)
