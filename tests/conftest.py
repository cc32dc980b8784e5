"""What every test gets: no hub, no caches of the user, marks by folder."""

from __future__ import annotations

import os
from collections import Counter
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

# Of tests with very many cases `make test` runs every n-th, `make test-long` (LIT_FSDP_LONG=1) all of them.
_EVERY = {
    "test_a_cell_trains_as_the_reference_does": 2,
    "test_another_topology": 2,
    "test_random_weights_equal_those_of_one_process": 3,
    "test_files_are_loaded_bit_for_bit": 2,
    "test_in_every_phase": 2,
    "test_saved_stopped_and_resumed": 2,
    "test_with_loaders_in_a_save": 2,
}


def _leave_some_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is only in the long version, unless a test is asked for by its name."""
    if os.environ.get("LIT_FSDP_LONG") or any("::" in argument for argument in config.args):
        return
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        name = getattr(item, "originalname", item.name)
        (left_out if seen[name] % _EVERY.get(name, 1) else kept).append(item)
        seen[name] += 1
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder; GPU tests say why they are skipped."""
    _leave_some_out(config, items)
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
