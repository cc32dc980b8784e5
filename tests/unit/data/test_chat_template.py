"""Which template is used, what a named one needs and marks, and that the text is what transformers renders."""

from __future__ import annotations

import logging
import os
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.chat_template import NAMES, TODAY, find_template
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Encoded
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data import tokenizers as shipped
from tests.unit.data.conftest import byte_level_tokenizer, encoder_of
from tests.unit.data.conversations import ENDS, SPECIAL, TRIMS, conversation, encode, say, with_tools
from tests.unit.data.families import unmarked

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = say("u:1", "a:2")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
_KINDS = ("small", "with BOS", "mistral", *(("qwen",) if os.environ.get("LIT_FSDP_LONG") else ()))


@pytest.fixture
def tokenizer() -> Any:
    return byte_level_tokenizer()


def _fit(tokenizer: Any, single: str = "") -> Any:
    """The tokenizer with the special tokens of all named templates, which puts around a text what ``single`` says."""
    tokenizer.add_tokens([token for token in SPECIAL if token not in tokenizer.get_vocab()], special_tokens=True)
    if single:
        ends = [(end, tokenizer.convert_tokens_to_ids(end)) for end in ("<s>", "</s>")]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    return tokenizer


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    found: dict[str, Any] = {"small": _fit(byte_level_tokenizer())}
    found["with BOS"] = _fit(byte_level_tokenizer(), "<s> $A </s>")
    found["mistral"] = _fit(shipped.mistral_v3())
    if "qwen" in _KINDS:
        found["qwen"] = _fit(shipped.qwen())
    return found


def _text(tokenizer: Any, messages: Any = TALK, tools: Any = None, **options: Any) -> str:
    row = encode(tokenizer, None, messages, row={"tools": tools}, **options)
    return str(tokenizer.decode(row.input_ids))


def test_the_tokenizers_own_and_its_one_for_tools(tokenizer: Any):
    assert find_template(None, tokenizer) is None
    tokenizer.chat_template = {"default": CHATML, "tool_use": "tools: {{ tools | length }}" + CHATML}
    assert _text(tokenizer).startswith("<|im_start|>user\n1")
    assert _text(tokenizer, tools=[TOOL]).startswith("tools: 1<|im_start|>user\n1")
    both = RowEncoder(tokenizer, DataConfig()).text
    tokenizer.chat_template = CHATML
    assert _text(tokenizer).startswith("<|im_start|>user\n1")
    assert RowEncoder(tokenizer, DataConfig()).text != both
    tokenizer.chat_template = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(ConfigError, match="the chat templates rag, tool_use, none of them its default"):
        find_template(None, tokenizer)


def test_a_file(tokenizer: Any, tmp_path: Path):
    path = tmp_path / "template.jinja"
    path.write_text(CHATML, encoding="utf-8")
    assert RowEncoder(tokenizer, DataConfig(chat_template=str(path))).chat_template == CHATML
    for content, said in ((b"{% for m in messages %}\n{{ m.role ", "a template that is not Jinja .line 2: "),
                          (b" \n", ".*which is empty"), (b"\xff", f"{path} .'utf-8' codec")):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^data\.chat_template: got {said}"):
            RowEncoder(tokenizer, DataConfig(chat_template=str(path)))
    with pytest.raises(ConfigError, match=r"nowhere\.jinja .*\n  allowed: chatml, llama3, mistral, gemma, zephyr, pla"):
        find_template(str(tmp_path / "nowhere.jinja"), tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_template_says_what_it_lacks(tokenizer: Any, fitted: Any, name: str):
    """Special tokens of its own: those in its text, and no others."""
    found = find_template(name, fitted["small"])
    assert found is not None
    in_text = {token for token in SPECIAL if token in found.source.partition("-#}")[2] and "TOOL" not in token}
    missing = sorted(token for token in in_text if token not in tokenizer.get_vocab())
    if missing:
        with pytest.raises(ConfigError) as caught:
            find_template(name, tokenizer)
        assert sorted(re.findall(r"'(\S+)'", caught.value.fix)) == missing
    tokenizer.add_tokens(missing, special_tokens=True)
    assert find_template(name, tokenizer) is not None
    tokenizer.eos_token = None
    if name in ENDS:
        assert find_template(name, tokenizer) is not None
    else:
        with pytest.raises(ConfigError, match=f"{name}, and the tokenizer has no EOS"):
            find_template(name, tokenizer)


def test_tokens_that_only_rows_with_tools_need(tokenizer: Any):
    assert _text(tokenizer, chat_template="mistral") == "[INST]1[/INST]2</s>"
    said = r"mistral for rows with tools \(rows.jsonl:7\), and the tokenizer lacks \[AV"
    with pytest.raises(ConfigError, match=said):
        _text(tokenizer, tools=[TOOL], chat_template="mistral")


def test_what_a_family_cannot_show(fitted: Any):
    tokenizer = fitted["small"]
    table = [(name, say("u:1", "a:2"), [TOOL], "shows no tools") for name in ("gemma", "zephyr", "plain")]
    table += [(name, [{"role": "developer", "content": "x"}, *TALK], None, "shows") for name in NAMES]
    table += [(name, say("u:1", "t:x", "a:2"), None, "shows") for name in ("gemma", "zephyr", "plain")]
    table += [(name, say("a:2", "u:1"), None, "in turns, the user first") for name in ("mistral", "gemma")]
    table += [(name, say("u:1", "a:2", "s:x"), None, "at the beginning") for name in ("mistral", "gemma")]
    for name, messages, tools, said in table:
        with pytest.raises(
            DataError, match=rf"(?s)^rows\.jsonl:7: the chat template refuses it \({name}.*{said}.*fix: "
        ):
            _text(tokenizer, messages, tools, chat_template=name)


def test_text_is_what_transformers_renders(fitted: Any):
    """For every named template, with the generation prompt and with tools; and all that a template can see."""
    tokenizer, draw = fitted["small"], random.Random(1)
    sees = (
        "{% for m in messages %}{{ m.content }}|{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.x | tojson }}|"
        "{{ m.x | tojson(indent=2, sort_keys=true) }}|{{ dict(a=1) }}|{{ namespace(a=2).a }}|{{ bos_token }}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ documents }}"
    )
    odd = {"b": (1, 2.5, None, True), "a": "日"}
    messages = [{"role": "user", "content": "<é>", "reasoning": "why", "x": odd}, {**say("u:")[0], "x": []}]
    table = [(sees, {"messages": messages})]
    for name in NAMES:
        found = find_template(name, tokenizer)
        assert found is not None
        table += [(found.source, {"messages": conversation(draw)}) for _ in range(10)]
        table += [(found.source, with_tools(draw)) for _ in range(5) if name in ("chatml", "llama3", "mistral")]
    for source, row in table:
        tokenizer.chat_template = source
        template = find_template(None, tokenizer)
        assert template is not None
        for prompt in (False, True):
            wanted = tokenizer.apply_chat_template(
                row["messages"], row.get("tools"), tokenize=False, add_generation_prompt=prompt
            )
            talk = Conversation(row["messages"], row.get("tools"))
            assert template.render(talk, "", generation_prompt=prompt)[0] == wanted
    tokenizer.chat_template = None


def test_today_is_the_same_day_in_every_run(tokenizer: Any, caplog: pytest.LogCaptureFixture):
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }};" + CHATML
    with caplog.at_level(logging.WARNING, "lit_fsdp"):
        assert _text(tokenizer).startswith("26 Jul 2024;<|im_start|>user")
    assert f"taken to be {TODAY:%d %B %Y} in every run" in caplog.text


def test_bos_is_what_the_template_writes(caplog: pytest.LogCaptureFixture):
    """As in inference; where it writes none although the tokenizer would, it is said."""
    tokenizer = _fit(byte_level_tokenizer(), "<s> $A")
    for template, begins, warned in (
        (CHATML, "<|im_start|>user\n1", True),
        ("{{ bos_token }}" + CHATML, "<s><|im_", False),
    ):
        caplog.clear()
        tokenizer.chat_template = template
        with caplog.at_level(logging.WARNING, "lit_fsdp"):
            assert _text(tokenizer).startswith(begins)
        assert ("the chat template writes no BOS, which the tokenizer puts before every other" in caplog.text) == warned
    assert _text(tokenizer, chat_template="plain") == "<s>User:\n1\n\nAssistant:\n2</s>"


def test_a_template_cannot_reach_python(tokenizer: Any):
    for inside in ("''.__class__.__mro__", "namespace.__init__.__globals__", "messages.append(1)", "dict.__class__"):
        tokenizer.chat_template = "{{ " + inside + ".x }}" + CHATML
        with pytest.raises(DataError, match="the chat template refuses it"):
            _text(tokenizer)


def _learned(tokenizer: Any, row: Encoded) -> list[str]:
    """The text of every run of supervised tokens: what it adds to the text before it."""
    ids = row.input_ids.tolist()
    borders = [i for i, (a, b) in enumerate(pairwise([False, *row.supervised.tolist(), False])) if a != b]
    before = [tokenizer.decode(ids[:border], skip_special_tokens=False) for border in borders]
    return [text[len(head) :] for head, text in zip(before[::2], before[1::2], strict=True)]


def _with_and_without_marks(name: str, tokenizer: Any) -> list[RowEncoder]:
    found = find_template(name, tokenizer)
    assert found is not None
    return [encoder_of(tokenizer, DataConfig(), text) for text in (found.source, unmarked(found.source))]


def _samples(encoders: list[RowEncoder], row: dict[str, Any]) -> list[Encoded]:
    return [sample for encoder in encoders for sample in encoder.encode([row], "messages", ["row"])[0].samples]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_assistant_says_and_its_end_is_supervised(fitted: Any, name: str, kind: str):
    """In random conversations nothing else is, with marks or without; BOS stands first where the tokenizer has it."""
    tokenizer = fitted[kind]
    encoders = _with_and_without_marks(name, tokenizer)
    draw, end = random.Random(f"{name} {kind}"), ENDS.get(name, tokenizer.eos_token)
    for _ in range(20):
        talk = conversation(draw)
        row, other = _samples(encoders, {"messages": talk}) or [None, None]
        said = [m["content"] for m in talk if m["role"] == "assistant"]
        if row is None or other is None:
            assert not said
            continue
        assert other.input_ids.tolist() == row.input_ids.tolist()
        assert other.supervised.tolist() == row.supervised.tolist()
        keyed = {"messages": [{**message, "key": 1} for message in talk]}  # not by the roles alone, but by itself
        assert all(sample.supervised.tolist() == row.supervised.tolist() for sample in _samples(encoders, keyed))
        gap = " " if (name, kind) == ("mistral", "mistral") else ""  # which the template writes for SentencePiece
        said = [text.strip() if name in TRIMS else gap * bool(text) + text for text in said]
        assert _learned(tokenizer, row) == [text + end for text in said]
        assert (row.input_ids[0] == tokenizer.bos_token_id) == (kind in ("with BOS", "mistral"))


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_calls_are_supervised_and_results_are_not(fitted: Any, name: str):
    draw, tokenizer = random.Random(name), fitted["small"]
    encoders = _with_and_without_marks(name, tokenizer)
    for _ in range(30):
        row = with_tools(draw)
        marked, derived = _samples(encoders, row)
        assert derived.supervised.tolist() == marked.supervised.tolist()
        call, answer = _learned(tokenizer, marked)
        assert row["messages"][1]["tool_calls"][0]["function"]["name"] in call
        assert answer == row["messages"][3]["content"] + ENDS.get(name, "</s>")
