"""One uninterrupted run that the promises are held against."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.spec.running import fit


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six steps on two processes under fsdp2; not to be written to."""
    folder = tmp_path_factory.mktemp("spec") / "reference"
    fit(folder)
    return folder


@pytest.fixture
def stopped(reference: Path, tmp_path: Path) -> Path:
    """A copy of it as it was after its second step."""
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    for step in (4, 6):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08}")
    rows = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join([rows[0], *(row for row in rows[1:] if int(row.split(",")[0]) < 2)]))
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
