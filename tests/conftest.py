"""What every test gets: no hub, no caches of the user, marks by folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before transformers or datasets are imported: both read these once. Child processes inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
)

ROOT = Path(__file__).parents[1]
_MARKS = {"gpu": pytest.mark.gpu, "dist": pytest.mark.dist, "faults": pytest.mark.dist, "golden": pytest.mark.dist}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folder; GPU tests say why they are skipped."""
    for item in items:
        relative = item.path.relative_to(ROOT / "tests") if item.path.is_relative_to(ROOT / "tests") else item.path
        mark = _MARKS.get(relative.parts[0])
        if mark is not None:
            item.add_marker(mark)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(autouse=True)
def _caches_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Caches of tokenised rows and converted models go to a folder of this test run, never to the user's."""
    cache = tmp_path_factory.getbasetemp() / "lit_fsdp_cache"
    monkeypatch.setenv("LIT_FSDP_CACHE", str(cache))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout that is tested."""
    return ROOT
