"""kill -9 at any moment of a save: of the whole job, of one rank, in the removal of an old checkpoint."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import ForkServer, Outcome
from tests.faults.conftest import Counts
from tests.faults.ledger import Ledger
from tests.faults.tracing import STAGES
from tests.faults.tracked import COLLECTIVE_TIMEOUT, TrackedRun

WHOLE_JOB = "kill -9 of the whole job in a save"
ONE_RANK = "kill -9 of one rank in a save or a removal"
# Random moments seldom hit the short stages, so every stage is also met on purpose.
PLACES = ["preparing", "tensors", "states", "manifest", "rename"]
POINTS = [(0, "tensors"), (1, "tensors"), (0, "states"), (0, "manifest"), (0, "before removal"), (0, "removal")]
KINDS: list[dict[str, Any]] = [
    {"strategy": {"engine": "fsdp2"}},
    {"strategy": {"engine": "fsdp1", "state_dict": "full"}},
    {"strategy": {"engine": "fsdp2"}, "checkpoint": {"every_steps": 1, "keep_last": 2, "async_save": True}},
]


def may_lose(kind: dict[str, Any]) -> int:
    """Steps: in the background a step is still being written while the next one is taken."""
    return 2 if kind.get("checkpoint", {}).get("async_save") else 1


def histogram(stages: Counter[str]) -> str:
    return ", ".join(f"{name} {stages[name]}" for name in STAGES if stages[name])


@pytest.mark.timeout(7200)
def test_the_whole_job_at_random_moments(
    forks: ForkServer, model: Path, tmp_path: Path, counts: Counts, ledger: Ledger
) -> None:
    """It resumes from a verified step, has lost at most one interval, and ends as if nothing had happened."""
    rng = random.Random(20)
    stages: Counter[str] = Counter()
    for number, kind in enumerate(KINDS):
        run = TrackedRun(forks, model, tmp_path / str(number), **kind)
        for trial in range(number, counts.kills_of_jobs, len(KINDS)):
            with ledger.trial(WHOLE_JOB):
                before = run.newest()
                if trial < len(PLACES):
                    harm = {"rank": 0, "stage": PLACES[trial], "how": "kill_all", "step": before + 2}
                    job = run.start(in_save=harm)
                else:
                    job, _ = run.kill_at_random(rng)
                assert [o.code for o in job.wait(90)] == [-9, -9], job.output(0)
                stages[run.stage()] += 1
                run.check(may_lose(kind))
                run.check_resumed_from(before)
        goodput = run.finish()
        ledger.note(WHOLE_JOB, f"goodput {goodput:.2f}")
    ledger.note(WHOLE_JOB, f"killed in: {histogram(stages)}")
    assert stages["tensors"] >= 1
    assert stages["manifest"] + stages["rename"] >= 1


@pytest.mark.timeout(3600)
def test_one_rank(forks: ForkServer, model: Path, tmp_path: Path, counts: Counts, ledger: Ledger) -> None:
    """The other one ends by itself, in time and not with 0; what is on the disk is as after any kill."""
    rng = random.Random(21)
    slowest = 0.0
    for number, kind in enumerate(KINDS):
        run = TrackedRun(forks, model, tmp_path / str(number), **kind)
        for trial in range(number, counts.kills_of_ranks, len(KINDS)):
            rank, stage = POINTS[trial % len(POINTS)]
            nth = 1 if trial < len(POINTS) else rng.randint(1, 4)
            if kind["strategy"].get("state_dict") == "full" and (rank, stage) == (1, "tensors"):
                rank = 0  # which writes everything
            with ledger.trial(ONE_RANK):
                before = run.newest()
                harm = {"rank": rank, "stage": stage, "nth": nth, "how": "kill"}
                job = run.start(in_save={**harm, "step": None if "removal" in stage else before + 2})
                outcomes = job.wait(90 + COLLECTIVE_TIMEOUT)
                check_ends(outcomes, rank)
                assert not job.is_alive()
                slowest = max(slowest, outcomes[1 - rank].seconds - outcomes[rank].seconds)
                run.check(may_lose(kind))
                run.check_resumed_from(before)
        run.finish()
    ledger.note(ONE_RANK, f"the other rank ended after at most {slowest:.1f} s")
    assert slowest < COLLECTIVE_TIMEOUT


def check_ends(outcomes: list[Outcome], killed: int) -> None:
    """One was killed, the other ended with an error."""
    output = "\n".join(o.output for o in outcomes)
    assert outcomes[killed].code == -9, output
    assert outcomes[1 - killed].code not in (0, None), output
