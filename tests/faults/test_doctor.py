"""``doctor`` on a disk that is full or read-only: bad rows that say so, and nothing left there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from lit_fsdp.launch.bandwidth_report import judge_ranks
from lit_fsdp.launch.checks import places
from lit_fsdp.launch.checks.row import MIB, Wanted
from lit_fsdp.launch.doctor import Limits, measuring_plan, trial_folder
from lit_fsdp.launch.rank_processes import run_ranks


def test_a_full_disk(small_disk: Callable[[str, int], Path]) -> None:
    place = small_disk("full", 16 * MIB)
    wanted = Wanted(run_folder=place / "run", cache=place / "cache", checkpoint_bytes=20 * MIB, num_checkpoints=1)
    with trial_folder(wanted) as (folder, rows):
        assert folder is not None
        assert rows == []
        written, rename, lock = places.look_at_run_folder(folder, wanted, 64 * MIB)
        assert (written.grade, "No space left" in written.found) == ("bad", True)
        assert (rename.grade, lock.grade) == ("good", "good")
        assert places.look_at_cache(wanted)[0].grade == "bad"
        assert places.judge_room(folder, wanted, os.statvfs(place).f_bavail * 4096).grade == "bad"
        plan = {**measuring_plan("127.0.0.1", "gloo", 2, folder, Limits()), "sizes": []}
        outcomes = run_ranks([{**plan, "rank": rank, "device": rank} for rank in range(2)], 120)
        saved = judge_ranks(outcomes, "gloo", ["here"], 2)[-1]
    assert (saved.name, saved.grade) == ("trial save", "bad")
    assert "No space left" in saved.found
    assert "free space" in saved.fix
    assert os.listdir(place) == []


def test_a_read_only_disk(small_disk: Callable[[str, int], Path]) -> None:
    place = small_disk("read-only", 4 * MIB)
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    wanted = Wanted(run_folder=place / "run", cache=place / "cache")
    with trial_folder(wanted) as (folder, rows):
        assert folder is None
    assert [(row.name, row.grade) for row in rows] == [(f"write to {place}", "bad")]
    assert "Read-only file system" in rows[0].found
    assert places.look_at_cache(wanted)[1].grade == "bad"
