"""``doctor`` on a disk that is full or read-only: rows that say so, and nothing left there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.test_doctor import examined

MIB = 2**20


def test_a_full_and_a_read_only_disk(small_disk: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    row = examined(monkeypatch, small_disk("full", 16 * MIB))["trial save"]
    assert (row.grade, "No space left" in row.found, "free space" in row.fix) == ("fail", True, True)
    place = small_disk("read-only", 4 * MIB)
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    row = examined(monkeypatch, place)["write to the run folder"]
    assert (row.grade, "Read-only file system" in row.found) == ("fail", True)
