"""What all benchmarks share: sides in turns, medians of ratios, and what a number travels with."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "lightning", "transformers")
T = TypeVar("T")


@contextlib.contextmanager
def bench(
    name: str, packages: tuple[str, ...] = (), where: Path | None = None
) -> Iterator[tuple[dict[str, Any], Path]]:
    """A record whose ``results`` are to be filled, and an empty folder to work in, in ``runs/bench`` or ``where``.

    At the end the record lies in ``runs/bench/`` and its results are printed as rows for recipes/README.md.
    """
    place = ROOT / "runs" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    record = {**describe(command_line(), packages=packages), "results": []}
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=where or place) as folder:
        yield record, Path(folder)
    path = place / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"rows for recipes/README.md; everything is in {path.relative_to(ROOT)}\n")
    for result in record["results"]:
        print(table_row(result["what"], result["summary"], record))
        if result.get("aim"):
            print(
                f"  aim {result['aim']}; lowest to highest {min(result['ratios']):.3f} to {max(result['ratios']):.3f}"
            )


def in_turns(sides: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each side gives in each round, every other one of which goes backwards."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            found[name].append(sides[name]())
    return found


def compared(
    what: str, first: Sequence[float], second: Sequence[float], unit: str = "", aim: str = ""
) -> dict[str, Any]:
    """The median of first ÷ second over the rounds, with both medians."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    sides = " ÷ ".join(f"{statistics.median(side):.4g} {unit}".strip() for side in (first, second))
    summary = f"{statistics.median(ratios):.3f} ({sides})" if unit else f"{statistics.median(ratios):.2f}"
    return {"what": what, "first": first, "second": second, "ratios": ratios, "summary": summary, "aim": aim}


def together(commands: list[list[str]], environments: list[dict[str, str]], limit_seconds: float) -> None:
    """Run processes at once, each in its environment.

    Raises:
        RuntimeError: What they said, if one of them fails.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    processes = [
        subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        said = [process.communicate(timeout=limit_seconds)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks it has started
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{commands[0][1]} failed:\n" + "\n".join(text[-4000:] for text in said))


def describe(command: str, device: str | None = None, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Everything a row of the measured table needs beside its number.

    Args:
        command: What was typed.
        device: Its name; default: this machine's CPU.
        packages: Whose versions count beside those of torch, lightning and transformers.
    """
    return {
        "device": device or f"{os.cpu_count()} cores of {cpu_name()}",
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in (*_PACKAGES, *packages)},
        },
        "commit": commit(),
        "command": command,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "load_average_before": list(os.getloadavg()),
    }


def table_row(what: str, result: str, record: dict[str, Any]) -> str:
    """A line of the table "Measured" in recipes/README.md."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    cells = (what, result, record["device"], versions, record["commit"], f"`{record['command']}`", record["date"][:10])
    return f"| {' | '.join(cells)} |"


def commit() -> str:
    """The short hash of the checkout, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+changes", "--abbrev=7", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def cpu_name() -> str:
    """The processor's own name for itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def command_line() -> str:
    """This process's command, as one would type it in the checkout."""
    words = [sys.argv[0], *sys.argv[1:]]
    if Path(words[0]).is_absolute() and Path(words[0]).is_relative_to(ROOT):
        words[0] = str(Path(words[0]).relative_to(ROOT))
    return " ".join(["python", *words])
