"""From two runs that differ to the choice that makes the difference: one choice is turned after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.parity.choices import Choice, choices, turned
from lit_fsdp.parity.trace import Apart, StepDifference, differences, tolerance


class RunRefused(Exception):
    """A combination of choices that cannot be run, with what was said of it."""


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other."""

    dtype: str
    """That decides the tolerance."""
    allowed: Apart
    steps: list[StepDifference]

    @property
    def first(self) -> StepDifference | None:
        """The first step in which they differ by more than is allowed."""
        return next((step for step in self.steps if step.beyond(self.allowed)), None)


def compare(one: Path, other: Path) -> Comparison:
    """Compare two runs by what they have written down."""
    return Comparison(*tolerance(one, other), differences(one, other))


@dataclass(frozen=True)
class Turn:
    """Two runs between which one choice was turned, or several of which none can be turned alone."""

    name: str
    before: str
    after: str
    found: Comparison


def turns(
    one: Mapping[str, Any], other: Mapping[str, Any], goal: Path, run: Callable[[Mapping[str, Any]], Path]
) -> list[Turn]:
    """Go from one recipe to another, choice by choice, until a run is equal to the last one.

    What a choice makes differ is what its two neighboring runs differ by, so that all of it is found on the way.

    Args:
        one: A whole recipe.
        other: Another.
        goal: The run of ``other``, or of what it comes nearest to.
        run: Runs a recipe; raises :class:`RunRefused`.
    """
    here, trace, found = dict(one), run(one), []
    waiting: list[Choice] = []
    for choice in choices(one, other):
        here = turned(here, choice.changes)
        waiting.append(choice)
        try:
            now = run(here)
        except RunRefused:
            continue  # as an engine of one rank before there is only one: together with the next
        found.append(_turn(waiting, compare(trace, now)))
        trace, waiting = now, []
        if compare(trace, goal).first is None:
            return found
    rest = Choice("all else", "lit_fsdp", "the plain loop", {})
    return [*found, _turn([*waiting, rest], compare(trace, goal))]


def named(found: list[Turn]) -> list[Turn]:
    """Those that make a difference of their own; where each is within its tolerance, the largest."""
    return [turn for turn in found if turn.found.first] or [max(found, key=_size)]


def _turn(taken: list[Choice], found: Comparison) -> Turn:
    joined = (" + ".join(getattr(choice, name) for choice in taken) for name in ("name", "before", "after"))
    return Turn(*joined, found)


def _size(turn: Turn) -> float:
    allowed = turn.found.allowed
    return max(max(a / b for a, b in zip(step.apart, allowed, strict=True)) for step in turn.found.steps)
