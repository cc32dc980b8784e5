"""Ranks that are started before anything heavy is imported, by a small program that starts two more of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lit_fsdp.launch.ranks import RANKS

_PROGRAM = """
import os, signal, sys, time
from lit_fsdp.ending import ended
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import wait_for_first
from lit_fsdp.launch import ranks

ranks._POLL_SECONDS, ranks._GRACE_SECONDS = 0.05, 0.1
rank = os.environ.get("LOCAL_RANK", "0")

def act():
    case = sys.argv[1]
    if rank == "0":
        ranks.RANKS.start({"devices": 3})
    elif case == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "all fail" or (case == "one fails" and rank == "2"):
        raise ConfigError("model.name", rank, "another")
    if rank == "0" and case != "all fail":
        print("prepared", flush=True)
        ranks.RANKS.release()
    wait_for_first()
    print("met", rank, os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], flush=True)
    if rank == "0":
        time.sleep(60 if case in ("killed", "one fails") else 0)
        ranks.RANKS.end(grace_seconds=20)
    return 0

sys.exit(ended(act))
"""


def _run(tmp_path: Path, case: str) -> tuple[int, list[str], list[str]]:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, str(program), case], capture_output=True, text=True, timeout=50, env=environment
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def test_they_wait_until_the_first_one_is_ready(tmp_path):
    code, said, errors = _run(tmp_path, "all well")
    assert (code, errors) == (0, [])
    assert said[0] == "prepared"
    assert sorted(said[1:]) == [f"met {rank} 3 127.0.0.1" for rank in range(3)]


def test_what_all_meet_is_said_once_and_what_one_meets_ends_the_run(tmp_path):
    for case, ended, first, last in (
        ("all fail", 2, "error: model.name: got 0", None),
        ("one fails", 76, "[rank 2] error: model.name: got 2", "error: rank 2 ended with exit code 2"),
        ("killed", 76, None, "error: rank 1 was ended by SIGKILL"),
    ):
        code, _, errors = _run(tmp_path, case)
        assert code == ended
        assert first in (None, errors[0])
        assert last in (None, errors[-1])
        assert case != "all fail" or not any("[rank" in line for line in errors)


def test_none_are_started_where_their_number_is_not_known_or_another_starts_them(monkeypatch):
    for trainer, environment in (
        ({"devices": 1}, {}),
        ({"devices": "auto"}, {}),
        ({"devices": 2, "num_nodes": 2}, {}),
        ({"devices": 2}, {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}),
        ({"devices": 2}, {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"}),
    ):
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            RANKS.start(trainer)
            assert RANKS.children == []
            assert environment or "LOCAL_RANK" not in os.environ
