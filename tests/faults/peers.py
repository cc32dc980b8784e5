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
from pathlib import Path

from tests.dist.forks import Job, on_ranks, server
from tests.faults.peer_jobs import SUBJECTS
from tests.faults.tracked import attempts

KILLS, FLIPS = (300, 1000) if os.environ.get("LIT_FSDP_FAULTS") == "long" else (15, 100)
Attempts = list[tuple[int, dict[int, str]]]


def wait_for_steps(job: Job, log: Path, number: int, steps: int) -> dict[int, str] | None:
    """The losses of attempt ``number`` once it has taken some steps; None if it ended before."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and all(outcome.code is None for outcome in job.wait(0)):
        found = attempts(log)
        if len(found) > number and len(found[number][1]) >= steps:
            return found[number][1]
        time.sleep(0.005)
    return None


def kills(subject: str, folder: Path) -> str:
    """After how many kills of the whole job the next attempt went on with at most one step lost and the right loss."""
    rng, log, survived, trials = random.Random(20), folder / "log", 0, 0
    job = {"subject": subject, "run": str(folder / "run"), "log": str(log)}
    whole = {"run": str(folder / "whole-run"), "log": str(folder / "whole"), "steps": 20 * KILLS, "saves": False}
    on_ranks("peer_train", 2, **{**job, **whole})
    ((_, wanted),) = attempts(folder / "whole")
    before: Attempts = []
    while trials < KILLS:
        live = server().start("peer_train", 2, **job)
        losses = wait_for_steps(live, log, len(before), 1)
        assert before or losses is not None, live.output(0)
        if before:
            trials += 1
            done = max(before[-1][1], default=before[-1][0])
            is_right = losses is not None and losses.items() <= wanted.items()
            if is_right and attempts(log)[len(before)][0] >= done - 1:
                survived += 1
            else:  # nothing to go on from, or something wrong: a new run
                live.kill()
                live.wait(60)
                shutil.rmtree(folder / "run", ignore_errors=True)
                log.unlink(missing_ok=True)
                before = []
                continue
        begin = time.monotonic()
        wait_for_steps(live, log, len(before), 3)
        time.sleep(rng.uniform(0, min((time.monotonic() - begin) / 2, 1.0)))
        live.kill()
        live.wait(60)
        before = attempts(log)
    return f"{survived} / {KILLS}"


def full_disk(subject: str, folder: Path) -> str:
    """Error, the newest that is found is whole, nothing left behind."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={16 << 20}", "lit_fsdp_peers", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        return "NOT CHECKED (no right to mount)"
    try:
        entries = on_ranks("peer_full_disk", 2, subject=subject, run=str(folder))[0]
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    whole = [entry for entry in entries if entry["error"] and entry["whole"]]
    return f"{len(whole)} / {len(entries)}, {sum(not entry['left'] for entry in whole)} without leftovers"


def flips(subject: str, folder: Path) -> str:
    """One flipped bit: noticed when it is loaded."""
    noticed = on_ranks("peer_damage", 2, timeout=600, subject=subject, run=str(folder), trials=FLIPS)[0]
    return f"{sum(noticed)} / {len(noticed)}"


ROWS = {
    "one flipped bit: noticed by the load": flips,
    "full disk at 0, 5 … 95 % of a save: an error, and the newest found is whole": full_disk,
    "kill -9 of the whole job, saving every step: resumes, at most one step lost, same losses": kills,
}


def main() -> None:
    """Print the table."""
    packages = ("torch", "lightning")
    print("2 gloo ranks on this CPU,", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages))
    print("| survived / tried |", " | ".join(SUBJECTS), "|")
    print("|---" * (len(SUBJECTS) + 1) + "|", flush=True)
    for row, measure in ROWS.items():
        cells = []
        for subject in SUBJECTS:
            with tempfile.TemporaryDirectory(prefix="lit_fsdp_peers_") as folder:
                try:
                    cells.append(measure(subject, Path(folder)))
                except Exception as error:
                    cells.append(f"did not run: {str(error).strip().splitlines()[-1][:160]}")
                server().end_jobs()
        print(f"| {row} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
