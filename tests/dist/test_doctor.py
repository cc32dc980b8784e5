"""``doctor`` with real ranks: measured and saved on two processes, alone and as two nodes; one killed, one hanging."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.launch import doctor_ranks
from lit_fsdp.launch.doctor import Wanted
from tests.dist.forks import ROOT, server
from tests.runs import own_port

_RUN_RANK = doctor_ranks.run_rank


def begin(tmp_path: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """``lit-fsdp doctor --json`` in an empty folder."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHELASTIC"))}
    env = {**inherited, "PYTHONPATH": str(ROOT), **variables}
    line = [server().python, "-m", "lit_fsdp", "doctor", "--json", *words]
    return subprocess.Popen(line, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_machine_is_examined_and_left_as_it_was(tmp_path: Path) -> None:
    process = begin(tmp_path, "--config", str(ROOT / "recipes" / "smollm2-135m_full_fsdp2_2xcpu.yaml"))
    out, err = process.communicate(timeout=400)
    assert out, err
    report = json.loads(out)
    rows = {row["name"]: row for row in report["rows"]}
    # how fast this machine is, and its limits, are not what is tested
    assert process.returncode == report["exit_code"] == int("fail" in {row["grade"] for row in report["rows"]})
    assert "4 checkpoint(s) of" in rows["run folder"]["found"]
    assert rows["trial save"]["found"].startswith("48 MiB by 2 rank(s)")
    assert [rate["bytes"] for rate in report["rates"]] == [2**16, 2**20, 2**24, 2**26]
    for rate in report["rates"]:  # of two ranks each link carries the tensor once
        assert rate["bus_gb_per_second"] == pytest.approx(rate["bytes"] / rate["ms"] / 1e6)
    assert os.listdir(tmp_path) == []


def test_two_nodes_are_examined_together(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0"}
    started = [
        begin(tmp_path, "--nodes", "2", **step, SLURM_PROCID=rank, SLURMD_NODENAME=f"node{rank}") for rank in "01"
    ]
    (out, err), (other, _) = [process.communicate(timeout=250) for process in started]
    assert out, err
    assert other == ""  # one table
    rows = {row["name"]: row for row in json.loads(out)["rows"]}
    assert rows["ranks"]["found"] == "2 on node0, node1"
    assert rows["shared run folder"]["grade"] == "ok"
    assert rows["all-reduce by gloo"]["found"].endswith("on 2 ranks")
    assert rows["trial save"]["found"].startswith("96 MiB by 2 rank(s)")
    assert os.listdir(tmp_path) == []


def faulty_rank(index: int, plan: Mapping[str, Any], first: int) -> None:
    """The real rank, but the second of them has ``DOCTOR_FAULT`` in its second all-reduce."""
    real = doctor_ranks.time_all_reduce

    def faulty(num_bytes: int, device: Any) -> float:
        if index == 1 and num_bytes == 2**20:
            if os.environ["DOCTOR_FAULT"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return real(num_bytes, device)

    doctor_ranks.time_all_reduce = faulty
    doctor_ranks.COLLECTIVE_SECONDS = float(os.environ["DOCTOR_SECONDS"])
    _RUN_RANK(index, plan, first)


def examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: int = 1) -> dict[str, Any]:
    """Rows by name, of rank 0 in this process."""
    launch = {"RANK": 0, "WORLD_SIZE": started, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own_port()}
    for name, value in launch.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    report = doctor_ranks.examine([], Wanted(run_folder=tmp_path), 0)
    assert os.listdir(tmp_path) == []
    return {row.name: row for row in report.rows}


@pytest.mark.parametrize(
    ("fault", "seconds", "culprit"),
    [
        pytest.param("kill", "60", "rank 1", marks=pytest.mark.long("killed ranks of a run are in tests/faults")),
        ("hang", "3", "rank 0"),
    ],
)
def test_a_rank_in_trouble_is_a_row_and_no_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, seconds: str, culprit: str
) -> None:
    monkeypatch.setattr(doctor_ranks, "run_rank", faulty_rank)
    monkeypatch.setenv("DOCTOR_FAULT", fault)
    monkeypatch.setenv("DOCTOR_SECONDS", seconds)
    row = examined(monkeypatch, tmp_path)["all-reduce by gloo"]
    assert row.grade == "fail"
    assert row.found.startswith(f"{culprit} in all-reduce of 1048576 bytes: ")
    assert ("killed by SIGKILL" if fault == "kill" else "imed out") in row.found
    assert ("dmesg" if fault == "kill" else "GLOO_SOCKET_IFNAME") in row.fix


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_ranks, "ARRIVE_SECONDS", 1.0)
    rows = examined(monkeypatch, tmp_path, started=3)
    assert rows["ranks"].found.endswith("; missing: 1, 2")
    assert {name: row.grade for name, row in rows.items()} == {"ranks": "fail"}  # nothing is started that would wait
