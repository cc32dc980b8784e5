"""``doctor`` with real ranks: measured and saved on two processes, alone and as two nodes; one killed, one hanging."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.launch.bandwidth_report import judge_ranks
from lit_fsdp.launch.doctor import Limits, measuring_plan
from lit_fsdp.launch.rank_processes import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "smollm2-135m_full_fsdp2_2xcpu.yaml"


def begin(tmp_path: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    """``lit-fsdp doctor`` in an empty folder."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHELASTIC"))}
    return subprocess.Popen(
        [sys.executable, "-m", "lit_fsdp", "doctor", *words],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_under(pid: int) -> list[int]:
    """Processes that this one has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in report["rows"]}


def test_a_machine_is_examined_and_left_as_it_was(tmp_path: Path):
    out, err = (process := begin(tmp_path, "--json", "--config", str(RECIPE))).communicate(timeout=400)
    assert out, err
    report = json.loads(out)
    rows = rows_of(report)
    # how fast this machine is, and its limits, are not what is tested
    assert process.returncode == report["exit_code"] == int("bad" in {row["grade"] for row in report["rows"]})
    for name in ("torch", "rename", "lock in the run folder", "trial save", "time of a save"):
        assert rows[name]["grade"] == "good", rows[name]
    assert "4 checkpoints of" in rows["disk of the run folder"]["found"]
    assert "48 MiB by 2 rank(s)" in rows["trial save"]["found"]
    assert [(rate["op"], rate["bytes"]) for rate in report["rates"]] == [
        (op, size) for op in ("all-reduce", "all-gather") for size in (2**16, 2**20, 2**24, 2**26)
    ]
    for rate in report["rates"]:
        share = 1.0 if rate["op"] == "all-reduce" else 0.5  # of two ranks
        assert rate["bus_gb_per_second"] == pytest.approx(rate["bytes"] / rate["ms"] / 1e6 * share)
    assert os.listdir(tmp_path) == []


def test_two_nodes_are_examined_together(tmp_path: Path):
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0"}
    started = []
    for rank in range(2):
        own = {"SLURM_PROCID": f"{rank}", "SLURM_NODEID": f"{rank}", "SLURMD_NODENAME": f"node{rank}"}
        started.append(begin(tmp_path, "--json", "--nodes", "2", **step, **own))
    (out, err), (other, _) = [process.communicate(timeout=250) for process in started]
    assert other == ""
    assert out, err
    report = json.loads(out)
    rows = rows_of(report)
    assert [(rank["rank"], rank["node"]) for rank in report["ranks"]] == [(0, "node0"), (1, "node1")]
    for name in ("ranks", "versions of the nodes", "one run folder", "nodes reach each other", "trial save"):
        assert rows[name]["grade"] == "good", rows[name]
    assert "1 measured" in rows["pairs of nodes"]["found"]
    assert len(report["rates"]) == 8
    assert {process.returncode for process in started} == {report["exit_code"]}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_a_rank_in_trouble_is_a_bad_row_and_no_hang(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("DOCTOR_FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # a hang is ended by the time of one collective on the rank that waits, long before that of the whole
    limits = Limits(collective_seconds=3.0 if fault == "hang" else 60.0)
    plan = measuring_plan("127.0.0.1", "gloo", 2, tmp_path, limits)
    outcomes = run_ranks([{**plan, "rank": r, "device": r} for r in range(2)], 120, "tests.dist.doctor_faulty_rank")
    found = {row.name: row for row in judge_ranks(outcomes, "gloo", ["here"], 2)}
    row = found["collectives by gloo"]
    assert (row.grade, found["trial save"].grade) == ("bad", "warning")
    if fault == "kill":
        assert "rank 1 ended by signal 9 in all-reduce of 1048576 bytes" in row.found
    else:
        assert "rank 0 in all-reduce of 1048576 bytes" in row.found
        assert "imed out" in row.found
    assert row.fix
    assert os.listdir(tmp_path) == []


def test_ranks_that_never_answer_are_ended_in_time(tmp_path: Path):
    plan = measuring_plan("127.0.0.1", "gloo", 2, None, Limits())
    start = time.monotonic()
    (outcome,) = run_ranks([{**plan, "rank": 1, "device": 1}], 0.5)  # rank 0 does not exist, and time is over first
    assert time.monotonic() - start < 20
    assert outcome.exit_code is None
    assert "did not come to an end in time" in str(outcome.problem)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_what_ends_the_doctor_ends_its_ranks(number: signal.Signals, code: int, tmp_path: Path):
    process = begin(tmp_path)
    assert process.stderr is not None
    while "measuring" not in (line := process.stderr.readline()):
        assert line, "it ended before it measured"
    deadline = time.monotonic() + 30
    while len(ranks := ranks_under(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    deadline = time.monotonic() + 30
    while (left := [rank for rank in ranks if _runs(rank)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ranks) == 2
    assert left == []
    if number != signal.SIGKILL:  # after which nobody could remove the folder, which is empty but for a file or two
        assert os.listdir(tmp_path) == []


def _runs(pid: int) -> bool:
    try:
        return "doctor_rank" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
