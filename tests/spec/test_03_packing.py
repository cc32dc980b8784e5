"""Packed samples do not see each other, which is proved on the model before training; the loss is the unpacked one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spec.running import RECIPE, checkpoint, fit, logged, run


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


def test_every_row_is_in_a_pack_once(tmp_path: Path) -> None:
    said = fit(tmp_path / "run", "--data.packing", "true", "--trainer.max_epochs", "1", "--trainer.max_steps", "-1")
    assert "isolat" in said
    table = json.loads((tmp_path / "run" / "data.json").read_text())
    tokens = sum(int(float(count)) for count in logged(tmp_path / "run", "supervised_tokens").values())
    assert tokens <= table["splits"]["train"]["supervised_tokens"]
