"""The injections of this folder against others: ``make chaos-peers`` prints one table of survived / tried.

What a peer loses is a result, no failure of this command.
"""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.dist.forks import ForkServer
from tests.faults.peer_subjects import SUBJECTS

LONG = os.environ.get("LIT_FSDP_FAULTS", "short") == "long"
KILLS, FLIPS = (300, 1000) if LONG else (15, 100)
Attempts = list[tuple[int, dict[int, str]]]


def attempts(log: Path) -> Attempts:
    """Where each attempt began, and its losses as written."""
    found: Attempts = []
    for line in log.read_text().splitlines() if log.exists() else []:
        first, second = line.split()
        if first == "start":
            found.append((int(second), {}))
        elif found:
            found[-1][1][int(first)] = second
    return found


def kills(server: ForkServer, subject: str, folder: Path) -> str:
    """After how many kills of the whole job the next attempt went on with at most one step lost and the right loss."""
    rng, survived, longest = random.Random(20), 0, 0.05
    wanted = reference(server, subject, folder)
    run, log = folder / "run", folder / "log"
    job = server.start("peer_train", 2, subject=subject, run=str(run), log=str(log))
    for _ in range(KILLS):
        longest = max(longest, let_it_work(job, log, 2))
        time.sleep(rng.uniform(0, min(longest, 1.0)))
        job.kill()
        job.wait(60)
        before = attempts(log)
        done = max(before[-1][1], default=before[-1][0])
        job = server.start("peer_train", 2, subject=subject, run=str(run), log=str(log))
        begun = wait_for_first_step(job, log, len(before))
        if begun is not None and begun[0] >= done - 1 and begun[1].items() <= wanted.items():
            survived += 1
            continue
        job.kill()  # nothing to go on from, or something wrong: a new run
        job.wait(60)
        shutil.rmtree(run, ignore_errors=True)
        log.unlink(missing_ok=True)
        job = server.start("peer_train", 2, subject=subject, run=str(run), log=str(log))
    job.kill()
    job.wait(60)
    return f"{survived} / {KILLS}"


def reference(server: ForkServer, subject: str, folder: Path) -> dict[int, str]:
    """Losses of a run that nobody interrupts."""
    log = folder / "whole"
    arguments = {"subject": subject, "run": str(folder / "whole-run"), "log": str(log)}
    server.run("peer_train", 2, timeout=300, steps=20 * KILLS, save=False, **arguments)
    ((_, losses),) = attempts(log)
    return losses


def let_it_work(job: object, log: Path, steps: int) -> float:
    """Until this attempt has taken some steps; the seconds of one."""
    begin, deadline = None, time.monotonic() + 120
    while time.monotonic() < deadline:
        taken = len(attempts(log)[-1][1]) if attempts(log) else 0
        if taken and begin is None:
            begin = time.monotonic()
        if taken > steps and begin is not None:
            return (time.monotonic() - begin) / steps
        time.sleep(0.005)
    raise AssertionError(f"no steps: {job.output(0)}")  # type: ignore[attr-defined]


def wait_for_first_step(job: object, log: Path, number: int) -> tuple[int, dict[int, str]] | None:
    """Attempt ``number`` once it has taken a step; None if it ended before."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = attempts(log)
        if len(found) > number and found[number][1]:
            return found[number]
        if any(outcome.code is not None for outcome in job.wait(0.05)):  # type: ignore[attr-defined]
            return None
    return None


def full_disk(server: ForkServer, subject: str, folder: Path) -> str:
    """Error, the newest that is found is whole, nothing left behind."""
    folder.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={16 << 20}", "lit_fsdp_peers", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        return "NOT CHECKED (no right to mount)"
    try:
        entries = server.run("peer_full_disk", 2, timeout=300, subject=subject, disk=str(folder))[0]
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    whole = sum(entry["error"] and entry["whole"] for entry in entries)
    clean = sum(entry["error"] and entry["whole"] and not entry["left"] for entry in entries)
    return f"{whole} / {len(entries)}, {clean} without leftovers"


def flips(server: ForkServer, subject: str, folder: Path) -> str:
    """One flipped bit: noticed when it is loaded."""
    noticed = server.run("peer_damage", 2, timeout=600, subject=subject, run=str(folder), trials=FLIPS)[0]
    return f"{sum(noticed)} / {len(noticed)}"


ROWS: dict[str, Callable[[ForkServer, str, Path], str]] = {
    "one flipped bit: noticed by the load": flips,
    "full disk at 0, 5 … 95 % of a save: an error, and the newest found is whole": full_disk,
    "kill -9 of the whole job, saving every step: goes on, at most one step lost, same losses": kills,
}


def main() -> None:
    """Print the table."""
    packages = ("torch", "lightning")
    print("2 gloo ranks on this CPU,", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))
    print("| survived / tried |", " | ".join(SUBJECTS), "|")
    print("|---" * (len(SUBJECTS) + 1) + "|", flush=True)
    server = ForkServer("tests.faults.peer_jobs")
    with tempfile.TemporaryDirectory(prefix="lit_fsdp_peers_") as scratch:
        for number, (row, measure) in enumerate(ROWS.items()):
            cells = []
            for subject in SUBJECTS:
                place = Path(scratch) / f"{number}-{SUBJECTS.index(subject)}"
                place.mkdir()
                try:
                    cells.append(measure(server, subject, place))
                except Exception as error:
                    cells.append(f"did not run: {str(error).strip().splitlines()[-1][:160]}")
            print(f"| {row} |", " | ".join(cells), "|", flush=True)
    server.close()


if __name__ == "__main__":
    main()
