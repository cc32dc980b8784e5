"""Packed samples do not see each other, which is proved on the model before training; the loss is the unpacked one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spec.running import checkpoint, fit, logged, validated


def test_packed_equals_padded(reference: Path, tmp_path: Path) -> None:
    last = ("--ckpt_path", checkpoint(reference, 6))
    packed, padded = (validated(tmp_path / word, *last, "--data.packing", word) for word in ("true", "false"))
    assert float(packed) == pytest.approx(float(padded), rel=1e-6)
    accuracies = [logged(tmp_path / word, "val_token_accuracy", "validate-metrics.csv") for word in ("true", "false")]
    assert accuracies[0] == accuracies[1]


def test_isolation_is_proved_before_the_first_step(tmp_path: Path) -> None:
    fit(tmp_path / "run", "--data.packing", "true", "--trainer.max_steps", "1")
    proof = json.loads((tmp_path / "run" / "isolation.json").read_text())
    assert (proof["largest_change"], proof["tolerance"]) == (0.0, 0.0)
