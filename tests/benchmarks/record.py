"""What all benchmarks share: processes and sides in turns, medians of ratios, and what a number travels with."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "lightning", "transformers")
_LIMIT_SECONDS = 1800
T = TypeVar("T")


@contextlib.contextmanager
def bench(name: str, *packages: str, device: str | None = None) -> Iterator[tuple[dict[str, Any], Path]]:
    """A record whose ``results`` are to be filled, and an empty folder to work in.

    At the end the record lies in ``runs/bench/`` and its results are printed as rows for recipes/README.md. The
    versions of these packages count, too; the device is this machine's CPU, unless it has a name.
    """
    place = ROOT / "runs" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    record = {**_circumstances(device, packages), "results": []}
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=place) as folder:
        yield record, Path(folder)
    path = place / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"rows for recipes/README.md; everything is in {path.relative_to(ROOT)}\n")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    travels = (record["device"], versions, record["commit"], f"`{record['command']}`", record["date"][:10])
    for result in record["results"]:
        print(f"| {' | '.join((result['what'], result['summary'], *travels))} |")
        if result.get("aim"):
            ratios = result["ratios"]
            print(f"  aim {result['aim']}; lowest to highest {min(ratios):.3f} to {max(ratios):.3f}")


def in_turns(sides: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each side gives in each round, every other one of which goes backwards."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            found[name].append(sides[name]())
    return found


def compared(what: str, first: Sequence[float], second: Sequence[float], unit: str, aim: str = "") -> dict[str, Any]:
    """The median of first ÷ second over the rounds, with both medians."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    sides = " ÷ ".join(f"{statistics.median(side):.4g} {unit}" for side in (first, second))
    summary = f"{statistics.median(ratios):.3f} ({sides})"
    return {"what": what, "first": first, "second": second, "ratios": ratios, "summary": summary, "aim": aim}


def python(words: Sequence[Any], ranks: int = 1, places: Sequence[dict[str, Any]] = ({},), **env: str) -> float:
    """Run ``python WORDS`` once in each of these places, which are environments, and return the time of their launch.

    As many ranks share the cores, whoever starts them.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    shared = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    shared |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **env}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    launched = time.time()
    command = [sys.executable, *map(str, words)]
    own = [{name: str(value) for name, value in place.items()} for place in places]
    processes = [subprocess.Popen(command, env=shared | one, start_new_session=True, **pipes) for one in own]
    try:
        said = [process.communicate(timeout=_LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks it has started
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{words[0]} failed:\n" + "\n".join(text[-4000:] for text in said))
    return launched


def _circumstances(device: str | None, packages: Sequence[str]) -> dict[str, Any]:
    """Everything a row of the measured table needs beside its number."""
    cpu = subprocess.run("lscpu", capture_output=True, text=True, check=True).stdout.partition("Model name:")[2]
    command = ["git", "describe", "--always", "--dirty=+changes", "--abbrev=7", "--exclude=*"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    versions = {package: importlib.metadata.version(package) for package in (*_PACKAGES, *packages)}
    return {
        "device": device or f"{os.cpu_count()} cores of {cpu.splitlines()[0].strip()}",
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit or "unknown",
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "load_average_before": list(os.getloadavg()),
    }
