"""``make bench``: lit_fsdp beside what one would write by hand, interleaved, as medians of ratios.

    python tests/benchmarks/run.py [--only one packed two start] [--repeats 5] [--engine fsdp2] …

The measures (aims are no tests; a shared machine decides nothing):

- ``one``       tokens/s of ``lit-fsdp fit`` on one process ÷ a plain PyTorch loop; aim >= 0.98
- ``packed``    the same with packed samples ÷ a loop that packs too and has torch's chunked head; aim >= 0.98
- ``two``       tokens/s of ``lit-fsdp fit`` on two processes ÷ a ``fully_shard`` loop; aim >= 0.97
- ``start``     seconds from launch to the end of the first step on two processes, tokenized rows in the cache,
                ÷ a minimal Lightning script; aim <= 1.05

Both sides load the same weights and see the same rows in the same order with the same number of threads; their losses
are printed beside the speeds. The model has the shape of SmolLM2-135M with random weights. Precision is ``auto``: bf16
compute where the CPU has instructions for it, else fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import bench, compared, in_turns
from sides import fit, hand_written, lightning_script
from workload import Workload

WARMUP_STEPS = 2
MEASURES = ("one", "packed", "two", "start")
Side = Callable[[Workload, int], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES, help="measures to take (default all)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs per measure (default 5)")
    parser.add_argument(
        "--steps", type=int, default=7, help=f"steps per run, {WARMUP_STEPS} of them warm-up (default 7)"
    )
    parser.add_argument("--layers", type=int, default=30, help="blocks of the model (default 30)")
    parser.add_argument("--engine", default="fsdp2", help="ours (default fsdp2)")
    options = parser.parse_args()
    if options.steps <= WARMUP_STEPS or options.repeats < 1:
        parser.error(f"--steps must be more than {WARMUP_STEPS}, --repeats at least 1")
    with bench("run") as (record, folder):
        shape = {"num_hidden_layers": options.layers}
        size = {"global_batch_size": 4, "steps": options.steps, "engine": options.engine}
        for name, what, ranks in (
            ("one", "one process ÷ plain PyTorch loop", 1),
            ("two", "two processes ÷ `fully_shard` loop", 2),
            ("packed", "packed, one process ÷ loop with torch's chunked head", 1),
        ):
            if name in options.only:
                packed = name == "packed"
                length = 512 if packed else 128
                work = Workload(folder=folder / name, overrides=shape, length=length, packing=packed, **size)
                record["results"].append(compare_speed(f"tokens/s of `lit-fsdp fit`, {what}", work, ranks, options))
        if "start" in options.only:
            record["results"].append(compare_start(folder / "start", options.repeats))


def pairs(work: Workload, ranks: int, peer: Side, repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs of ours and of the peer."""
    found = in_turns({"ours": lambda: fit(work, ranks), "by hand": lambda: peer(work, ranks)}, repeats)
    for side, runs in found.items():
        print(f"losses, {side}: {'  '.join(f'{loss:.4f}' for loss in runs[0]['losses'])}")
    return found["ours"], found["by hand"]


def compare_speed(what: str, work: Workload, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second over the steps after the warm-up, ours ÷ the peer's."""
    work.make(ranks)
    runs = pairs(work, ranks, hand_written, options.repeats)
    tokens = work.length * work.global_batch_size * (work.steps - WARMUP_STEPS)
    rates = [[tokens / (run["times"][-1] - run["times"][WARMUP_STEPS - 1]) for run in side] for side in runs]
    return compared(what, *rates, unit="tokens/s", aim=">= 0.97" if ranks > 1 else ">= 0.98")


def compare_start(folder: Path, repeats: int) -> dict[str, Any]:
    """Seconds from launch to the end of the first step, ours ÷ the peer's; a run of each is thrown away before."""
    tiny = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    work = Workload(folder=folder, overrides={**tiny, **heads}, length=64, global_batch_size=4, steps=1)
    work.make(2)
    runs = pairs(work, 2, lightning_script, repeats + 1)
    seconds = [[run["times"][0] - run["launched"] for run in side[1:]] for side in runs]
    what = "launch to first step of `lit-fsdp fit` on two processes ÷ minimal Lightning script"
    return compared(what, *seconds, unit="s", aim="<= 1.05")


if __name__ == "__main__":
    main()
