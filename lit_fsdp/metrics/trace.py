"""Time breakdown of an optimizer step from a Chrome trace of :mod:`torch.profiler`, on a GPU or a CPU.

A trace with kernels is analyzed by streams: copies count as compute, NCCL kernels as communication. Other traces are
analyzed by threads: library operators (``aten::mm``) count as compute, unlike autograd's, which only call others; work
of c10d and gloo threads counts as communication. It includes the time in which a rank waits for a slower rank.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

PREFIX = "lit_fsdp: "
"""Prefix of the names of marks, followed by the phase; phases follow one another without gaps."""
WARMUP_STEPS = 2
"""Optimizer steps before those in a trace: the first allocates, the second is traced and discarded."""
PHASES = ("data wait", "forward", "backward", "optimizer")
COLUMNS = ("all", "compute", "communication", "exposed communication", "idle")
_DEVICE, _LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
_COMMUNICATION = re.compile("nccl|gloo:|c10d", re.IGNORECASE)
_LIBRARY = re.compile("(?!autograd::|torch::autograd::).*::")
_Intervals = list[tuple[float, float]]


def trace_record(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize a trace as JSON data: ms per optimizer step of :data:`COLUMNS` for each of :data:`PHASES`.

    Communication is exposed while nothing is computed, and a rank is idle while it does neither: the column ``all`` is
    ``compute`` + ``exposed communication`` + ``idle``. On a device a phase ends when all work launched before the end
    of its mark is done, so that the phases add up to the step there too. The ``trace`` is the output of
    ``export_chrome_trace`` with marks of :class:`lit_fsdp.callbacks.profile.ProfileWindow` and ``profile.step()``.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = len({event["name"] for event in events if event["name"].startswith("ProfilerStep#")})
    marks = [event for event in events if event["name"].startswith(PREFIX) and event["cat"] == "user_annotation"]
    marks.sort(key=lambda event: event["ts"])
    borders = [*(mark["ts"] for mark in marks), marks[-1]["ts"] + marks[-1]["dur"]]
    on_device = any(event.get("cat") == "kernel" for event in events)
    compute, communication = _work(events, on_device)
    if on_device:
        borders = _done_at(borders, events)
    lengths = np.diff(borders)
    computing, communicating, busy = (_covered(of, borders) for of in (compute, communication, compute + communication))
    rows = np.stack([lengths, computing, communicating, busy - computing, lengths - busy], axis=1) / 1000 / steps
    phases = {phase: dict.fromkeys(COLUMNS, 0.0) for phase in PHASES}
    for mark, row in zip(marks, rows.tolist(), strict=True):
        phase = phases[mark["name"].removeprefix(PREFIX)]
        for column, ms in zip(COLUMNS, row, strict=True):
            phase[column] += ms
    return {"steps": steps, "on": "device" if on_device else "threads", "phases": phases}


def _work(events: Iterable[Mapping[str, Any]], on_device: bool) -> tuple[_Intervals, _Intervals]:
    """Intervals of compute and of communication."""
    found: tuple[_Intervals, _Intervals] = ([], [])
    until: dict[Any, float] = defaultdict(float)  # by thread, the end of its communication, to skip nested events
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        kind, communicates = event.get("cat"), bool(_COMMUNICATION.search(event["name"]))
        is_work = kind in _DEVICE
        if not on_device:
            is_work = kind == "cpu_op" and (communicates or bool(_LIBRARY.match(event["name"])))
            is_work = is_work or (communicates and kind == "user_annotation")
        if is_work and event["ts"] >= until[event["tid"]]:
            end = event["ts"] + event["dur"]
            found[communicates].append((event["ts"], end))
            if communicates:
                until[event["tid"]] = end
    return found


def _done_at(borders: Sequence[float], events: Sequence[Mapping[str, Any]]) -> list[float]:
    """When the device finishes the work launched before each of ``borders``, which are host times."""
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    work = [event for event in events if event.get("cat") in _DEVICE]
    ends = [(launched.get(one["args"].get("correlation"), one["ts"]), one["ts"] + one["dur"]) for one in work]
    return [max(border, *(end for start, end in ends if start < border), 0.0) for border in borders]


def _covered(intervals: _Intervals, borders: Sequence[float]) -> Any:
    """Length of the union of the intervals between each two neighboring borders."""
    starts, ends = np.array(sorted(intervals)).reshape(-1, 2).T
    ends = np.maximum.accumulate(ends)
    starts = np.maximum(starts, np.append(-np.inf, ends)[: len(ends)])
    return np.diff([np.clip(border - starts, 0, ends - starts).sum() for border in borders])


def advice(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Suggest what to try next: one sentence per large share of the step, by the largest value of any rank."""
    totals = [{c: sum(row[c] for row in record["phases"].values()) for c in COLUMNS} for record in records]

    def share(column: str, *phases: str) -> float:
        pairs = zip(records, totals, strict=True)
        return max(sum(record["phases"][phase][column] for phase in phases) / total["all"] for record, total in pairs)

    larger = "try a larger data.micro_batch_size"
    cases = [
        (share("all", "data wait"), 0.1, "is spent waiting for data: set data.num_workers: 2 to read ahead"),
        (share("exposed communication", *PHASES), 0.15, f"is exposed communication: {larger}, or shard_grad_op"),
        (share("idle", "forward", "backward"), 0.25, f"is idle between operators: {larger}, or compile: true"),
    ]
    least = min(total["compute"] / total["all"] for total in totals)
    nothing = f"no bottleneck found: compute takes {least:.0%} of the step; lit-fsdp bench compares choices"
    return [f"{part:.0%} of the step {text}" for part, large, text in cases if part >= large] or [nothing]
