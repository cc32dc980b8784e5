"""``make bench-train``: lit_fsdp beside TRL's SFTTrainer and the Transformers Trainer, interleaved.

    python tests/benchmarks/train.py [--sides ours-packed trl-packed] [--repeats 3] [--rows 96]

SmolLM2-135M on definitions of the Jargon File (variable length, at most 512 tokens), one process, fp32 weights, bf16
autocast where the CPU has instructions for it, fused AdamW, no recomputation. Every side trains one epoch over the same
tokens of the same rows, each in processes of its own, in turns. The first two optimizer steps are not counted.

- ``ours-padded``, ``trl-padded``, ``trainer-padded``: batches of rows padded to the longest
- ``ours-packed``: packs of 512 tokens by best-fit decreasing, one per forward pass
- ``trl-packed``, ``trl-packed-1``: TRL's packs, without padding; three and one per forward pass, whichever is faster

Speed is supervised tokens per second, memory the largest resident set after the first step. Losses are means over the
supervised tokens of the epoch: sides differ in the order of the rows, which moves them a little.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from record import bench, compared, in_turns
from sides import fit_recipe, peer_trainer
from train_work import make_work

WARMUP_STEPS = 2
SIDES = ("ours-packed", "trl-packed", "trl-packed-1", "ours-padded", "trl-padded", "trainer-padded")
GIB = 2**30
Runs = dict[str, list[dict[str, Any]]]


def main() -> None:
    options = parse()
    with bench("train", packages=("trl", "accelerate")) as (record, folder):
        sizes = {name: getattr(options, name) for name in ("rows_per_step", "micro_rows", "micro_packs")}
        record["work"] = work = make_work(folder / "work", options.rows, **sizes)
        runs = in_turns(
            {side: lambda side=side: one_side(folder / "work", side) for side in options.sides}, options.repeats
        )
        supervised = {side: sum(found[0]["supervised"]) for side, found in runs.items()}
        if len(set(supervised.values())) != 1:
            raise RuntimeError(f"sides trained on different numbers of tokens: {supervised}")
        what = "SFT of SmolLM2-135M on dict-jargon"
        record["results"] = [
            {"what": f"{what}, {side}", "summary": summary(found), "runs": found} for side, found in runs.items()
        ]
        record["results"] += ratios(runs, work["padded_fill"])
        print(
            f"padded batches are {work['padded_fill']:.0%} full; {supervised[options.sides[0]]:,.0f} supervised tokens"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="what to run (default all)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all sides (default 3)")
    parser.add_argument("--rows", type=int, default=96, help="rows of the epoch (default 96)")
    parser.add_argument("--rows_per_step", type=int, default=8, help="rows per optimizer step (default 8)")
    parser.add_argument("--micro_rows", type=int, default=8, help="rows per forward pass, padded (default 8)")
    parser.add_argument("--micro_packs", type=int, default=3, help="packs per forward pass of trl-packed (default 3)")
    options = parser.parse_args()
    if options.repeats < 1 or options.rows < (WARMUP_STEPS + 2) * options.rows_per_step:
        parser.error(f"--repeats must be at least 1, --rows at least {WARMUP_STEPS + 2} steps of --rows_per_step")
    return options


def one_side(folder: Path, side: str) -> dict[str, Any]:
    """Times, losses, supervised tokens and places per optimizer step, and the peak, of one epoch."""
    if side.startswith("ours-"):
        return fit_recipe(folder / f"recipe-{side.removeprefix('ours-')}.yaml", 1)
    return peer_trainer(folder, side)


def speed(run: dict[str, Any]) -> float:
    """Supervised tokens per second after the warm-up."""
    return sum(run["supervised"][WARMUP_STEPS:]) / (run["times"][-1] - run["times"][WARMUP_STEPS - 1])


def summary(runs: list[dict[str, Any]]) -> str:
    """Medians over the runs of a side, and the mean loss over the supervised tokens of the first."""
    first = runs[0]
    loss = sum(loss * n for loss, n in zip(first["losses"], first["supervised"], strict=True)) / sum(
        first["supervised"]
    )
    peak = statistics.median(run["peak_bytes"] for run in runs) / GIB
    rate = statistics.median(speed(run) for run in runs)
    return f"{rate:.0f} supervised tokens/s, peak {peak:.2f} GiB, mean loss {loss:.3f}"


def ratios(runs: Runs, padded_fill: float) -> list[dict[str, Any]]:
    """Ours ÷ the peers', round by round, as medians."""
    found, ours = [], runs.get("ours-packed", [])
    trl = [runs[side] for side in SIDES if side.startswith("trl-") and side in runs]
    if ours and trl:
        best = [max(same_round, key=speed) for same_round in zip(*trl, strict=True)]
        fast = [[speed(run) for run in side] for side in (ours, best)]
        small = [[run["peak_bytes"] for run in side] for side in (ours, best)]
        found.append(compared("speed, ours packed ÷ TRL's best", *fast, aim=">= 1.5"))
        found.append(compared("peak memory, ours packed ÷ TRL's fastest", *small, aim="<= 0.8"))
    if ours and "trainer-padded" in runs:
        fast = [[speed(run) for run in side] for side in (ours, runs["trainer-padded"])]
        found.append(compared("speed, ours packed ÷ padded Trainer", *fast, aim=f">= {0.9 / padded_fill:.2f}"))
    return found


if __name__ == "__main__":
    main()
