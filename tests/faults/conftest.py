"""One server that forks ranks, the number of trials (``LIT_FSDP_FAULTS=short`` or ``long``), and the table."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dist.forks import ForkServer
from tests.faults.ledger import Ledger

LONG = {"short": False, "long": True}[os.environ.get("LIT_FSDP_FAULTS", "short")]
_LEDGER = Ledger()


@dataclass(frozen=True)
class Counts:
    """How often the random injections are tried."""

    kills_of_jobs: int = 300 if LONG else 9
    kills_of_ranks: int = 60 if LONG else 6
    damages: int = 1000 if LONG else 48
    soak_seconds: float = float(os.environ.get("LIT_FSDP_SOAK_SECONDS", 600))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of all trials."""
    if _LEDGER.tried:
        terminalreporter.section("injected faults")
        for line in _LEDGER.table():
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ``-n`` another process prints the table, see ``tests/conftest.py``."""
    if _LEDGER.tried and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["injected faults"] = _LEDGER.table()


@pytest.fixture(scope="session")
def counts() -> Counts:
    return Counts()


@pytest.fixture(scope="session")
def ledger() -> Ledger:
    return _LEDGER


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Forks ranks that run the jobs of this folder."""
    server = ForkServer("tests.faults.training_jobs", "tests.faults.store_jobs")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _nothing_runs_on(forks: ForkServer) -> Iterator[None]:
    """After a test that failed."""
    yield
    forks.end_jobs()


@pytest.fixture(scope="session")
def model(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a model folder."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    forks.run("make_model", 1, folder=str(folder))
    return folder


@pytest.fixture(scope="session")
def saved(forks: ForkServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three checkpoints of two ranks; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    run = folder / "run"
    names = {"model": str(model), "run": str(run), "log": str(folder / "log")}
    forks.run("train", 2, timeout=200, steps=3, checkpoint={"every_steps": 1, "keep_last": 3}, **names)
    return run


@pytest.fixture
def small_disk(tmp_path: Path, ledger: Ledger) -> Iterator[Callable[[str, int], Path]]:
    """Makes file systems of a few bytes in memory; without the right to mount, the test is skipped and says so."""
    mounted: list[Path] = []

    def make(name: str, num_bytes: int) -> Path:
        place = tmp_path / name
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "lit_fsdp_faults", str(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            ledger.note("full disk, read-only folder", "NOT CHECKED: no right to mount a small file system here")
            pytest.skip(f"NOT CHECKED: a full disk: {' '.join(words)}: {done.stderr.strip()}; run this as root")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["mount", "-o", "remount,rw", place], check=True, capture_output=True)
        subprocess.run(["umount", "--lazy", str(place)], check=True)
