"""Tokens/s, MFU and peak memory on one GPU, packed at 4096 tokens, beside TRL's SFTTrainer in the same call.

    python -m tests.gpu.bench_gpu [--groups engines kernels sizes] [--length 4096] [--steps 20]

- ``engines``  the 1B shape: single, fsdp2, fsdp1, with and without recomputation
- ``kernels``  the 1B shape: SDPA, FlexAttention (FlashAttention where it is installed), compile on and off, the
  chunked loss and Liger's
- ``sizes``    1B and 3B full fine-tuning, 8B in low_precision and with LoRA, compile on and off, each followed by TRL
  with packing and no padding, with and without Liger's kernels

Random weights; rows of random tokens of variable length, 70 % of them supervised, the same for both sides; fp32
weights under bf16 (8B: bf16), fused AdamW, gradients clipped to a norm of 1. Every row of the table is a process of
its own. FLOPs are those of ``lit_fsdp/metrics/flops.py`` for both sides, so a ratio of MFUs is one of speeds. It prints
rows for recipes/README.md and writes everything to ``runs/bench/``. ``LIT_FSDP_GPU_DRY_RUN=1`` runs all of it on the
CPU with two tiny blocks. A case that fails is named, and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.record import ROOT, describe, table_row
from tests.gpu.bench_cases import Case, cases, impossible

DRY_RUN = os.environ.get("LIT_FSDP_GPU_DRY_RUN") == "1"
GROUPS = ("engines", "kernels", "sizes")


def main() -> int:
    """Measure every case in a process of its own and print the table; 1 if one failed."""
    options = parse()
    if options.case is not None:
        from tests.gpu.bench_runs import measure

        options.out.write_text(json.dumps(measure(Case(**json.loads(options.case)), options)))
        return 0
    place = ROOT / "runs" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    results, failed = [], []
    for case in cases(options.groups):
        reason = impossible(case, options.dry_run)
        result = None if reason else in_a_process(case)
        if result is not None:
            results.append(result)
        elif reason is None:
            failed.append(case.name)
        said = summary(result) if result else f"left out: {reason}" if reason else "failed, see above"
        print(f"{case.name}: {said}", file=sys.stderr, flush=True)
    if not results:
        return 1
    command = " ".join(["python", "-m", "tests.gpu.bench_gpu", *sys.argv[1:]])
    record = {**describe(command, results[0]["device"]), "results": results, "failed": failed}
    path = place / f"gpu-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nrows for recipes/README.md; everything is in {path.relative_to(ROOT)}\n")
    for result in results:
        print(table_row(f"{result['name']}, {result['shape']}", summary(result), record))
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    """The command line; ``--case`` and ``--out`` are for the processes that this one starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="what to measure")
    parser.add_argument("--length", type=int, default=256 if DRY_RUN else 4096, help="tokens per pack (default 4096)")
    parser.add_argument("--steps", type=int, default=2 if DRY_RUN else 20, help="measured steps (default 20)")
    parser.add_argument("--warmup", type=int, default=2 if DRY_RUN else 5, help="steps before them (default 5)")
    parser.add_argument("--peak_tflops", type=float, help="dense bf16 TFLOP/s of the device, if it is not known here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1 or options.warmup < 1:
        parser.error("--steps and --warmup must be at least 1")
    options.dry_run = DRY_RUN
    return options


def in_a_process(case: Case) -> dict[str, Any] | None:
    """One case, with the options of this process; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        words = [*sys.argv[1:], "--case", json.dumps(dataclasses.asdict(case)), "--out", str(out)]
        command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.bench_gpu", *words]
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
        return json.loads(out.read_text()) if done.returncode == 0 else None


def summary(result: dict[str, Any]) -> str:
    """The result in a cell."""
    mfu = f"{result['mfu']:.1%} MFU of {result['peak_tflops']:g}" if result["mfu"] is not None else "MFU unknown"
    speed = f"{result['tokens_per_second']:,.0f} tokens/s, {result['tflops']:.3g} TFLOP/s ({mfu})"
    return f"{speed}, peak {result['peak_gib']:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
