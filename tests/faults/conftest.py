"""A tiny model, a run with three checkpoints, and small disks."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dist.forks import on_ranks, server
from tests.faults.tracked import SURVIVED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was injected, as a table."""
    if SURVIVED:
        terminalreporter.section("injected faults")
        for line in ("| injection | survived |", "|---|---|", *(f"| {row} | {n} |" for row, n in SURVIVED.items())):
            terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    """After a test that failed."""
    yield
    server().end_jobs()


@pytest.fixture(scope="session")
def saved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three checkpoints of two ranks; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    names = {"model": tiny_model, "run": folder / "run", "log": folder / "log"}
    on_ranks("train_tracked", 2, steps=3, checkpoint={"keep_last": 3}, **names)
    return folder / "run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str, int], Path]]:
    """Makes file systems of a few bytes in memory; without the right to mount, the test is skipped and says so."""
    mounted: list[Path] = []

    def make(name: str, num_bytes: int) -> Path:
        place = tmp_path / name
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "lit_fsdp_faults", str(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"NOT CHECKED: a full disk: {' '.join(words)}: {done.stderr.strip()}; run this as root")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["mount", "-o", "remount,rw", place], check=True, capture_output=True)
        subprocess.run(["umount", "--lazy", str(place)], check=True)
