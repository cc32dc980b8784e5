"""``make bench``: lit_fsdp beside what one would write by hand, interleaved, as medians of ratios.

    python tests/benchmarks/run.py [--only one packed two start commands] [--repeats 5] [--steps 7] [--layers 30]

The measures (aims are no tests; a shared machine decides nothing):

- ``one``       tokens/s of ``lit-fsdp fit`` on one process ÷ a plain PyTorch loop; aim >= 0.98
- ``packed``    the same with packed samples ÷ a loop that packs too and has torch's chunked head; aim >= 0.98
- ``two``       tokens/s of ``lit-fsdp fit`` on two processes ÷ a ``fully_shard`` loop; aim >= 0.97
- ``start``     seconds from launch to the end of the first step on two processes, tokenized rows in the cache,
                ÷ a minimal Lightning script; aim <= 1.05
- ``commands``  seconds of ``lit-fsdp --help`` (aim <= 0.5) and of a refused wrong value (aim <= 1)

Both sides load the same weights and see the same rows in the same order with the same number of threads; their losses
are printed beside the speeds. The model has the shape of SmolLM2-135M with random weights. Precision is ``auto``: bf16
compute where the CPU has instructions for it, else fp32.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import ROOT, command_line, describe, table_row
from rich.console import Console
from rich.table import Table
from sides import fit, hand_written, lightning_script, seconds_of
from workload import Workload

WARMUP_STEPS = 2
Side = Callable[[Workload, int], dict[str, Any]]
AIMS = {
    "one": ">= 0.98",
    "packed": ">= 0.98",
    "two": ">= 0.97",
    "start": "<= 1.05",
    "help": "<= 0.5 s",
    "refusal": "<= 1 s",
}


def main() -> int:
    """Measure what is asked for, print a table and rows for recipes/README.md, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    names = ("one", "packed", "two", "start", "commands")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="measures to take (default all)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs per measure (default 5)")
    parser.add_argument(
        "--steps", type=int, default=7, help=f"steps per run, {WARMUP_STEPS} of them warm-up (default 7)"
    )
    parser.add_argument("--layers", type=int, default=30, help="blocks of the model (default 30)")
    options = parser.parse_args()
    if options.steps <= WARMUP_STEPS or options.repeats < 1:
        parser.error(f"--steps must be more than {WARMUP_STEPS}, --repeats at least 1")
    place = ROOT / "runs" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    record = describe("make bench" if len(sys.argv) == 1 else command_line())
    folder = Path(tempfile.mkdtemp(prefix="workload-", dir=place))
    try:
        record["results"] = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    path = place / f"{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    show(record)
    print(f"\nrows for recipes/README.md; everything is in {path.relative_to(ROOT)}\n")
    for result in record["results"]:
        print(table_row(result["what"], result["summary"], record))
    return 0


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Every measure that is asked for, with all single figures."""
    results = []
    shape = {"num_hidden_layers": options.layers}
    speed = {"length": 128, "global_batch_size": 4, "steps": options.steps}
    ranks = tuple(count for name, count in (("one", 1), ("two", 2)) if name in options.only)
    if ranks:
        work = Workload(folder=folder / "speed", overrides=shape, **speed)
        work.make(ranks)
        for count in ranks:
            results.append(compare_speed(work, count, options.repeats))
    if "packed" in options.only:
        size = {"length": 512, "global_batch_size": 4, "steps": options.steps}
        work = Workload(folder=folder / "packed", overrides=shape, packing=True, **size)
        work.make((1,))
        results.append(compare_speed(work, 1, options.repeats))
    if "start" in options.only:
        tiny = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        work = Workload(folder=folder / "start", overrides={**tiny, **heads}, length=64, global_batch_size=4, steps=1)
        work.make((2,))
        results.append(compare_start(work, options.repeats))
    if "commands" in options.only:
        results.extend(time_commands(options.repeats, folder))
    return results


def interleave(work: Workload, ranks: int, peer: Side, repeats: int) -> list[dict[str, Any]]:
    """Pairs of runs, ours and the peer's, each pair in the other order than the one before."""
    pairs = []
    for repeat in range(repeats):
        order = [("ours", fit), ("peer", peer)]
        pair = {name: side(work, ranks) for name, side in (order if repeat % 2 == 0 else order[::-1])}
        pairs.append(pair)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return pairs


def compare_speed(work: Workload, ranks: int, repeats: int) -> dict[str, Any]:
    """Tokens per second over the steps after the warm-up, ours ÷ the peer's."""
    what = {1: "one process ÷ plain PyTorch loop", 2: "two processes ÷ `fully_shard` loop"}[ranks]
    what = "packed, one process ÷ loop with torch's chunked head" if work.packing else what
    print(f"tokens/s of lit-fsdp fit, {what}", file=sys.stderr)
    pairs = interleave(work, ranks, hand_written, repeats)
    tokens = work.length * work.global_batch_size * (work.steps - WARMUP_STEPS)

    def rate(run: dict[str, Any]) -> float:
        return tokens / (run["times"][-1] - run["times"][WARMUP_STEPS - 1])

    def cpu_seconds(run: dict[str, Any]) -> float:
        return run["cpu"][-1] - run["cpu"][WARMUP_STEPS - 1]

    rates = {side: [rate(pair[side]) for pair in pairs] for side in ("ours", "peer")}
    ratios = [ours / peer for ours, peer in zip(rates["ours"], rates["peer"], strict=True)]
    return {
        "name": "packed" if work.packing else {1: "one", 2: "two"}[ranks],
        "what": f"tokens/s of `lit-fsdp fit`, {what}",
        "unit": "tokens/s",
        **rates,
        "ratios": ratios,
        # of rank 0; tells a slower program from a busy machine
        "cpu_seconds": {side: [cpu_seconds(pair[side]) for pair in pairs] for side in ("ours", "peer")},
        "losses": {side: pairs[0][side]["losses"] for side in ("ours", "peer")},
        "model": {"num_params": work.num_params(), "layers": work.overrides["num_hidden_layers"]},
        "summary": f"{_median(ratios, 3)} ({_median(rates['ours'], 0)} ÷ {_median(rates['peer'], 0)})",
    }


def compare_start(work: Workload, repeats: int) -> dict[str, Any]:
    """Seconds from launch to the end of the first step, ours ÷ the peer's; a run of each is thrown away before."""
    print("seconds to the first step, lit-fsdp fit ÷ minimal Lightning script", file=sys.stderr)
    interleave(work, 2, lightning_script, 1)
    pairs = interleave(work, 2, lightning_script, repeats)
    seconds = {side: [pair[side]["times"][0] - pair[side]["launched"] for pair in pairs] for side in ("ours", "peer")}
    ratios = [ours / peer for ours, peer in zip(seconds["ours"], seconds["peer"], strict=True)]
    return {
        "name": "start",
        "what": "launch to first step of `lit-fsdp fit` on two processes ÷ minimal Lightning script",
        "unit": "s",
        **seconds,
        "ratios": ratios,
        "cpu_seconds": {side: [pair[side]["cpu"][0] for pair in pairs] for side in ("ours", "peer")},
        "losses": {side: pairs[0][side]["losses"] for side in ("ours", "peer")},
        "summary": f"{_median(ratios, 3)} ({_median(seconds['ours'], 2)} s ÷ {_median(seconds['peer'], 2)} s)",
    }


def time_commands(repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Seconds of the commands that answer before anything heavy is imported."""
    recipe = folder / "wrong.yaml"
    recipe.write_text(
        "trainer: {devices: 2, max_steps: 1}\nmodel: {name: nowhere}\ndata: {train: rows.jsonl, global_batch_size: 3}\n"
    )
    commands = {
        "help": ("`lit-fsdp --help`", ["--help"], 0),
        "refusal": ("`lit-fsdp fit` with a wrong value, refused", ["fit", "--config", str(recipe)], 2),
    }
    results = []
    for name, (what, words, code) in commands.items():
        seconds = [seconds_of(words, code) for _ in range(repeats + 1)][1:]
        summary = f"{_median(seconds, 2)} s"
        results.append({"name": name, "what": what, "unit": "s", "ours": seconds, "summary": summary})
    return results


def show(record: dict[str, Any]) -> None:
    """The table for people, and the losses that prove equal work."""
    table = Table(title="lit_fsdp beside what one would write by hand; medians", title_justify="left")
    for column in ("measure", "ours", "by hand", "ratio", "lowest to highest ratio", "aim"):
        table.add_column(column)
    for result in record["results"]:
        unit, digits = result["unit"], 0 if result["unit"] == "tokens/s" else 2
        cells = [result["what"], f"{_median(result['ours'], digits)} {unit}"]
        if "peer" in result:
            ratios = result["ratios"]
            cells += [f"{_median(result['peer'], digits)} {unit}", _median(ratios, 3)]
            cells += [f"{min(ratios):.3f} to {max(ratios):.3f}"]
        else:
            cells += ["", "", ""]
        table.add_row(*cells, AIMS[result["name"]])
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    for result in record["results"]:
        for side, losses in result.get("losses", {}).items():
            print(f"losses, {result['name']:<5} {side}: {'  '.join(f'{loss:.4f}' for loss in losses)}")


def _median(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
