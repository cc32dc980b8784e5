"""Lightning's counters in a checkpoint: another accumulation, an epoch that had ended, one that was interrupted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lit_fsdp.callbacks.counters import count_in_micro_batches_of


def counters(ready: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": ready, "processed": ready, "completed": completed}


def test_counters_are_those_of_the_step_in_the_new_accumulation() -> None:
    done, in_hook, interrupted = counters(6, 6), counters(6, 5), counters(7, 7)
    for saved, is_last, before, now, expected in (
        (in_hook, False, 2, 4, counters(12, 11)),  # three steps of two, saved in the hook at the end of the batch
        (counters(5, 4), True, 2, 1, counters(3, 2)),  # a short last accumulation counts as a step
        (done, False, 3, 3, done),
        (interrupted, False, 3, 3, done),  # by a validation, which saved
        (counters(5, 4), True, 3, 3, counters(5, 4)),
        (done, False, None, 3, done),
    ):
        batches: dict[str, Any] = {"is_last_batch": is_last, "total": dict(saved), "current": dict(saved)}
        loop = {"epoch_loop.batch_progress": batches, "epoch_progress": {"current": counters(1, 0)}}
        count_in_micro_batches_of(SimpleNamespace(accumulate_grad_batches=now, callbacks=[]), loop, before)  # type: ignore[arg-type]
        assert batches == {"is_last_batch": is_last, "total": expected, "current": expected}


def test_an_ended_epoch_starts_anew() -> None:
    batches: dict[str, Any] = {"is_last_batch": True, "total": counters(5, 5), "current": counters(5, 5)}
    loop = {"epoch_loop.batch_progress": batches, "epoch_progress": {"current": counters(1, 1)}}
    count_in_micro_batches_of(SimpleNamespace(accumulate_grad_batches=5, callbacks=[]), loop, 5)  # type: ignore[arg-type]
    assert batches == {"is_last_batch": False, "total": counters(5, 5), "current": counters(0, 0)}
