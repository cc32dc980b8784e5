"""One process, one device, one fresh process group per run.

``LIT_FSDP_GPU_DRY_RUN=1 pytest tests/gpu`` runs the same code on the CPU with gloo: everything but CUDA itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

# Read by cuBLAS when it starts; runs that must be repeatable bit for bit need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
DRY_RUN = os.environ.get("LIT_FSDP_GPU_DRY_RUN") == "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are shown but no errors here; in a dry run nothing is skipped for want of a device."""
    for item in (item for item in items if Path(__file__).parent in item.path.parents):
        # drivers, kernels and Lightning's advice on loader processes differ from machine to machine
        item.add_marker(pytest.mark.filterwarnings("default"))
        if DRY_RUN:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """The environment and the deterministic mode of a test are not left for the next one."""
    import torch

    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"):  # as the jobs of tests/dist are started
        yield
    torch.use_deterministic_algorithms(False)
