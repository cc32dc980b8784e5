"""Where the time of a step goes, by a stored trace of a GPU whose numbers are chosen, and what is advised then."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from lit_fsdp.metrics.trace import COLUMNS, advice, trace_record

NCCL = Path(__file__).parents[2] / "golden" / "nccl_trace.json"
# ms per step: all, computing, communication, what of it nothing hides, idle
TABLE = {
    "data wait": (140, 50, 0, 0, 90),  # a copy from 90 to 140
    "forward": (860, 650, 400, 200, 10),  # gathers from 150 to 350 and from 400 to 600, products from 350 to 1000
    "backward": (900, 780, 500, 100, 20),  # products from 1020 to 1800, a reduction from 1400 to 1900
    "optimizer": (400, 320, 40, 40, 40),  # an all-reduce from 1920 to 1960, AdamW from 1980 to 2300
}


def test_the_table_of_a_trace_with_nccl():
    """The host runs ahead: its marks end at 1000, and a kernel counts in the phase that launched it."""
    record = trace_record(json.loads(NCCL.read_text()))
    assert record["on"] == "device"
    assert record["phases"] == {phase: dict(zip(COLUMNS, row, strict=True)) for phase, row in TABLE.items()}


def test_a_trace_of_threads():
    """Autograd's node and the wait inside of it are no work; what gloo's thread copies is communication."""
    rows = [
        *[("user_annotation", f"ProfilerStep#{n}", 0, 10, 1) for n in (2, 3)],
        ("user_annotation", "lit_fsdp: backward", 0, 100, 1),
        ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0, 80, 1),
        ("cpu_op", "aten::mm", 10, 30, 1),
        ("cpu_op", "aten::empty", 12, 14, 1),
        ("cpu_op", "c10d::_allgather_base_", 35, 60, 1),
        ("user_annotation", "gloo:all_gather", 20, 55, 2),
        ("cpu_op", "aten::copy_", 40, 50, 2),
        ("cpu_op", "aten::add_", 70, 75, 1),
    ]
    events = [
        {"ph": "X", "cat": cat, "name": name, "ts": start * 1000, "dur": (end - start) * 1000, "tid": thread}
        for cat, name, start, end, thread in rows
    ]
    record = trace_record({"traceEvents": events})
    assert (record["on"], record["steps"]) == ("threads", 2)
    assert tuple(record["phases"]["backward"].values()) == (50, 12.5, 20, 15, 22.5)  # two steps share 100 ms


def test_what_is_advised():
    usual = trace_record(json.loads(NCCL.read_text()))
    assert advice([usual, usual])[0].startswith("no bottleneck found: compute takes 78% of the step")
    cases = [
        ("data wait", "all", 400, "data.num_workers"),
        ("forward", "exposed communication", 400, "data.micro_batch_size"),
        ("backward", "idle", 800, "compile: true"),
    ]
    for phase, column, ms, words in cases:
        other = copy.deepcopy(usual)
        other["phases"][phase][column] = ms
        (said,) = advice([usual, other])
        assert words in said, said
