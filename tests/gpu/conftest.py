"""One process, one device, one fresh process group per test.

``LIT_FSDP_GPU_DRY_RUN=1 pytest tests/gpu`` runs the same code on the CPU with gloo: everything but CUDA itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read by cuBLAS when it starts; runs that must be repeatable bit for bit need it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
DRY_RUN = os.environ.get("LIT_FSDP_GPU_DRY_RUN") == "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are shown but no errors here; in a dry run nothing is skipped for want of a device."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        # drivers, kernels and Lightning's advice on loader processes differ from machine to machine
        item.add_marker(pytest.mark.filterwarnings("default"))
        if DRY_RUN:
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


@pytest.fixture(scope="session")
def accelerator() -> str:
    """Lightning's word for the device."""
    return "cpu" if DRY_RUN else "gpu"


@pytest.fixture(scope="session")
def device(accelerator: str) -> str:
    """Torch's word for the device."""
    return "cpu" if accelerator == "cpu" else "cuda"


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """No process group, launcher variables, deterministic mode or memory statistics are left for the next test."""
    import torch
    import torch.distributed as dist

    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with tied embeddings and random weights."""
    from tests.gpu.runs import save_model

    return save_model(tmp_path_factory.mktemp("tiny") / "model", {})
