"""kill -9 at any moment of a save: of the whole job, of one rank, in a removal; and one rank in trouble in a step.

Every stage of a save once in ``make test``; hundreds of random moments, and hours of kills, in ``make chaos``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.tracked import CHAOS, COLLECTIVE_TIMEOUT, SURVIVED, TrackedRun, attempts

KILLS_OF_JOBS, KILLS_OF_RANKS, SIGNALS = (300, 60, 300) if CHAOS else (5, 6, 3)
SOAK_SECONDS = float(os.environ.get("LIT_FSDP_SOAK_SECONDS", 600))
# Random moments seldom hit the short stages, so every stage is also met on purpose.
PLACES = ["preparing", "tensors", "states", "manifest", "rename"]
POINTS = [(0, "tensors"), (1, "tensors"), (0, "states"), (0, "manifest"), (0, "before removal"), (0, "removal")]
KINDS: list[dict[str, Any]] = [
    {"strategy": {"engine": "fsdp2"}},
    {"strategy": {"engine": "fsdp1", "state_dict": "full"}},
    {
        "strategy": {"engine": "fsdp2", "context_parallel": 2},
        "checkpoint": {"every_steps": 1, "keep_last": 2, "async_save": True},
    },
]


@pytest.mark.timeout(7200)
def test_the_whole_job_and_one_rank(tiny_model: Path, tmp_path: Path) -> None:
    """It resumes from a verified step, has lost at most one interval, and ends as if nothing had happened."""
    rng, stages = random.Random(20), Counter[str]()
    for number, kind in enumerate(KINDS):
        run = TrackedRun(tiny_model, tmp_path / str(number), **kind)
        for trial in range(number, KILLS_OF_JOBS, len(KINDS)):
            _kill_the_job(run, trial, rng, stages)
        for trial in range(number, KILLS_OF_RANKS, len(KINDS)):
            _kill_one_rank(run, trial, rng)
        run.finish()
    assert stages["tensors"] >= 1
    assert stages["manifest"] + stages["rename"] >= 1


def _kill_the_job(run: TrackedRun, trial: int, rng: random.Random, stages: Counter[str]) -> None:
    before = run.newest()
    if trial < len(PLACES):
        job = run.start(in_save={"rank": 0, "stage": PLACES[trial], "how": "kill_all", "step": before + 2})
    else:
        job = run.kill_at_random(rng)
    assert [o.code for o in job.wait(90)] == [-9, -9], job.output(0)
    stages[run.log.with_suffix(".stage-0").read_text().strip()] += 1
    run.check(before)
    SURVIVED["kill -9 of the whole job in a save"] += 1


def _kill_one_rank(run: TrackedRun, trial: int, rng: random.Random) -> None:
    """The other one ends by itself, in time and not with 0; what is on the disk is as after any kill."""
    rank, stage = POINTS[trial % len(POINTS)]
    nth = 1 if trial < len(POINTS) else rng.randint(1, 3)  # the manifest: opened, written, synced
    if run.job["strategy"].get("state_dict") == "full" and (rank, stage) == (1, "tensors"):
        rank = 0  # which writes everything
    before = run.newest()
    harm = {"rank": rank, "stage": stage, "nth": nth, "how": "kill"}
    job = run.start(in_save={**harm, "step": None if "removal" in stage else before + 2})
    outcomes = job.wait(90 + COLLECTIVE_TIMEOUT)
    killed, other = outcomes[rank], outcomes[1 - rank]
    assert killed.code == -9, killed.output
    assert other.code not in (0, None), other.output
    assert other.seconds - killed.seconds < COLLECTIVE_TIMEOUT
    assert not job.is_alive()
    run.check(before)
    SURVIVED["kill -9 of one rank in a save or a removal"] += 1


@pytest.mark.timeout(3600)
def test_signals_at_random_moments(tiny_model: Path, tmp_path: Path) -> None:
    """To one rank or to both: both end with the documented code, and not one step that was done is lost."""
    rng = random.Random(22)
    saving, strategy = {"every_steps": 4, "keep_last": 2}, {"context_parallel": 2}
    run = TrackedRun(tiny_model, tmp_path / "run", checkpoint=saving, strategy=strategy, hears_signals=True)
    for trial in range(SIGNALS):
        before, begun = run.newest(), len(attempts(run.log))
        job = run.start()
        run.wait_for(lambda: len(attempts(run.log)), begun + 1, job)
        time.sleep(rng.uniform(0, 0.5))
        number = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)[trial % 3]
        job.kill([[0], [1], None][trial // 3 % 3], number)
        outcomes = job.wait(60)
        code = 130 if number == signal.SIGINT else 75
        assert [o.code for o in outcomes] == [code, code], "\n".join(o.output for o in outcomes)
        assert not job.is_alive()
        if run.newest():
            run.check(before, may_lose=0)
        SURVIVED[f"{number.name} in training"] += 1
    run.finish()


@pytest.mark.skipif(not CHAOS, reason="ten minutes or an hour of kills: make chaos")
@pytest.mark.timeout(4 * 3600)
def test_soak(tiny_model: Path, tmp_path: Path) -> None:
    """The whole job or one rank of it; in the end every loss and the state are those of an undisturbed run."""
    rng, every = random.Random(9), 5
    run = TrackedRun(tiny_model, tmp_path / "soak", checkpoint={"every_steps": every, "keep_last": 3})
    end = time.monotonic() + SOAK_SECONDS
    while time.monotonic() < end:
        before, job = run.newest(), run.start()
        time.sleep(rng.uniform(5, 30))
        job.kill(rng.choice([[0], [1], None]))
        outcomes = job.wait(120)
        assert all(o.code not in (0, None) for o in outcomes), outcomes[0].output
        assert not job.is_alive()
        if run.newest():
            run.check(before, may_lose=every)
        SURVIVED["kills 5 to 30 s apart"] += 1
    run.finish(timeout=SOAK_SECONDS)


STEP_TIMEOUT = 10.0  # of a collective, in seconds, where it is waited for
PATIENT = 60.0
BAD, STEP = 1, 3


@pytest.mark.parametrize(
    ("engine", "how", "code"), [("fsdp2", "error", 1), ("fsdp1", "kill", -9), ("fsdp2", "stop", None)]
)
def test_the_others_end_in_time(tiny_model: Path, tmp_path: Path, engine: str, how: str, code: int | None) -> None:
    """Rank 1 meets ``how`` after step 3 of six."""
    seconds = STEP_TIMEOUT if how == "stop" else PATIENT
    run = TrackedRun(tiny_model, tmp_path, strategy={"timeout_seconds": seconds, "engine": engine})
    job = run.start(6, in_step={"rank": BAD, "step": STEP, "how": how})
    if how == "stop":
        (other,) = job.wait(90 + 2 * STEP_TIMEOUT, [1 - BAD])
        assert other.code is not None, "waits for ever for a stopped rank"
        job.kill([BAD], signal.SIGCONT)  # ends as soon as it is let go, by itself
    outcomes = job.wait(90 + 2 * STEP_TIMEOUT)
    assert outcomes[BAD].code is not None, "hangs after it was stopped"
    assert not job.is_alive()
    assert outcomes[BAD].code == code or (how == "stop" and outcomes[BAD].code not in (0, None))
    other = outcomes[1 - BAD]
    assert other.code not in (0, None), other.output
    if how != "stop":
        assert other.seconds - outcomes[BAD].seconds < PATIENT
    if how == "error":
        assert f"this was raised on rank {BAD} (" in outcomes[BAD].output
    assert f"rank {1 - BAD} (" in other.output, other.output
    assert "lost contact: another rank failed, was killed, hangs or is cut off" in other.output
    run.check(0)
    assert run.newest() == STEP
    run.finish()


_ALONE = """
import os, time
from pathlib import Path
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lit_fsdp import fsdp_strategy
class Deaf(BoringModel):
    def training_step(self, batch, batch_idx):
        Path(f"rank{self.global_rank}").write_text(str(os.getpid()))
        time.sleep(300)  # as in NCCL, which tells of no rank that is gone
options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
Trainer(strategy=fsdp_strategy(), devices=2, **options).fit(Deaf(), Deaf().train_dataloader())
"""


def test_ranks_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """In a plain launch nobody else would end them; they leave the exit code of a rank that lost the others."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "LIT_FSDP_EXIT_DIR": str(tmp_path)}
    (tmp_path / "train.py").write_text(_ALONE)
    words = [sys.executable, "-W", "ignore", "train.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as first:
        while not all((tmp_path / f"rank{rank}").is_file() for rank in (0, 1)):
            assert first.poll() is None
            time.sleep(0.1)
        first.kill()
        begin = time.monotonic()
        said = first.communicate(timeout=60)[1]  # which the other one holds open until it ends
    assert time.monotonic() - begin < 15
    assert "[rank 1] error: lost contact: the rank that started this one has ended" in said
    assert (tmp_path / "exit.1").read_text() == "76\n"
