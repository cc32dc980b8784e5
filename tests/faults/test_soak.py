"""Kills every few seconds for a long time, as on a cluster on a very bad day; only in ``make chaos``."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.dist.forks import ForkServer
from tests.faults.conftest import LONG, Counts
from tests.faults.ledger import Ledger
from tests.faults.tracked import TrackedRun

ROW = "soak: a kill every 5 to 30 s"
EVERY = 5


@pytest.mark.skipif(not LONG, reason="ten minutes or an hour: make chaos")
@pytest.mark.timeout(4 * 3600)
def test_soak(forks: ForkServer, model: Path, tmp_path: Path, counts: Counts, ledger: Ledger) -> None:
    """The whole job or one rank of it; in the end every loss and the state are those of an undisturbed run."""
    rng = random.Random(9)
    run = TrackedRun(forks, model, tmp_path / "soak", checkpoint={"every_steps": EVERY, "keep_last": 3})
    end = time.monotonic() + counts.soak_seconds
    while time.monotonic() < end:
        with ledger.trial(ROW):
            before = run.newest()
            job = run.start()
            time.sleep(rng.uniform(5, 30))
            job.kill(rng.choice([[0], [1], None]))
            outcomes = job.wait(120)
            assert all(o.code not in (0, None) for o in outcomes), outcomes[0].output
            assert not job.is_alive()
            if run.newest():
                run.check(may_lose=EVERY)
                run.check_resumed_from(before)
    last = run.newest()
    goodput = run.finish(timeout=counts.soak_seconds)
    ledger.note(ROW, f"{counts.soak_seconds:.0f} s, {last} steps, goodput {goodput:.3f}, loss and state bit-equal")
