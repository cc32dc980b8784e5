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


def test_the_table_compares_with_fp32_at_the_same_rate_and_the_picture_has_curves(study: ModuleType, tmp_path: Path):
    runs = []
    for mode, rate, last, share in (("fp32", 1e-5, 0.5, 0.0), ("mixed", 1e-5, 0.75, 0.98), ("fp32", 1e-4, 0.2, 0.0)):
        losses = {"held_out_loss": last, "held_out_loss_in_fp32": last - 0.01, "train_losses": [1.0, 0.8, last]}
        unchanged = [{"step": step, "num_unchanged": 1, "share": share} for step in (1, 2, 3)]
        runs.append({"mode": mode, "learning_rate": rate, "unchanged": unchanged, **losses})
    lines = study.as_table(runs).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert lines[3] == "| 1e-05 | `mixed` | 0.8500 | 0.7500 | 0.7400 | +0.2500 | 98.00% | 98.00% | 98.00% |"
    image = pytest.importorskip("matplotlib.image")
    study.draw(runs, tmp_path / "loss.png")
    pixels = image.imread(tmp_path / "loss.png")
    assert len({*map(tuple, pixels.reshape(-1, pixels.shape[-1])[::50])}) > 5  # lines in several colors
