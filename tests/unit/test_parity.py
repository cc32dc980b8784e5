"""The way from one recipe to another, on runs that are made up, so that what each choice does is known."""

from __future__ import annotations

import math
from typing import Any

import torch

from lit_fsdp.config.run import STRATEGY
from lit_fsdp.parity.choices import RunRefused, turns
from lit_fsdp.parity.trace import Trace, compare

ONE = {
    f"{STRATEGY}.engine": "fsdp2",
    f"{STRATEGY}.backward_prefetch": "pre",
    f"{STRATEGY}.compile": False,
    "trainer.devices": 2,
    "data.class_path": "lit_fsdp.CausalLMDataModule",
}
OTHER = ONE | {
    f"{STRATEGY}.engine": "fsdp1",
    f"{STRATEGY}.backward_prefetch": "post",
    "trainer.devices": 4,
    "data.class_path": "own.Data",
    "data.init_args.extra": 1,
}


def trace(loss: float, compute: str = "fp32", reduce: str = "fp32", norm: float | None = 1.0) -> Trace:
    found = Trace(compute, reduce)
    for step in range(3):
        found.add(0.0 if step == 0 else loss, norm, [("w", torch.full((2, 3), float(step)))])
    return found


def made_up(harm: dict[str, Any]) -> Any:
    """Runs of which those that hold all of ``harm`` have another loss, and post needs fsdp1."""

    def run(recipe: dict[str, Any]) -> Trace:
        if (recipe[f"{STRATEGY}.engine"], recipe[f"{STRATEGY}.backward_prefetch"]) == ("fsdp2", "post"):
            raise RunRefused("post")
        assert ("data.init_args.extra" in recipe) == (recipe["data.class_path"] == "own.Data")
        return trace(2.0 if harm.items() <= recipe.items() else 1.0)

    return run


def test_the_choice_that_makes_the_difference_is_named_wherever_it_stands():
    for key, name in (
        ("data.class_path", "data.class_path"),
        ("trainer.devices", "trainer.devices"),
        (f"{STRATEGY}.engine", "trainer.strategy.engine"),
        (f"{STRATEGY}.backward_prefetch", "trainer.strategy.backward_prefetch"),  # turned after the engine
    ):
        run = made_up({key: OTHER[key]})
        found = turns(ONE, OTHER, run(OTHER), run)
        assert [turn.name for turn in found if turn.found.first is not None] == [name]
        assert found[-1].name == name  # no run is made beyond it
    assert turns(ONE, OTHER, trace(3.0), made_up({}))[-1].name == "all else"  # that the plain loop alone does


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
