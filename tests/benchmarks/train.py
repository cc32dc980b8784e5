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
import datetime
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import ROOT, command_line, describe, table_row
from rich.console import Console
from rich.table import Table
from sides import fit_recipe, peer_trainer
from train_work import TrainWork

WARMUP_STEPS = 2
SIDES = ("ours-packed", "trl-packed", "trl-packed-1", "ours-padded", "trl-padded", "trainer-padded")
TRL = ("trl-packed", "trl-packed-1", "trl-padded")
GIB = 2**30


def main() -> int:
    """Measure, print a table and rows for recipes/README.md, and write everything as JSON."""
    options = parse()
    place = ROOT / "runs" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    record = describe("make bench-train" if len(sys.argv) == 1 else command_line(), packages=("trl", "accelerate"))
    folder = Path(tempfile.mkdtemp(prefix="train-", dir=place))
    try:
        work = TrainWork(
            folder=folder / "work",
            num_rows=options.rows,
            rows_per_step=options.rows_per_step,
            micro_rows=options.micro_rows,
            micro_packs=options.micro_packs,
        )
        record["work"] = work.make()
        runs = interleave(work.folder, options.sides, options.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    record["runs"] = runs
    record["results"] = {side: summarize([run[side] for run in runs]) for side in options.sides}
    record["ratios"] = ratios(runs, record["work"]["padded_fill"])
    path = place / f"train-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    show(record)
    print(f"\nrows for recipes/README.md; everything is in {path.relative_to(ROOT)}\n")
    for side, result in record["results"].items():
        cell = f"{result['tokens_per_second']:.0f} supervised tokens/s, peak {result['peak_gib']:.2f} GiB"
        print(table_row(f"SFT of SmolLM2-135M on {record['work']['source']}, {side}", cell, record))
    for ratio in record["ratios"]:
        print(table_row(ratio["what"], f"{ratio['median']:.2f}", record))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
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


def interleave(folder: Path, sides: list[str], repeats: int) -> list[dict[str, Any]]:
    """Rounds over all sides, every other one backwards; all must have learnt equally many tokens."""
    runs = []
    for repeat in range(repeats):
        run: dict[str, Any] = {}
        for side in sides if repeat % 2 == 0 else sides[::-1]:
            run[side] = one_side(folder, side)
            figures = summarize([run[side]])
            print(f"round {repeat + 1}, {side}: {figures['tokens_per_second']:.1f}/s", file=sys.stderr, flush=True)
        learnt = {side: sum(found["supervised"]) for side, found in run.items()}
        if len(set(learnt.values())) != 1:
            raise RuntimeError(f"sides learnt from different numbers of tokens: {learnt}")
        runs.append(run)
    return runs


def one_side(folder: Path, side: str) -> dict[str, Any]:
    """Times, losses, supervised tokens and places per optimizer step, and the peak, of one epoch."""
    if side.startswith("ours-"):
        return fit_recipe(folder / f"recipe-{side.removeprefix('ours-')}.yaml", 1)
    return peer_trainer(folder, side)


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of a side; the loss is weighted by tokens."""
    first = runs[0]
    learnt = sum(first["supervised"])
    return {
        "tokens_per_second": statistics.median(speed(run) for run in runs),
        "cpu_seconds": statistics.median(run["cpu"][-1] - run["cpu"][WARMUP_STEPS - 1] for run in runs),
        "peak_gib": statistics.median(run["peak_bytes"] for run in runs) / GIB,
        "loss": sum(loss * n for loss, n in zip(first["losses"], first["supervised"], strict=True)) / learnt,
        "supervised_tokens": learnt,
        "steps": len(first["times"]),
        "places": sum(first["slots"]),
    }


def speed(run: dict[str, Any]) -> float:
    """Supervised tokens per second after the warm-up."""
    return sum(run["supervised"][WARMUP_STEPS:]) / (run["times"][-1] - run["times"][WARMUP_STEPS - 1])


def ratios(runs: list[dict[str, Any]], padded_fill: float) -> list[dict[str, Any]]:
    """Ours ÷ the peers', round by round, as medians."""
    sides = set(runs[0])
    found = []
    trl = [side for side in TRL if side in sides]
    if "ours-packed" in sides and trl:
        best = [max(trl, key=lambda side, run=run: speed(run[side])) for run in runs]  # type: ignore[misc]
        pairs = [(run["ours-packed"], run[peer]) for run, peer in zip(runs, best, strict=True)]
        found.append(("speed, ours packed ÷ TRL's best", [speed(a) / speed(b) for a, b in pairs], ">= 1.8"))
        small = [a["peak_bytes"] / b["peak_bytes"] for a, b in pairs]
        found.append(("peak memory, ours packed ÷ TRL's fastest", small, "<= 0.65"))
    if {"ours-packed", "trainer-padded"} <= sides:
        fast = [speed(run["ours-packed"]) / speed(run["trainer-padded"]) for run in runs]
        found.append(("speed, ours packed ÷ padded Trainer", fast, f">= {0.9 / padded_fill:.2f}"))
    return [
        {"what": what, "median": statistics.median(values), "values": values, "aim": aim} for what, values, aim in found
    ]


def show(record: dict[str, Any]) -> None:
    """The tables for people."""
    work = record["work"]
    title = (
        f"one epoch over {work['rows']} rows of {work['source']}: {work['tokens']:,} tokens, "
        f"{work['supervised_tokens']:,} supervised; padded batches are {work['padded_fill']:.0%} full"
    )
    table = Table(title=title, title_justify="left")
    for column in (
        "side",
        "supervised tokens/s",
        "CPU seconds",
        "peak GiB",
        "mean loss",
        "supervised tokens",
        "steps",
        "places",
    ):
        table.add_column(column)
    for side, found in record["results"].items():
        cells = [f"{found['tokens_per_second']:.0f}", f"{found['cpu_seconds']:.0f}"]
        cells += [f"{found['peak_gib']:.2f}", f"{found['loss']:.4f}"]
        table.add_row(side, *cells, *(f"{found[name]:,.0f}" for name in ("supervised_tokens", "steps", "places")))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for ratio in record["ratios"]:
        spread = f"{min(ratio['values']):.2f} to {max(ratio['values']):.2f}"
        print(f"{ratio['what']}: {ratio['median']:.2f} ({spread}); aim {ratio['aim']}")


if __name__ == "__main__":
    sys.exit(main())
