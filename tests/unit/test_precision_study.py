"""What recipes/precision_study.py counts on a tiny model is exact."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_updates_below_half_a_spacing_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one SGD step with gradient 1 from four ones and four of 2**-10."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))  # as when it is run from there
    count_unchanged = runpy.run_path(str(ROOT / "recipes/precision_study.py"))["count_unchanged"]
    for dtype, rate, unchanged in (
        (torch.bfloat16, 1e-4, 4),  # half the spacing below 1 is 2**-9: too little for the ones, not for the others
        (torch.bfloat16, 2.0**-8, 0),
        (torch.bfloat16, 1e-7, 8),
        (torch.float32, 1e-4, 0),
        (torch.float32, 1e-8, 4),  # fp32 has an end too
    ):
        weight = torch.nn.Parameter(torch.tensor([1.0] * 4 + [2.0**-10] * 4, dtype=dtype))
        before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
        torch.optim.SGD([weight], lr=rate).step()
        assert count_unchanged([before], [weight.detach()]) == (unchanged, 8), (dtype, rate)
