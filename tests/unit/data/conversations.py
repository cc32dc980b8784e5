"""Random conversations, and tokenizers that every named template fits, for tests of properties."""

from __future__ import annotations

import random
from typing import Any

from lit_fsdp.data.named import NAMES

_WORDS = (
    "a",
    "b",
    "Hello",
    "naïve",
    "日本",
    "🙂",
    "12",
    "</think>",
    "<b>",
    "S:",
    "qzx1xzq",
    "{{x}}",
    "\n",
    "\n\n",
    " ",
    "  x",
)
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>"),
)
"""Special tokens of all named templates."""

ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}
"""What ends a turn; in the other templates it is EOS."""

TRIMS = ("llama3", "gemma")
"""Templates that cut blanks off."""

assert set(ENDS) | {"mistral", "zephyr", "plain"} == set(NAMES)


def text(draw: random.Random, words: tuple[str, ...] = _WORDS) -> str:
    """A few words, or none."""
    return " ".join(draw.choices(words, k=draw.choice((0, 1, 1, 2, 5))))


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    """One to four questions with their answers, after a system message in half of them."""
    talk = [{"role": "system", "content": text(draw)}] if draw.random() < 0.5 else []
    for _ in range(draw.randint(1, 4)):
        talk += [{"role": "user", "content": text(draw)}, {"role": "assistant", "content": text(draw)}]
    return talk[: -1 if draw.random() < 0.1 else None]


def with_tools(draw: random.Random) -> dict[str, Any]:
    """A question, a call of a tool, what it gave and an answer, as a row with its tools."""
    name, call_id = draw.choice(("look", "sum_up")), "".join(draw.choices("abc123", k=9))
    arguments = {draw.choice(("city", "x")): draw.choice((text(draw), 3, None, [1.5, "é"]))}
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "user", "content": text(draw)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text(draw), "tool_call_id": call_id},
        {"role": "assistant", "content": f"It is {text(draw)}."},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": name, "parameters": {}}}]}
