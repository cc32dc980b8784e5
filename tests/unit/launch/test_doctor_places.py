"""Disks, hub and SLURM as the doctor finds them; nothing is left where it has tried something."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.launch.checks import places
from lit_fsdp.launch.checks.hub import hub_facts, judge_hub
from lit_fsdp.launch.checks.places import Written, judge_cache, judge_rate, judge_room, scratch, write_and_sync
from lit_fsdp.launch.checks.row import GIB, MIB, Row, Wanted
from lit_fsdp.launch.checks.slurm import judge_nodes, judge_slurm
from lit_fsdp.launch.doctor import trial_folder


@pytest.fixture
def wanted(tmp_path: Path) -> Wanted:
    return Wanted(run_folder=tmp_path / "runs" / "x", cache=tmp_path / "cache", checkpoint_bytes=GIB, num_checkpoints=4)


def test_a_good_place_is_good_and_stays_empty(tmp_path: Path, wanted: Wanted):
    with scratch(wanted.run_folder) as folder:
        assert folder.parent == tmp_path  # the run folder is not made by looking at it
        rows = places.look_at_run_folder(folder, dataclasses.replace(wanted, checkpoint_bytes=None), MIB)
        assert sorted(os.listdir(folder)) == ["lock", "rename-after"]  # what was written had no name
    names = ["write and sync", "rename", "lock in the run folder"]
    assert [row.name for row in rows] == names
    assert [row.grade for row in rows[1:]] == ["good", "good"]
    assert os.listdir(tmp_path) == []


def test_the_folder_of_checkpoints_is_tried_where_it_is(tmp_path: Path, wanted: Wanted):
    elsewhere = tmp_path / "fast"
    elsewhere.mkdir()
    wanted.run_folder.mkdir(parents=True)
    (wanted.run_folder / "checkpoints").symlink_to(elsewhere)
    with scratch(wanted.run_folder) as folder:
        assert folder.parent == elsewhere
    assert os.listdir(elsewhere) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_nothing_is_left_after_an_interrupt(tmp_path: Path, wanted: Wanted, error: type[BaseException]):
    def interrupted() -> None:
        with scratch(wanted.run_folder) as folder:
            (folder / "step").mkdir()
            (folder / "step" / "file").touch()
            raise error

    with pytest.raises(error):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_doctor_left_is_cleared_away(tmp_path: Path, wanted: Wanted):
    old, new = (tmp_path / f".lit-fsdp-doctor-{name}" for name in ("old", "new"))
    for folder in (old, new):
        (folder / "step").mkdir(parents=True)
    os.utime(old, (1e9, 1e9))
    with scratch(wanted.run_folder):
        assert new.is_dir()
        assert not old.exists()


def test_an_unwritable_folder_is_bad():
    with trial_folder(Wanted(run_folder=Path("/proc/run"), cache=Path("/proc"))) as (folder, rows):
        assert folder is None
    (row,) = rows
    assert row.grade == "bad"
    assert "trainer.default_root_dir" in row.fix
    assert places.look_at_cache(Wanted(run_folder=Path("/proc"), cache=Path("/proc/x")))[1].grade == "bad"


def test_a_full_disk_while_writing_is_bad(tmp_path: Path, wanted: Wanted, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    row = places.look_at_run_folder(tmp_path, wanted, MIB)[0]
    assert (row.grade, "No space left" in row.found, "free space" in row.fix) == ("bad", True, True)
    assert "write" not in os.listdir(tmp_path)


def test_a_rename_or_lock_that_does_not_work_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "rename", refuse)
    assert places.try_rename(tmp_path).grade == "bad"
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert places.try_lock(tmp_path, "run folder").grade == "bad"
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # a mount that only pretends
    assert "two holders" in places.try_lock(tmp_path, "run folder").found


def test_writing_stops_when_it_takes_too_long(tmp_path: Path):
    done = write_and_sync(tmp_path, 64 * MIB, seconds=0.0)
    assert done.num_bytes == 0
    assert write_and_sync(tmp_path, 3 * MIB).num_bytes == 3 * MIB
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("rate", "grade"), [(5, "bad"), (50, "warning"), (500, "good")])
def test_a_rate_is_judged(wanted: Wanted, rate: int, grade: str):
    row, save = judge_rate(Written(rate * 2 * MIB, 2.0), wanted)
    assert row.grade == grade
    assert row.found.startswith(f"{rate} MiB/s")
    assert save.grade == "good"


def test_the_last_save_before_a_time_limit_has_to_fit(wanted: Wanted):
    slow = dataclasses.replace(wanted, checkpoint_bytes=100 * GIB, signal_lead_seconds=120)
    row = judge_rate(Written(200 * MIB, 1.0), slow)[1]
    assert row.grade == "bad"
    assert row.fix == "set slurm.signal_lead_seconds: 550"  # 512 s, and 30 for the step
    assert judge_rate(Written(200 * MIB, 1.0), dataclasses.replace(slow, nodes=8))[1].grade == "good"


def test_room_is_compared_with_the_checkpoints(tmp_path: Path, wanted: Wanted):
    assert judge_room(tmp_path, wanted, 5 * GIB).grade == "good"
    row = judge_room(tmp_path, wanted, 3 * GIB)
    assert (row.grade, row.fix.startswith("free 1 GiB")) == ("bad", True)
    unknown = dataclasses.replace(wanted, checkpoint_bytes=None)
    assert judge_room(tmp_path, unknown, 5 * GIB).grade == "warning"
    none = dataclasses.replace(unknown, num_checkpoints=0)
    assert [judge_room(tmp_path, none, free).grade for free in (2 * GIB, MIB)] == ["good", "warning"]
    assert [judge_cache(wanted, free).grade for free in (9 * GIB, GIB, MIB)] == ["good", "warning", "bad"]


def hub(wanted: Wanted, **environment: str) -> dict[str, Row]:
    return {row.name: row for row in judge_hub(hub_facts(environment, wanted), wanted)}


def snapshot(home: Path, *files: str) -> None:
    folder = home / "hub" / "models--org--name" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')


@pytest.mark.parametrize(
    ("files", "offline", "grade"),
    [
        (["config.json", "model.safetensors"], "1", "good"),
        (["config.json"], "1", "bad"),
        (["config.json"], "0", "warning"),
        (["config.json", "model.safetensors.index.json", "one.safetensors"], "1", "bad"),
        (["config.json", "model.safetensors.index.json", "one.safetensors", "two.safetensors"], "1", "good"),
        (None, "1", "bad"),
        (None, "", "warning"),
    ],
)
def test_a_hub_model(tmp_path: Path, wanted: Wanted, files: list[str] | None, offline: str, grade: str):
    if files is not None:
        snapshot(tmp_path, *files)
    wanted = dataclasses.replace(wanted, model="org/name", needs_weights=True)
    row = hub(wanted, HF_HOME=str(tmp_path), HF_HUB_OFFLINE=offline)["model"]
    assert row.grade == grade
    assert (row.fix.startswith("hf download org/name")) == (grade != "good")


def test_a_model_folder(tmp_path: Path, wanted: Wanted):
    folder = tmp_path / "model"
    wanted = dataclasses.replace(wanted, model=str(folder), needs_weights=True)
    assert hub(wanted)["model"].grade == "bad"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert "lacks weights" in hub(wanted)["model"].found
    (folder / "model.safetensors").touch()
    assert hub(wanted)["model"].grade == "good"
    assert hub(dataclasses.replace(wanted, model=str(folder / "config.json")))["model"].grade == "good"


def test_a_token_is_named_and_never_shown(tmp_path: Path, wanted: Wanted):
    found = hub(wanted, HF_HOME=str(tmp_path), HF_TOKEN="hf_abcdefgh")["hub"].found
    assert "token from HF_TOKEN" in found
    (tmp_path / "token").write_text("hf_zyxwvuts")
    found += hub(wanted, HF_HOME=str(tmp_path))["hub"].found
    assert str(tmp_path / "token") in found
    assert "hf_" not in found
    assert "token none" in hub(wanted, HF_HOME=str(tmp_path / "other"))["hub"].found


def test_a_cache_of_the_hub_that_cannot_be_written(wanted: Wanted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert hub(wanted, HF_HOME="/x")["hub"].grade == "warning"


def test_slurm(wanted: Wanted):
    def on(*programs: str, **environment: str) -> Row:
        return judge_slurm(environment, wanted, lambda name: name if name in programs else None)

    every = ("sbatch", "srun", "scontrol")
    assert on().found == "not on this machine"
    assert on(*every).grade == "good"
    assert on("srun").grade == "warning"
    row = on(*every, SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_NNODES="4")
    assert (row.grade, row.fix) == ("warning", "srun lit-fsdp doctor --nodes 4")
    assert on(*every, SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_STEP_ID="0").grade == "good"


def test_nodes_that_were_not_started(wanted: Wanted):
    shared = dataclasses.replace(
        wanted, run_folder=Path("/shared/run"), cache=Path("/shared/cache"), nodes=4, devices=8
    )
    (row,) = [row for row in judge_nodes(shared, 1) if row.name == "nodes"]
    assert row.grade == "warning"
    assert row.fix.startswith("srun --nodes=4 --ntasks-per-node=8 lit-fsdp doctor --nodes 4")
    (row,) = [row for row in judge_nodes(dataclasses.replace(shared, words=" --quick"), 1) if row.name == "nodes"]
    assert "lit-fsdp doctor --quick --nodes 4 " in row.fix
    assert [row.grade for row in judge_nodes(shared, 2) if row.name == "nodes"] == ["bad"]
    assert [row for row in judge_nodes(shared, 4) if row.name == "nodes"] == []
    assert judge_nodes(dataclasses.replace(shared, nodes=1), 1) == []
    own = dataclasses.replace(shared, run_folder=Path("/tmp/run"))
    assert [row.name for row in judge_nodes(own, 4) if row.grade == "bad" and "/tmp" in row.found] == [
        "run folder for 4 nodes"
    ]


@pytest.mark.parametrize("given", ["$PLACE/hf", "${PLACE}/hf"])
def test_folders_of_the_hub_may_name_variables(tmp_path: Path, wanted: Wanted, given: str):
    facts = hub_facts({"PLACE": str(tmp_path), "HF_HOME": given}, wanted)
    assert facts.home == tmp_path / "hf"
    assert hub_facts({"HF_HOME": "/x/$NOT_SET"}, wanted).home == Path("/x/$NOT_SET")
