"""Where the time of an optimizer step goes, from a Chrome trace of :mod:`torch.profiler`, on a GPU or a CPU.

A trace that holds kernels is judged by its device: what its streams do is computing, copies included, and what NCCL's
kernels do is communication. Else it is judged by its threads: an operator of a library (``aten::mm``) is computing, and
so is one that calls no other, while autograd's own only call others; what c10d and gloo's threads do is communication.
While a collective runs, a rank may only be waiting for a slower one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

PREFIX = "lit_fsdp: "
"""How the name of a mark begins that says which phase it is; the phases follow one another without gaps."""
WARMUP_STEPS = 2
"""Optimizer steps before those in a trace: the first one allocates, the second one is traced and thrown away."""
PHASES = ("data wait", "forward", "backward", "optimizer")
COLUMNS = ("all", "compute", "communication", "exposed communication", "idle")
_DEVICE, _LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")
_COMMUNICATION = re.compile("nccl|gloo:|c10d", re.IGNORECASE)
_LIBRARY = re.compile("(?!autograd::|torch::autograd::).*::")
_TOP = 8


def trace_record(trace: Mapping[str, Any]) -> dict[str, Any]:
    """What a trace tells, as JSON can hold it; all times are ms per optimizer step.

    Communication is exposed while nothing is computed, and a rank is idle while it does neither: ``all`` is
    ``compute`` + ``exposed communication`` + ``idle``. On a device a phase ends when all that was launched until its
    mark ended is done, so that the phases add up to the step there as well. ``trace`` is as ``export_chrome_trace``
    writes it, with the marks of :class:`lit_fsdp.callbacks.profile.ProfileWindow` and of ``profile.step()``.

    Returns:
        ``steps`` in the window, ``on`` (``device`` or ``threads``), ``phases`` with a row of :data:`COLUMNS` for each
        of :data:`PHASES`, ``operators`` with name, ms and calls of those that take longest by themselves.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = len({event["name"] for event in events if event["name"].startswith("ProfilerStep#")})
    marks = [event for event in events if event["name"].startswith(PREFIX) and event["cat"] == "user_annotation"]
    marks.sort(key=lambda event: event["ts"])
    borders = [*(mark["ts"] for mark in marks), marks[-1]["ts"] + marks[-1]["dur"]]
    on_device = any(event.get("cat") == "kernel" for event in events)
    if on_device:
        compute, communication, operators = _of_device(events)
        borders = _done_at(borders, events)
    else:
        compute, communication, operators = _of_threads(events)
    lengths = np.diff(borders)
    computing, communicating, busy = (_covered(of, borders) for of in (compute, communication, compute + communication))
    rows = np.stack([lengths, computing, communicating, busy - computing, lengths - busy], axis=1) / 1000 / steps
    phases = {phase: dict.fromkeys(COLUMNS, 0.0) for phase in PHASES}
    for mark, row in zip(marks, rows.tolist(), strict=True):
        phase = phases[mark["name"].removeprefix(PREFIX)]
        for column, ms in zip(COLUMNS, row, strict=True):
            phase[column] += ms
    longest = sorted(operators.items(), key=lambda item: -sum(item[1]))[:_TOP]
    return {
        "steps": steps,
        "on": "device" if on_device else "threads",
        "phases": phases,
        "operators": [(name, sum(each) / 1000 / steps, len(each) / steps) for name, each in longest],
    }


_Intervals = list[tuple[float, float]]
_Found = tuple[_Intervals, _Intervals, Mapping[str, list[float]]]
"""Intervals of computing and of communication, and the times that each operator takes by itself, in microseconds."""


def _of_device(events: Iterable[Mapping[str, Any]]) -> _Found:
    compute: _Intervals = []
    communication: _Intervals = []
    operators = defaultdict(list)
    for event in events:
        if event.get("cat") in _DEVICE:
            kind = communication if _COMMUNICATION.search(event["name"]) else compute
            kind.append((event["ts"], event["ts"] + event["dur"]))
            operators[event["name"]].append(event["dur"])
    return compute, communication, operators


def _done_at(borders: Sequence[float], events: Sequence[Mapping[str, Any]]) -> list[float]:
    """When the device has done what was launched until each of ``borders``, a time on the host."""
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    work = [event for event in events if event.get("cat") in _DEVICE]
    ends = [(launched.get(one["args"].get("correlation"), one["ts"]), one["ts"] + one["dur"]) for one in work]
    ends.sort(reverse=True)
    found, latest = [], 0.0
    for border in borders:
        while ends and ends[-1][0] < border:
            latest = max(latest, ends.pop()[1])
        found.append(max(border, latest))
    return found


def _of_threads(events: Iterable[Mapping[str, Any]]) -> _Found:
    compute: _Intervals = []
    communication: _Intervals = []
    operators, threads = defaultdict(list), defaultdict(list)
    for event in events:
        communicates = bool(_COMMUNICATION.search(event["name"]))
        if event.get("cat") == "cpu_op" or (communicates and event.get("cat") == "user_annotation"):
            threads[event["tid"]].append((event["ts"], -event["dur"], event["name"], communicates))
    for calls in threads.values():
        open_calls: list[list[Any]] = []  # end, own time, name, whether it communicates, whether it calls another
        calls.sort()
        for start, minus, name, communicates in [*calls, (float("inf"), 0.0, "", False)]:
            while open_calls and open_calls[-1][0] <= start:
                end, own, one, is_communication, has_inner, begin = open_calls.pop()
                operators[one].append(own)
                inside = any(outer[3] for outer in open_calls)
                if is_communication and not inside:
                    communication.append((begin, end))
                elif not inside and (_LIBRARY.match(one) or not has_inner):
                    compute.append((begin, end))
            if open_calls:
                open_calls[-1][1] += minus
                open_calls[-1][4] = True
            open_calls.append([start - minus, -minus, name, communicates, False, start])
    return compute, communication, operators


def _covered(intervals: _Intervals, borders: Sequence[float]) -> Any:
    """How much of the union of the intervals lies between each two neighboring borders."""
    starts, ends = np.array(sorted(intervals)).reshape(-1, 2).T
    ends = np.maximum.accumulate(ends)
    starts = np.maximum(starts, np.append(-np.inf, ends)[: len(ends)])
    return np.diff([np.clip(border - starts, 0, ends - starts).sum() for border in borders])


def advice(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to try next: one sentence per share of the step that is large, by what is largest on any rank."""
    totals = [{c: sum(row[c] for row in record["phases"].values()) for c in COLUMNS} for record in records]

    def share(column: str, *phases: str) -> float:
        pairs = zip(records, totals, strict=True)
        return max(sum(record["phases"][phase][column] for phase in phases) / total["all"] for record, total in pairs)

    computed = [total["compute"] for total in totals]
    waits, exposed = share("all", "data wait"), share("exposed communication", *PHASES)
    steps, idle = share("all", "optimizer"), share("idle", "forward", "backward")
    found = [
        (waits >= 0.1, f"{waits:.0%} of the step waits for data: data.num_workers: 2 reads ahead in processes"),
        (
            min(computed) < 0.85 * max(computed),
            f"ranks compute {min(computed):.1f} to {max(computed):.1f} ms of a step, and the others' communication is "
            "waiting for the slowest: data.packing: true gives all of them as many tokens",
        ),
        (
            exposed >= 0.15,
            f"{exposed:.0%} of the step is communication that nothing hides: a larger data.micro_batch_size sends the "
            "same for more tokens; sharding: shard_grad_op gathers once per step, hybrid_shard inside a node only",
        ),
        (
            steps >= 0.25,
            f"{steps:.0%} of the step is the optimizer's: a larger data.global_batch_size steps less often",
        ),
        (
            idle >= 0.25,
            f"for {idle:.0%} of the step nothing runs while operators are being called: a larger "
            "data.micro_batch_size, or the strategy's compile: true, makes them fewer and larger",
        ),
    ]
    least = min(total["compute"] / total["all"] for total in totals)
    nothing = f"nothing stands out: computing takes {least:.0%} of the step; lit-fsdp bench compares choices"
    return [text for is_large, text in found if is_large] or [nothing]
