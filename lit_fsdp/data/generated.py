"""Chat rows made on the spot, for trying a recipe out without data; each with a worse answer beside the right one."""

from __future__ import annotations

import random
from typing import Any

_COLORS = ("red", "green", "blue", "white", "black", "yellow")
_THINGS = ("box", "ball", "cup", "book", "lamp", "hat")


def generated_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` short conversations, the same for the same seed: sums, reversed words and questions of two turns.

    As ``messages``, and as ``chosen`` beside ``rejected``, whose last answer ends in another word.
    """
    random_source = random.Random(seed)  # noqa: S311 (nothing secret is made)
    kinds = (_sum, _reverse, _two_turns)
    rows = [kinds[i % len(kinds)](random_source) for i in range(count)]
    return [{"messages": turns, "chosen": turns, "rejected": _worse(turns)} for turns in rows]


def _worse(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same, but for the last word of the last answer: spelled backwards behind an x."""
    *before, word = turns[-1]["content"].split(" ")
    return [*turns[:-1], _turn("assistant", " ".join([*before, f"x{word[::-1]}"]))]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _sum(source: random.Random) -> list[dict[str, str]]:
    a, b = source.randint(1, 99), source.randint(1, 99)
    return [_turn("user", f"What is {a} + {b}?"), _turn("assistant", f"{a} + {b} = {a + b}")]


def _reverse(source: random.Random) -> list[dict[str, str]]:
    words = [source.choice(_COLORS + _THINGS) for _ in range(source.randint(2, 6))]
    system = _turn("system", "Repeat the words in reverse order.")
    return [system, _turn("user", " ".join(words)), _turn("assistant", " ".join(reversed(words)))]


def _two_turns(source: random.Random) -> list[dict[str, str]]:
    color, thing = source.choice(_COLORS), source.choice(_THINGS)
    return [
        _turn("user", f"I have a {color} {thing}."),
        _turn("assistant", f"A {color} {thing}, noted."),
        _turn("user", f"Which color is my {thing}?"),
        _turn("assistant", f"Your {thing} is {color}."),
    ]
