"""The pieces of recipes/precision_study.py on a tiny model: exact counts, the table, a picture with something in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study() -> ModuleType:
    """The script, imported as it is when run from recipes/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "recipes"))
        spec = importlib.util.spec_from_file_location("precision_study", ROOT / "recipes/precision_study.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def stepped(dtype: torch.dtype, rate: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters before and after one SGD step with gradient 1; half of them are 1, half are 2**-10."""
    model = torch.nn.Linear(8, 1, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0] * 4 + [2.0**-10] * 4]))
    before = [param.detach().clone() for param in model.parameters()]
    model.weight.grad = torch.ones_like(model.weight)
    torch.optim.SGD(model.parameters(), lr=rate).step()
    return before, [param.detach() for param in model.parameters()]


def test_updates_below_half_a_spacing_vanish(study: ModuleType) -> None:
    for dtype, rate, unchanged in (
        (torch.bfloat16, 1e-4, 4),  # half the spacing below 1 is 2**-9: too little for the ones, not for the others
        (torch.bfloat16, 2.0**-8, 0),
        (torch.bfloat16, 1e-7, 8),
        (torch.float32, 1e-4, 0),
        (torch.float32, 1e-8, 4),  # fp32 has an end too
    ):
        assert study.count_unchanged(*stepped(dtype, rate)) == (unchanged, 8)
