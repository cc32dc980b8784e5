"""What a recipe declares is read back from the live run: dtypes, FSDP units, bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spec.running import FACTORY, RECIPE, fit, run

DTYPES = {  # mode: parameters at rest, what layers compute in, reductions, optimizer state
    "mixed": ("fp32", "bf16", "fp32", "fp32"),
    "low_precision": ("bf16", "bf16", "bf16", "bf16"),
}
NARROW = """
import torch

class Narrow(torch.optim.AdamW):
    \"\"\"Keeps its first moment in bf16, whatever the recipe declares.\"\"\"
    def step(self, closure=None):
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].float()
        loss = super().step(closure)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()
        return loss
"""


@pytest.mark.parametrize("mode", DTYPES)
def test_dtypes(mode: str, tmp_path: Path) -> None:
    fit(tmp_path / "run", f"{FACTORY}.precision", mode, "--trainer.max_steps", "2")
    record = json.loads((tmp_path / "run" / "dtypes.json").read_text())
    declared = tuple(record["declared"][name] for name in ("param", "compute", "reduce", "param"))
    assert declared == DTYPES[mode]


def test_other_dtypes_than_declared_stop_the_run(tmp_path: Path) -> None:
    Path("narrow.py").write_text(NARROW)
    said = fit(tmp_path / "run", "--allow-imports", "narrow", "--model.optim.class_path", "narrow.Narrow", code=1)
    assert "exp_avg" in said
    assert "bf16" in said


def test_units_and_bytes_are_those_of_the_audit(reference: Path) -> None:
    planned = json.loads(run("audit", *RECIPE, "--json")[0])
    ran = json.loads((reference / "audit.json").read_text())
    for name in ("units", "num_units", "num_params", "num_params_on_this_rank", "shard_degree"):
        assert ran[name] == planned[name], name
    assert sum(rank["num_params"] for rank in planned["state_per_rank"]) == ran["num_params"]
    assert sum(unit["num_params"] for unit in ran["units"]) == ran["num_params"]
