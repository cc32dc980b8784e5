"""One rank with a batch that is not finite, one that raises, is killed or stopped in the middle of a step."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import Outcome
from tests.faults.tracked import TrackedRun

TIMEOUT = 10.0  # of a collective, in seconds, where it is waited for
PATIENT = 60.0
BAD, STEP = 1, 3


def run_with(tiny_model: Path, folder: Path, how: str, **strategy: Any) -> tuple[TrackedRun, list[Outcome]]:
    """What becomes of a run of six steps when rank 1 meets ``how`` after step 3."""
    seconds = TIMEOUT if how == "stop" else PATIENT
    run = TrackedRun(tiny_model, folder, strategy={"timeout_seconds": seconds, **strategy})
    job = run.start(6, in_step={"rank": BAD, "step": STEP, "how": how})
    if how == "stop":
        (other,) = job.wait(90 + 2 * TIMEOUT, [1 - BAD])
        assert other.code is not None, "waits for ever for a stopped rank"
        job.kill([BAD], signal.SIGCONT)  # ends as soon as it is let go, by itself
    outcomes = job.wait(90 + 2 * TIMEOUT)
    assert outcomes[BAD].code is not None, "hangs after it was stopped"
    assert not job.is_alive()
    return run, outcomes


def test_not_finite_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    run, outcomes = run_with(tiny_model, tmp_path, "nan", engine="fsdp2", nonfinite_gradients="error")
    for outcome in outcomes:
        assert outcome.code == 1
        assert "the gradients hold inf or nan" in outcome.output
        assert f"rank {BAD}" in outcome.output
    run.check(may_lose=0)
    assert run.newest() == STEP
    run.finish()  # as if nothing had been


def test_not_finite_is_skipped(tiny_model: Path, tmp_path: Path) -> None:
    """On both ranks alike: parameters and optimizer stay as they were, later steps are taken."""
    run, outcomes = run_with(tiny_model, tmp_path, "nan", engine="fsdp1", nonfinite_gradients="skip")
    assert [o.code for o in outcomes] == [0, 0], outcomes[0].output
    assert "step skipped" in outcomes[0].output
    assert f"rank {BAD}" in outcomes[0].output
    run.check(may_lose=0)
    ((_, losses),) = run.attempts()
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert float(losses[6]) < float(losses[1])


@pytest.mark.parametrize(
    ("engine", "how", "code"), [("fsdp2", "error", 1), ("fsdp1", "kill", -9), ("fsdp2", "stop", None)]
)
def test_the_others_end_in_time(tiny_model: Path, tmp_path: Path, engine: str, how: str, code: int | None) -> None:
    run, outcomes = run_with(tiny_model, tmp_path, how, engine=engine)
    assert outcomes[BAD].code == code or (how == "stop" and outcomes[BAD].code not in (0, None))
    other = outcomes[1 - BAD]
    assert other.code not in (0, None), other.output
    if how != "stop":
        assert other.seconds - outcomes[BAD].seconds < PATIENT
    if how == "error":
        assert f"this was raised on rank {BAD} (" in outcomes[BAD].output
    assert f"rank {1 - BAD} (" in other.output, other.output
    assert "lost contact: another rank failed, was killed, hangs or is cut off" in other.output
    run.check()
    assert run.newest() == STEP
    run.finish()
