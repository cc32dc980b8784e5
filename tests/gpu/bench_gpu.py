"""Tokens/s, MFU and peak memory on the GPUs at hand, packed at 4096 tokens: rows for the measured table.

    python -m tests.gpu.bench_gpu [--only 1B kernels ...] [--devices 1] [--length 4096] [--steps 25]

Every row is one ``lit-fsdp fit`` with random weights of a shape that ships, on generated rows, in packs: fp32 weights
under bf16, 8B in bf16, fused AdamW, gradients clipped to a norm of 1. Rates are what the run itself logs, the median
over its logged steps. Rows are printed and written to ``runs/bench/``; a case that fails is named, and the others go
on. ``LIT_FSDP_GPU_DRY_RUN=1`` runs all of it on the CPU with miniatures.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.record import ROOT, describe, table_row

DRY_RUN = os.environ.get("LIT_FSDP_GPU_DRY_RUN") == "1"
LORA = {"r": 16, "alpha": 32.0, "target_modules": "all-linear"}
_1B, _8B = "Llama-3.2-1B", "Llama-3.1-8B"
FLEX = {"attn_implementation": "flex_attention"}
# name: model section, arguments of the strategy, packs per forward
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "1B, single": ({"name": _1B}, {"engine": "single"}, 4),
    "1B, fsdp2": ({"name": _1B}, {"engine": "fsdp2"}, 4),
    "1B, fsdp1": ({"name": _1B}, {"engine": "fsdp1"}, 4),
    "1B, fsdp2, full recomputation": ({"name": _1B}, {"activation_checkpointing": "full"}, 4),
    "1B kernels, compiled": ({"name": _1B}, {"compile": True}, 4),
    "1B kernels, FlexAttention": ({"name": _1B, **FLEX}, {}, 4),
    "1B kernels, FlexAttention, compiled": ({"name": _1B, **FLEX}, {"compile": True}, 4),
    "1B kernels, Liger's loss": ({"name": _1B, "loss": {"backend": "liger"}}, {}, 4),
    "1B kernels, fp8, compiled": ({"name": _1B}, {"precision": "fp8", "compile": True}, 4),
    "8B, low_precision, full recomputation": (
        {"name": _8B},
        {"precision": "low_precision", "activation_checkpointing": "full"},
        2,
    ),
    "8B, LoRA, full recomputation": ({"name": _8B, "lora": LORA}, {"activation_checkpointing": "full"}, 2),
}


def recipe(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe of a case; in a dry run a miniature of it on the CPU."""
    model, strategy, packs = CASES[name]
    ranks = 1 if strategy.get("engine") == "single" else options.devices
    shape = json.loads((ROOT / "configs" / "model" / f"{model['name']}.json").read_text())
    shape.pop("_hub_names")
    random = {"name": shape, "tokenizer": str(folder / "tokenizer"), "miniature": DRY_RUN}  # of a config: no weights
    return {
        "trainer": {
            "accelerator": "cpu" if DRY_RUN else "gpu",
            "devices": ranks,
            "max_steps": options.steps,
            "gradient_clip_val": 1.0,
            "log_every_n_steps": 5,
            "enable_checkpointing": False,
            "default_root_dir": str(folder / "run"),
            "strategy": {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"precision": "mixed", **strategy}},
        },
        "model": {**model, **random, "optim": {"lr": 1e-5, "schedule": "constant"}},
        "data": {
            "train": f"generated:{200 * packs * ranks}",
            "packing": True,
            "max_seq_length": options.length,
            "micro_batch_size": packs,
            "global_batch_size": packs * ranks,
        },
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Medians of what the run of a case logs; None if it failed."""
    from lit_fsdp.models.tokenizers import miniature_tokenizer

    with tempfile.TemporaryDirectory() as place:
        miniature_tokenizer().save_pretrained(Path(place) / "tokenizer")
        file = Path(place) / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe(name, file.parent, options)))
        command = [sys.executable, "-m", "lit_fsdp", "fit", "--config", str(file)]
        if subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr).returncode:
            return None
        with (file.parent / "run" / "metrics.csv").open() as rows:
            logged = [row for row in csv.DictReader(rows) if row.get("tokens_per_second")]
    columns = ("tokens_per_second", "supervised_tokens_per_second", "step_seconds", "mfu", "peak_memory_gib")
    found = {name: [float(row[name]) for row in logged if row.get(name)] for name in columns}
    return {name: statistics.median(values) for name, values in found.items() if values}


def summary(result: dict[str, Any]) -> str:
    mfu = f", {result['mfu']:.1%} MFU" if "mfu" in result else ""
    return f"{result['tokens_per_second']:,.0f} tokens/s{mfu}, peak {result['peak_memory_gib']:.2f} GiB"


def main() -> int:
    """Measure every case, print its row and write everything; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of these (default all)")
    parser.add_argument("--devices", type=int, default=1, help="GPUs (default 1)")
    parser.add_argument("--length", type=int, default=256 if DRY_RUN else 4096, help="tokens per pack (default 4096)")
    parser.add_argument("--steps", type=int, default=10 if DRY_RUN else 25, help="optimizer steps (default 25)")
    options = parser.parse_args()
    import torch

    device = "CPU (a dry run)" if DRY_RUN else f"{options.devices} × {torch.cuda.get_device_name()}"
    record = describe(" ".join(["python", "-m", "tests.gpu.bench_gpu", *sys.argv[1:]]), device)
    record["results"] = {}
    chosen = [name for name in CASES if any(word in name for word in options.only)]
    for name in chosen:
        result = measure(name, options)
        if result is None:
            print(f"{name}: failed, see above", file=sys.stderr)
            continue
        record["results"][name] = result
        print(table_row(f"{name}, packs of {options.length}", summary(result), record), flush=True)
    path = ROOT / "runs" / "bench" / f"gpu-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if len(record["results"]) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
