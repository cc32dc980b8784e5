"""A cluster that takes every job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from lit_fsdp.launch import slurm_lint_places
from tests.unit.launch.fake_slurm import FakeSlurm
from tests.unit.launch.jobs import MODEL


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A folder with a recipe, which is taken for shared, and a cluster that takes everything."""
    fake = FakeSlurm(tmp_path / "fake", monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm_lint_places, "local_place", lambda path: None)
    monkeypatch.setattr("lit_fsdp.commands.slurm.checkpoint_bytes", lambda run: 2**30)
    monkeypatch.setattr("lit_fsdp.commands.slurm.num_checkpoints", lambda run: 1)
    monkeypatch.setattr("lit_fsdp.commands.slurm_start.check_keys", lambda values: None)  # see test_start.py
    monkeypatch.setattr("lit_fsdp.commands.slurm_start.tokenizer_is_there", lambda run: ())
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
    recipe = {
        "trainer": {"accelerator": "gpu", "devices": 8, "num_nodes": 2, "max_steps": 9, "default_root_dir": "run"},
        "model": {"name": MODEL},
        "data": {"train": "generated:64", "global_batch_size": 64},
    }
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    return fake
