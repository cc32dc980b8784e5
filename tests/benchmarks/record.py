"""What a measured number travels with: device, versions, commit, command, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "lightning", "transformers")


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
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty=+changes", "--abbrev=7", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
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
