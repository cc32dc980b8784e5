"""Old checkpoints, full disks and second jobs, where all ranks have to come to the same end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import ROOT, SMOKE, command, on_ranks
from tests.runs import content

ENGINES = [{"engine": "fsdp2", "precision": "fp32"}, {"engine": "fsdp1", "precision": "fp32"}]
PLENTY = 2**40


def fit(run: Path, strategy: dict[str, Any], steps: int, **options: Any) -> dict[str, Any]:
    """What both ranks say, which has to be the same."""
    wide = {"wrap": ["Linear"], **strategy}
    ranks = on_ranks("fit_with_room", 2, strategy=wide, run=run, steps=steps, **options)
    assert ranks[0] == ranks[1]
    return ranks[0]


@pytest.mark.parametrize("strategy", ENGINES, ids=lambda strategy: strategy["engine"])
def test_the_bytes_foretold_are_the_bytes_written(tmp_path: Path, strategy: dict) -> None:
    """Before step 1 there is no optimizer state; within two percent all the same."""
    for layout in ("sharded", "full"):
        found = fit(tmp_path / layout, {**strategy, "state_dict": layout}, 1, free=[PLENTY])
        assert (found["error"], found["there"]) == (None, [1])
        files = (tmp_path / layout / "checkpoints").rglob("*")
        written = sum(path.stat().st_size for path in files if path.is_file())
        assert abs(found["estimate"] - written) <= 0.02 * written, (found["estimate"], written)


def test_no_room_before_the_first_step(tmp_path: Path) -> None:
    """Refused on both ranks; nothing is written, and what is there stays as it is."""
    first = fit(tmp_path, ENGINES[1], 2, every_steps=1, keep_last=2)
    assert first["there"] == [1, 2]
    before = content(tmp_path / "checkpoints")
    resume = {"ckpt_path": tmp_path / "checkpoints/step-00000002", "every_steps": 1, "keep_last": 2}
    size = first["estimate"]
    refused = fit(tmp_path, ENGINES[1], 4, free=[size // 2], **resume)
    assert "not enough disk space for checkpoints" in refused["error"]
    assert "at most 3 at a time" in refused["error"]
    assert (refused["taken"], refused["there"]) == (2, [1, 2])
    assert content(tmp_path / "checkpoints") == before
    done = fit(tmp_path, ENGINES[1], 4, free=[size * 2], **resume)
    assert (done["error"], done["there"]) == (None, [3, 4])


def test_what_one_rank_does_not_see_yet(tmp_path: Path) -> None:
    """On a network file system rank 1 may look at an older state of the folder: what rank 0 sees counts for both."""
    first = fit(tmp_path, ENGINES[0], 2, every_steps=1, keep_last=2)
    assert first["there"] == [1, 2]
    used = fit(tmp_path, ENGINES[0], 4, unseen=2)
    assert "which has 2 checkpoint(s), the newest of step 2" in used["error"]
    nothing = fit(tmp_path, ENGINES[0], 4, unseen=2, ckpt_path="last")
    assert "only some ranks see a checkpoint there" in nothing["error"]
    older = fit(tmp_path, ENGINES[0], 4, unseen=1, ckpt_path="last", every_steps=1, keep_last=2)
    assert (older["error"], older["taken"]) == (None, 4)
    assert older["loaded"].endswith("step-00000002")


def test_a_second_job_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    """In somebody's own Trainer, on both ranks, and by the command; what the dead one has forked may live on."""
    code = "import os, sys, time; from lit_fsdp.checkpoint.run_lock import RunLock; RunLock('run'); child = os.fork()"
    words = [sys.executable, "-W", "ignore", "-c", f"{code}; child and print(child, flush=True); time.sleep(300)"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        child = int(first.stdout.readline())
        who = f"another job uses this run folder: process {first.pid} on host"
        (done, _) = command(2, ["fit", *SMOKE, "--trainer.default_root_dir", "run"], tmp_path, patience=1)
        assert (done.code, who in done.err, "Traceback" in done.err) == (1, True, False)
        assert who in fit(tmp_path / "run", ENGINES[0], 2)["error"]
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
        first.kill()
    allowed = fit(tmp_path / "run", ENGINES[0], 2)
    os.kill(child, signal.SIGKILL)
    assert (allowed["error"], allowed["there"]) == (None, [2])


def test_a_disk_that_fills_up_on_the_way(tmp_path: Path) -> None:
    """Room at the start, none at the third save: an error on both ranks, and the second one stands."""
    found = fit(tmp_path, ENGINES[0], 5, free=[PLENTY, PLENTY, PLENTY, 1000], every_steps=1, keep_last=1)
    assert "not enough disk space" in found["error"]
    assert "at most 1 at a time" in found["error"]
    assert (found["taken"], found["there"]) == (3, [2])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
