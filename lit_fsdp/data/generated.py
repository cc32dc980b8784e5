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
    source = random.Random(seed)  # noqa: S311 (nothing secret is made)
    rows = []
    for number in range(count):
        turns = [
            {"role": "user" if i % 2 == 0 else "assistant", "content": text}
            for i, text in enumerate(_texts(number % 3, source))
        ]
        if number % 3 == 1:
            turns = [{"role": "system", "content": "Repeat the words in reverse order."}, *turns]
        *words, last = turns[-1]["content"].split(" ")
        worse = [*turns[:-1], {"role": "assistant", "content": " ".join([*words, f"x{last[::-1]}"])}]
        rows.append({"messages": turns, "chosen": turns, "rejected": worse})
    return rows


def _texts(kind: int, source: random.Random) -> list[str]:
    if kind == 0:
        a, b = source.randint(1, 99), source.randint(1, 99)
        return [f"What is {a} + {b}?", f"{a} + {b} = {a + b}"]
    if kind == 1:
        words = [source.choice(_COLORS + _THINGS) for _ in range(source.randint(2, 6))]
        return [" ".join(words), " ".join(reversed(words))]
    color, thing = source.choice(_COLORS), source.choice(_THINGS)
    first = [f"I have a {color} {thing}.", f"A {color} {thing}, noted."]
    return [*first, f"Which color is my {thing}?", f"Your {thing} is {color}."]
