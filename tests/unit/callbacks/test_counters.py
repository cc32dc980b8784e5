"""Lightning's counters in a checkpoint: another accumulation, and an epoch that had ended."""

from __future__ import annotations

from lit_fsdp.callbacks.counters import begin_window_again, close_epoch, rescale_progress


def counters(ready: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "started": ready, "processed": ready, "completed": completed}


def test_counters_of_three_steps_for_another_accumulation():
    progress = {"total": counters(6, 5), "current": counters(6, 5)}  # three steps of two, saved in the batch-end hook
    rescale_progress(progress, before=2, now=4)
    assert progress == {"total": counters(12, 11), "current": counters(12, 11)}


def test_a_short_last_accumulation_counts_as_a_step():
    progress = {"total": counters(5, 4), "current": counters(5, 4)}
    rescale_progress(progress, before=2, now=1)
    assert progress["current"] == counters(3, 2)


def test_an_ended_epoch_starts_anew_and_an_open_one_stays():
    batches = {"is_last_batch": True, "total": counters(5, 5), "current": counters(5, 5)}
    close_epoch({"current": counters(1, 1), "total": counters(1, 1)}, batches)
    assert batches == {"is_last_batch": False, "total": counters(5, 5), "current": counters(0, 0)}
    saved_in_the_hook = {"is_last_batch": True, "total": counters(5, 4), "current": counters(5, 4)}
    close_epoch({"current": counters(1, 0), "total": counters(1, 0)}, saved_in_the_hook)
    assert saved_in_the_hook["current"] == counters(5, 4)


def test_an_interrupted_accumulation_is_begun_again():
    batches = {"is_last_batch": False, "total": counters(11, 11), "current": counters(4, 4)}  # a validation saved it
    begin_window_again(batches, accumulate=3)
    assert batches == {"is_last_batch": False, "total": counters(10, 10), "current": counters(3, 3)}
    for whole in (counters(6, 5), counters(6, 6)):  # at a step
        batches = {"is_last_batch": False, "total": dict(whole), "current": dict(whole)}
        begin_window_again(batches, accumulate=3)
        assert batches["current"] == whole
    short = {"is_last_batch": True, "total": counters(5, 4), "current": counters(5, 4)}
    begin_window_again(short, accumulate=3)
    assert short["current"] == counters(5, 4)
