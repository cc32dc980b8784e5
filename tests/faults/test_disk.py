"""A disk that fails, is full or read-only: an error that names rank and file, and nothing lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.dist.forks import on_ranks
from tests.dist.test_doctor import examined
from tests.faults.tracked import SURVIVED

OLD = ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_every_change_fails_once_on_every_rank(tmp_path: Path, layout: str) -> None:
    (entries, _) = on_ranks("fail_at_every_change", 2, timeout=200, folder=str(tmp_path), layout=layout)
    stages = {entry["event"]["stage"] for entry in entries}
    assert stages == {"preparing", "tensors", "states", "manifest", "rename"}
    assert {entry["rank"] for entry in entries} == ({0, 1} if layout == "sharded" else {0})
    assert {entry["event"]["kind"] for entry in entries} == {"mkdir", "open", "write", "sync", "rename"}
    for entry in entries:  # a folder that the other rank has made in this moment is good enough
        entry["hit"] &= entry["event"]["kind"] != "mkdir" or any(entry["errors"])
    assert {entry["event"]["kind"] for entry in entries if not entry["hit"]} <= {"mkdir"}
    for entry in [entry for entry in entries if entry["hit"]]:
        event, errors = entry["event"], entry["errors"]
        for text in errors:
            assert "made to fail" in text or "Input/output error" in text, entry
            assert f"\n  rank {entry['rank']}: " in text, entry
            assert f"\n  rank {1 - entry['rank']}: " not in text, entry
            assert os.path.basename(event["path"]).removeprefix(".").removesuffix(".tmp") in text, entry
        assert entry["intact"], entry
        # the last sync comes after the rename: the new one stands then, whole
        is_renamed = event == entries[-1]["event"] or entry["left"] == [*OLD, "step-00000003"]
        assert entry["left"] == OLD or (is_renamed and event["stage"] == "rename"), entry
        SURVIVED["a failing change of the file system"] += 1
    assert sum(len(entry["left"]) == 3 for entry in entries if entry["hit"]) <= 1


@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_a_full_and_a_read_only_disk(small_disk: Callable[[str, int], Path], tmp_path: Path, layout: str) -> None:
    disk, temporary = small_disk("disk", 8 << 20), small_disk("temporary", 1 << 16)
    (entries, _) = on_ranks("fill_the_disk", 2, timeout=200, disk=disk, temporary=temporary, layout=layout)
    for entry in entries:
        saved = entry["left"] == OLD
        assert saved or entry["left"] == OLD[:1], entry
        assert all(saved == (text == "") for text in entry["errors"]), entry
        for text in entry["errors"] if not saved else ():
            assert "No space left on device" in text, entry
            assert "step-00000002" in text, entry
        assert entry["intact"], entry
        assert entry["temporary"] == [], entry
        assert saved or entry["percent"] <= 115, entry
        assert not saved or entry["percent"] >= 90, entry
        SURVIVED["a full disk, in steps of 5 %"] += 1
    # modes mean nothing to root, so the file system itself is read-only
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for text in on_ranks("save_once", 2, folder=str(disk), step=2, layout=layout):
        assert "\n  rank 0: " in text
        assert f"{disk}/checkpoints/" in text
        assert "Read-only file system" in text
    assert [entry.path.name for entry in checkpoints(disk)] == OLD[:1]


def test_the_doctor_on_a_full_and_a_read_only_disk(
    small_disk: Callable[[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = examined(monkeypatch, small_disk("full", 16 << 20))["trial save"]
    assert (row.grade, "No space left" in row.found, "free space" in row.fix) == ("fail", True, True)
    place = small_disk("read-only", 4 << 20)
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    row = examined(monkeypatch, place)["write to the run folder"]
    assert (row.grade, "Read-only file system" in row.found) == ("fail", True)
