"""Many families: what is loaded is what the file holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lit_fsdp.parallel.materialize import Materializer
from tests.unit.models.conftest import opened, tensors
from tests.unit.models.families import FAMILIES, FEW, saved

_ALL = pytest.param(FAMILIES, id="all", marks=pytest.mark.long("each of about 150 families is saved and loaded"))


@pytest.mark.parametrize("families", [pytest.param(FEW, id="few"), _ALL])
def test_initial_values_never_touch_a_loaded_tensor(families: tuple[str, ...], tmp_path: Path) -> None:
    """Parameters are those of the file and buffers those of plain transformers, bit for bit, once all are filled."""
    wrong, seen = {}, 0
    for family in families:
        folder = tmp_path / family
        try:
            expected = saved(family, folder)
        except Exception:
            if family in FEW:
                raise
            continue
        _, weights, model = opened(folder)
        materializer = Materializer(model, weights.read, torch.device("cpu"))
        for module in model.modules():
            materializer.fill(module)
        ours, theirs = tensors(model), tensors(expected)
        assert ours.keys() == theirs.keys(), family
        wrong[family] = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        seen += 1
        shutil.rmtree(folder)
    assert not {family: names for family, names in wrong.items() if names}
    assert seen >= (len(FEW) if families is FEW else 140)
