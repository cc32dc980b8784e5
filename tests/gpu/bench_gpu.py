"""Tokens/s, MFU and peak memory on the GPUs at hand, packed at 4096 tokens: rows for the measured table.

    python -m tests.gpu.bench_gpu [--only 1B kernels ...] [--devices 1]

Every row is one ``lit-fsdp fit`` of 25 steps with random weights of a shape that ships, on generated rows, in packs:
fp32 weights under bf16, 8B in bf16, fused AdamW, gradients clipped to a norm of 1. Rates are what the run itself logs,
the median over its logged steps. Rows are printed and written to ``runs/bench/``; a case that fails is named, and the
others go on. ``LIT_FSDP_GPU_DRY_RUN=1`` runs all of it on the CPU with miniatures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.benchmarks.record import ROOT, bench
from tests.gpu.conftest import DRY_RUN
from tests.runs import records

LENGTH, STEPS = (256, 10) if DRY_RUN else (4096, 25)
_1B, _8B = "Llama-3.2-1B", "Llama-3.1-8B"
FLEX = {"attn_implementation": "flex_attention"}
LORA = {"lora": {"r": 16, "alpha": 32.0, "target_modules": "all-linear"}}
FULL = {"activation_checkpointing": "full"}
# name: shape, further keys of the model, arguments of the strategy, packs per forward
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "1B, single": (_1B, {}, {"engine": "single"}, 4),
    "1B, fsdp2": (_1B, {}, {"engine": "fsdp2"}, 4),
    "1B, fsdp1": (_1B, {}, {"engine": "fsdp1"}, 4),
    "1B, fsdp2, full recomputation": (_1B, {}, FULL, 4),
    "1B kernels, compiled": (_1B, {}, {"compile": True}, 4),
    "1B kernels, FlexAttention": (_1B, FLEX, {}, 4),
    "1B kernels, FlexAttention, compiled": (_1B, FLEX, {"compile": True}, 4),
    "1B kernels, Liger's loss": (_1B, {"loss": {"backend": "liger"}}, {}, 4),
    "1B kernels, fp8, compiled": (_1B, {}, {"precision": "fp8", "compile": True}, 4),
    "8B, low_precision, full recomputation": (_8B, {}, {"precision": "low_precision", **FULL}, 2),
    "8B, LoRA, full recomputation": (_8B, LORA, FULL, 2),
}


def recipe(name: str, folder: Path, devices: int) -> dict[str, Any]:
    """The recipe of a case; in a dry run a miniature of it on the CPU."""
    shape, model, strategy, packs = CASES[name]
    ranks = 1 if strategy.get("engine") == "single" else devices
    config = json.loads((ROOT / "configs" / "model" / f"{shape}.json").read_text())
    config.pop("_hub_names")  # it is a config, without weights
    trainer = {"accelerator": "cpu" if DRY_RUN else "gpu", "devices": ranks, "max_steps": STEPS, "log_every_n_steps": 5}
    trainer |= {"gradient_clip_val": 1.0, "enable_checkpointing": False, "default_root_dir": str(folder / "run")}
    arguments = {"precision": "mixed", **strategy}
    trainer["strategy"] = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": arguments}
    optim = {"lr": 1e-5, "schedule": "constant"}
    model = {**model, "name": config, "tokenizer": str(folder), "miniature": DRY_RUN, "optim": optim}
    data = {"train": f"generated:{200 * packs * ranks}", "packing": True, "max_seq_length": LENGTH}
    data |= {"micro_batch_size": packs, "global_batch_size": packs * ranks}
    return {"trainer": trainer, "model": model, "data": data}


def measure(name: str, folder: Path, devices: int) -> dict[str, Any] | None:
    """The row of a case, medians of what its run logs; None if it failed."""
    folder.mkdir()
    miniature_tokenizer().save_pretrained(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(name, folder, devices)))
    command = [sys.executable, "-m", "lit_fsdp", "fit", "--config", str(folder / "recipe.yaml")]
    if subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr).returncode:
        print(f"{name}: failed, see above", file=sys.stderr)
        return None
    logged = records(folder / "run" / "metrics.csv")
    columns = ("tokens_per_second", "supervised_tokens_per_second", "step_seconds", "mfu", "peak_memory_gib")
    values = {column: [float(row[column]) for row in logged if row.get(column)] for column in columns}
    found = {column: statistics.median(numbers) for column, numbers in values.items() if numbers}
    mfu = f", {found['mfu']:.1%} MFU" if "mfu" in found else ""
    summary = f"{found['tokens_per_second']:,.0f} tokens/s{mfu}, peak {found['peak_memory_gib']:.2f} GiB"
    return {"what": f"{name}, packs of {LENGTH}", "summary": summary, **found}


def main() -> int:
    """Measure every case and write its row; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name holds one of these (default all)")
    parser.add_argument("--devices", type=int, default=1, help="GPUs (default 1)")
    options = parser.parse_args()
    import torch

    device = "CPU (a dry run)" if DRY_RUN else f"{options.devices} × {torch.cuda.get_device_name()}"
    chosen = [name for name in CASES if any(word in name for word in options.only)]
    with bench("gpu", device=device) as (record, folder):
        results = [measure(name, folder / str(number), options.devices) for number, name in enumerate(chosen)]
        record["results"] = [result for result in results if result]
    return int(None in results)


if __name__ == "__main__":
    sys.exit(main())
