"""The life of a preempted job, from a run that is told to stop; python docs/pictures/preempted.py (one minute).

A miniature trains in two processes, gets SIGUSR1 as a SLURM job does before its time limit, saves, ends with 75 and
resumes; its losses are drawn over those of a run without interruption.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from drawing import BLUE, GREEN, GREY, ORANGE, RED, ROOT, figure, save

STEPS = 120
RECIPE = (
    *("fit", "--config", f"{ROOT}/recipes/quickstart.yaml", "--config", f"{ROOT}/configs/debug/smoke.yaml"),
    *("--trainer.max_steps", str(STEPS), "--trainer.limit_val_batches", "0", "--trainer.num_sanity_val_steps", "0"),
    *("--model.optim.lr", "1e-2", "--checkpoint.every_steps", "50"),
)


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start or resume."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lit_fsdp", *RECIPE, "--trainer.default_root_dir", str(folder), *words]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def losses(folder: Path) -> dict[int, float]:
    """Of every step so far."""
    if not (folder / "metrics.csv").is_file():
        return {}
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(file) if row.get("train_loss")}


def main() -> None:
    """Run both, watch one, draw."""
    with tempfile.TemporaryDirectory() as temporary:
        whole, stopped = Path(temporary, "whole"), Path(temporary, "stopped")
        assert start(whole).wait() == 0
        begin, seen, marks = time.time(), [(0.0, 0)], {}
        process = start(stopped)
        while (code := process.poll()) is None or code == 75:
            seen.append((time.time() - begin, len(losses(stopped))))
            if "SIGUSR1" not in marks and seen[-1][1] >= STEPS // 2:
                marks["SIGUSR1"] = time.time() - begin
                os.killpg(process.pid, signal.SIGUSR1)
            if code == 75:
                marks["exit code 75"] = time.time() - begin
                process = start(stopped, "--ckpt_path", "last")
            time.sleep(0.05)
        assert code == 0
        assert losses(whole) == losses(stopped), "the losses are not the same bits"
        found = losses(stopped)
        saved = seen[-1][1]
    draw(seen, marks, found, saved)


def draw(seen: list[tuple[float, int]], marks: dict[str, float], found: dict[int, float], steps: int) -> None:
    """Steps over time, and losses over steps."""
    drawn, (left, right) = figure(7.4, 2.9, ncols=2)
    left.plot(*zip(*seen, strict=True), color=BLUE)
    for at, color in zip(marks.values(), (ORANGE, RED), strict=True):
        left.axvline(at, color=color, linestyle="--")
    stop = next(done for at, done in reversed(seen) if at <= marks["exit code 75"])
    left.text(marks["SIGUSR1"] - 0.3, steps * 0.95, "SIGUSR1", color=ORANGE, ha="right")
    left.text(
        marks["exit code 75"] + 1,
        steps * 0.12,
        "saved, ended with 75,\nstarted again with\n--ckpt_path last",
        color=RED,
    )
    left.set(xlabel="seconds", ylabel="optimizer steps done", ylim=(0, steps * 1.05))
    before = [(step + 1, loss) for step, loss in found.items() if step < stop]
    after = [(step + 1, loss) for step, loss in found.items() if step >= stop - 1]
    right.plot(
        [step + 1 for step in found], list(found.values()), color=GREY, linewidth=5, alpha=0.5, label="uninterrupted"
    )
    right.plot(*zip(*before, strict=True), color=BLUE, label="before SIGUSR1")
    right.plot(*zip(*after, strict=True), color=GREEN, label="resumed, bit-equal")
    right.set(xlabel="optimizer step", ylabel="training loss")
    right.legend(fontsize=8)
    save(drawn, "preempted")


if __name__ == "__main__":
    main()
