"""One uninterrupted run that the promises are held against."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.forks import ROOT
from tests.spec.running import RECIPE, checkpoint


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six steps on two processes under fsdp2, started as a user does it; not to be written to."""
    folder = tmp_path_factory.mktemp("spec") / "reference"
    words = [sys.executable, "-m", "lit_fsdp", "fit", *RECIPE, "--trainer.default_root_dir", str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # not in the checkout, where `make quickstart` may have left its model
    done = subprocess.run(words, env=env, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def stopped(reference: Path, tmp_path: Path) -> Path:
    """A copy of it as it was after its second step."""
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    for step in (4, 6):
        shutil.rmtree(checkpoint(folder, step))
    rows = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join([rows[0], *(row for row in rows[1:] if int(row.split(",")[0]) <= 2)]))
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
