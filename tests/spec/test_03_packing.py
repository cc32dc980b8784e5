"""Packed samples do not see each other, which is proved on the model before training; the loss is the unpacked one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spec.running import RECIPE, checkpoint, fit, run


def test_packed_equals_padded(reference: Path, tmp_path: Path) -> None:
    found = {}
    for packing in ("true", "false"):
        words = (
            "--ckpt_path",
            checkpoint(reference, 6),
            "--data.packing",
            packing,
            "--trainer.limit_val_batches",
            "1.0",
        )
        run("validate", *RECIPE, "--trainer.default_root_dir", tmp_path / packing, *words)
        text = (tmp_path / packing / "validate-metrics.csv").read_text().splitlines()
        found[packing] = dict(zip(text[0].split(","), text[1].split(","), strict=True))
    assert float(found["true"]["val_loss"]) == pytest.approx(float(found["false"]["val_loss"]), rel=1e-6)
    assert found["true"]["val_token_accuracy"] == found["false"]["val_token_accuracy"]


def test_isolation_is_proved_before_the_first_step(tmp_path: Path) -> None:
    fit(tmp_path / "run", "--data.packing", "true", "--trainer.max_steps", "1")
    proof = json.loads((tmp_path / "run" / "isolation.json").read_text())
    assert (proof["bit_equal"], proof["largest_change"]) == (True, 0.0)
