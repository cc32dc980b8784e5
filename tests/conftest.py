"""What every test gets: no hub, no caches of the user, marks by folder, a tiny model."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch, transformers and datasets are imported: they read these once. Child processes inherit them. One thread,
# as tests run two at a time and their tensors are small: a second one only waits, on a core that somebody else needs.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
)

# A shell ignores Ctrl-C in what it starts in the background, and so would all processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
_MARKS = {"gpu": pytest.mark.gpu, **dict.fromkeys(("dist", "faults", "slurm", "spec"), pytest.mark.dist)}

# With `-n 2` two processes share the tests: whole folders that have one disk, cluster or run for all their tests, and
# of the others file after file. What takes longest is begun first.
_TOGETHER = ("tests/faults/", "tests/slurm/", "tests/spec/")
_ORDER = (*_TOGETHER, "tests/dist/", "tests/configs/")


def _leave_out_long_ones(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases marked ``long`` are for ``make test-long`` (LIT_FSDP_LONG=1) and for those who ask for them by name."""
    long = [item for item in items if item.get_closest_marker("long")]
    if long and not os.environ.get("LIT_FSDP_LONG") and not any("::" in argument for argument in config.args):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder; GPU tests say why they are skipped."""
    _leave_out_long_ones(config, items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: next((n for n, folder in enumerate(_ORDER) if item.nodeid.startswith(folder)), 9))
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests one process runs one after the other, for ``-n``."""
    from xdist.scheduler import LoadFileScheduling

    class ByFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((f for f in _TOGETHER if nodeid.startswith(f)), None) or super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # the order is that of the tests
    return ByFolder(config, log)


@pytest.fixture(scope="session", autouse=True)
def _caches_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches of tokenized rows and converted models go to a folder of this test run, never to the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIT_FSDP_CACHE", str(tmp_path_factory.getbasetemp() / "lit_fsdp_cache"))
        yield


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that a test runs in this process makes our log speak; the next test's log is silent again."""
    log = logging.getLogger("lit_fsdp")
    handlers, level = log.handlers[:], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout that is tested."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with tied embeddings and random weights, saved as a model folder."""
    from tests.dist.reference import TINY, save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", TINY)
