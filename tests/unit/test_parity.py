"""The way from one recipe to another, on runs that are made up, so that what each choice does is known."""

from __future__ import annotations

import math
from typing import Any

import torch

from lit_fsdp.config.run import STRATEGY
from lit_fsdp.parity.choices import RunRefused, turns
from lit_fsdp.parity.trace import Trace, compare


def trace(loss: float, compute: str = "fp32", reduce: str = "fp32", norm: float | None = 1.0) -> Trace:
    found = Trace(compute, reduce)
    for step in range(3):
        found.add(0.0 if step == 0 else loss, norm, [("w", torch.full((2, 3), float(step)))])
    return found


def test_a_choice_that_needs_another_is_turned_after_it():
    engine, prefetch = f"{STRATEGY}.engine", f"{STRATEGY}.backward_prefetch"
    one, other = {prefetch: "pre", engine: "fsdp2"}, {prefetch: "post", engine: "fsdp1"}

    def run(recipe: dict[str, Any]) -> Trace:
        if recipe == one | {prefetch: "post"}:
            raise RunRefused("post")
        return trace(2.0 if recipe[prefetch] == "post" else 1.0)

    found = turns(one, other, run(other), run)
    assert [turn.name for turn in found if turn.found.first is not None] == ["trainer.strategy.backward_prefetch"]
    assert turns(one, one, trace(3.0), run)[-1].name == "all else"  # that the plain loop alone does


def test_tolerances_follow_the_dtypes():
    for one, other, dtype in (
        (("fp32", "fp32"), ("fp32", "bf16"), "fp32"),  # a reduction that one of them rounds is to be found
        (("fp32", "bf16"), ("fp32", "bf16"), "bf16"),
        (("bf16", "fp32"), ("fp32", "fp32"), "bf16"),
        (("fp16", "fp32"), ("fp32", "fp32"), "fp16"),
    ):
        assert compare(trace(1.0, *one), trace(1.0, *other)).dtype == dtype
    close = compare(trace(1.0), trace(1.0 + 9e-6))
    assert (close.first, close.steps[0]) == (None, (0, 0, 0))
    assert compare(trace(1.0), trace(1.0 + 2e-5)).first == 1
    assert compare(trace(1.0), trace(math.nan)).first == 1
    assert compare(trace(1.0), trace(1.0, norm=1.01)).first == 0
    untold = compare(trace(1.0), trace(1.0, norm=None))
    assert (untold.first, untold.steps[1]) == (None, (0, None, 0))
    early = trace(1.0)
    for of_steps in (early.losses, early.gradient_norms, early.weights):
        of_steps.pop()
    assert compare(trace(1.0), early).first == compare(early, trace(1.0)).first == 2
