"""What holds for every template and tokenizer: random conversations, the same for the same seed."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Encoded, SpanEncoder
from lit_fsdp.data.named import NAMES, find_template
from lit_fsdp.data.render import Renderer
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.data.turns import TurnFinder
from tests.unit.data import tokenizers as shipped
from tests.unit.data.conftest import byte_level_tokenizer
from tests.unit.data.conversations import ENDS, SPECIAL, TRIMS, conversation, with_tools
from tests.unit.data.families import unmarked

_KINDS = ("small", "with BOS", "mistral", *(("qwen",) if os.environ.get("LIT_FSDP_LONG") else ()))


def _fit(tokenizer: Any, bos: bool = False) -> Any:
    """The tokenizer with the special tokens of all named templates."""
    from tokenizers import processors

    missing = [token for token in SPECIAL if token not in tokenizer.get_vocab()]
    tokenizer.add_tokens(missing, special_tokens=True)
    if bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            special_tokens=[(end, tokenizer.convert_tokens_to_ids(end)) for end in ("<s>", "</s>")],
        )
    return tokenizer


@pytest.fixture(scope="module")
def fitted() -> dict[str, tuple[Any, SpanEncoder]]:
    """Tokenizers, each with the same as one that marks spans."""
    found: dict[str, Any] = {"small": _fit(byte_level_tokenizer()), "with BOS": _fit(byte_level_tokenizer(), bos=True)}
    found["mistral"] = _fit(shipped.mistral_v3())
    if "qwen" in _KINDS:
        found["qwen"] = _fit(shipped.qwen())
    return {name: (tokenizer, SpanEncoder(tokenizer)) for name, tokenizer in found.items()}


def _learnt(tokenizer: Any, row: Encoded) -> list[str]:
    """The text of every run of supervised tokens: what it adds to the text before it."""
    ids = row.input_ids.tolist()
    borders = [i for i, (a, b) in enumerate(pairwise([False, *row.supervised.tolist(), False])) if a != b]
    before = [tokenizer.decode(ids[:border], skip_special_tokens=False) for border in borders]
    return [text[len(head) :] for head, text in zip(before[::2], before[1::2], strict=True)]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_assistant_says_and_its_end_is_learnt(fitted: Any, name: str, kind: str):
    """Nothing else is, with marks or without; and BOS stands at the beginning, once, where the tokenizer has it."""
    tokenizer, spans = fitted[kind]
    found = find_template(name, tokenizer)
    assert found is not None
    draw, end = random.Random(f"{name} {kind}"), ENDS.get(name, tokenizer.eos_token)
    talks = [Conversation(conversation(draw)) for _ in range(40)]
    places = [str(i) for i in range(len(talks))]
    marked, derived = (
        ChatTemplate(tokenizer, text, encoder=spans).encode(talks, places)
        for text in (found.default, unmarked(found.default))
    )
    for talk, row, other in zip(talks, marked, derived, strict=True):
        assert other.input_ids.tolist() == row.input_ids.tolist()
        assert other.supervised.tolist() == row.supervised.tolist()
        gap = " " if (name, kind) == ("mistral", "mistral") else ""  # which the template writes for SentencePiece
        said = [m["content"] for m in talk.messages if m["role"] == "assistant"]
        said = [text.strip() if name in TRIMS else gap * bool(text) + text for text in said]
        assert _learnt(tokenizer, row) == [text + end for text in said]
        has_bos = kind in ("with BOS", "mistral")
        assert row.input_ids.tolist().count(tokenizer.bos_token_id) == has_bos or tokenizer.bos_token in (
            None,
            "<|im_start|>",
        )
        assert not has_bos or row.input_ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral"])
def test_calls_are_learnt_and_results_are_not(fitted: Any, name: str):
    tokenizer, _ = fitted["small"]
    found = find_template(name, tokenizer)
    assert found is not None
    draw = random.Random(name)
    encoders = [RowEncoder(tokenizer, DataConfig(), text) for text in (found.default, unmarked(found.default))]
    for _ in range(30):
        row = with_tools(draw)
        marked, derived = (encoder.encode([row], "messages", ["row"])[0].samples[0] for encoder in encoders)
        assert derived.supervised.tolist() == marked.supervised.tolist()
        call, answer = _learnt(tokenizer, marked)
        assert row["messages"][1]["tool_calls"][0]["function"]["name"] in call
        assert answer == row["messages"][3]["content"] + ENDS.get(name, "</s>")


@pytest.mark.parametrize(
    ("supervise", "everything"), [("all", False), ("last", False), ("flagged", False), ("all", True)]
)
def test_flags(fitted: Any, supervise: Any, everything: bool):
    """Exactly the turns that are asked for; with train_on_prompt all others too, but for what must not be."""
    tokenizer, spans = fitted["small"]
    draw = random.Random(supervise)
    found = find_template("chatml", tokenizer)
    template = ChatTemplate(tokenizer, found, supervise, everything, spans)
    for _ in range(60):
        talk = conversation(draw)
        for message in talk:
            flag = draw.choice((None, None, False, True if message["role"] == "assistant" else None))
            message.update({} if flag is None else {"train": flag})
        (row,) = template.encode([Conversation(talk)], ["row"])
        turns = [m for m in talk if m["role"] == "assistant"]
        if everything:
            never = "".join(m["content"] + "<|im_end|>" for m in turns if m.get("train") is False)
            left_out = [t for t, learnt in zip(row.input_ids[1:], row.supervised[1:], strict=True) if not learnt]
            assert tokenizer.decode(left_out, skip_special_tokens=False) == never
            continue
        wanted = {"all": turns, "last": turns[-1:], "flagged": [m for m in turns if m.get("train")]}[supervise]
        wanted = [m["content"] + "<|im_end|>" for m in wanted if m.get("train") is not False]
        assert _learnt(tokenizer, row) == wanted


def test_by_shape_is_by_turn(fitted: Any, monkeypatch: pytest.MonkeyPatch):
    """The turns of a row from the shape of its conversation are those derived from the row, for every template."""
    tokenizer, _ = fitted["with BOS"]
    for name in NAMES:
        found = find_template(name, tokenizer)
        assert found is not None
        draw = random.Random(name)
        renderer = Renderer(unmarked(found.default), tokenizer.special_tokens_map)
        fast, slow = (TurnFinder(renderer, tokenizer.added_tokens_encoder) for _ in range(2))
        monkeypatch.setattr(slow, "_by_shape", lambda *_: None)
        used = 0
        for _ in range(60):
            talk = Conversation(conversation(draw))
            turns = [i for i, m in enumerate(talk.messages) if m["role"] == "assistant"]
            assert fast.find(talk, turns, "row") == slow.find(talk, turns, "row")
            used += bool(turns and fast._by_shape(talk, turns, fast.find(talk, turns, "row")[0]))
        assert used > 40
