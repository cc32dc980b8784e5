"""Tokens/s, MFU and peak memory of a 1B-shaped model on one GPU: both engines, with and without recomputation.

    python -m tests.gpu.bench_gpu [--model configs/model/Llama-3.2-1B.json] [--micro_batch_size 4] [--steps 20]

Random weights, built on meta and filled unit by unit; rows of ``--length`` random tokens, every one of them supervised
and none padding; ``precision: mixed``, fused AdamW, gradients clipped to a norm of 1. Every row of the table is a
process of its own. It prints rows for recipes/README.md and writes everything to ``runs/bench/``.

FLOPs per token, forward and backward: ``6 * N + 6 * L * H * D * T``. N: parameters, a tied one once (the embedding
look-up costs nothing, the head does). The second term is attention over the causal half: two products of
``2 * H * D * T / 2`` FLOPs per layer in the forward pass and twice that in the backward pass, for L layers, H heads of
size D, rows of T tokens. Recomputed activations are not counted: MFU is about useful work.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lit_fsdp import CausalLMModule, fsdp_strategy
from lit_fsdp.metrics.memory import peak_device_bytes
from lit_fsdp.models.build import build_on_meta, num_parameters
from tests.benchmarks.record import ROOT, describe, table_row

# Dense bf16 TFLOP/s, from NVIDIA's data sheets (their figures with sparsity, halved).
PEAK_TFLOPS = {"H100 PCIe": 756.5, "H100 NVL": 835.5, "H100": 989.4, "H200": 989.4, "A100": 312.0, "L40S": 362.05}
WARMUP_STEPS = 5
GIB = 2**30


def main() -> int:
    """Measure every combination in a process of its own and print the table."""
    options = parse()
    if options.out is not None:
        options.out.write_text(json.dumps(measure(options)))
        return 0
    place = ROOT / "runs" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "-m", "tests.gpu.bench_gpu", *sys.argv[1:]])
    results = []
    for engine in ("single", "fsdp2", "fsdp1"):  # single is the plain module: the engines' overhead at one rank
        for recompute in ("none", "full"):
            results.append(in_a_process(engine, recompute))
            print(summary(results[-1]), file=sys.stderr, flush=True)
    record = {**describe(command, results[0]["device"]), "results": results}
    path = place / f"gpu-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nrows for recipes/README.md; everything is in {path.relative_to(ROOT)}\n")
    for result in results:
        what = f"{result['model']}, {result['engine']}, recompute {result['recompute']}, {result['shape']}"
        print(table_row(what, summary(result), record))
    return 0


def parse() -> argparse.Namespace:
    """The command line; ``--out`` is for the processes that this one starts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=ROOT / "configs/model/Llama-3.2-1B.json", help="model config")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row (default 2048)")
    parser.add_argument("--micro_batch_size", type=int, default=4, help="rows per step (default 4)")
    parser.add_argument("--steps", type=int, default=20, help=f"measured steps, after {WARMUP_STEPS} (default 20)")
    parser.add_argument("--peak_tflops", type=float, help="dense bf16 TFLOP/s of the device, if it is not known here")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu", help="cpu tries this script out")
    parser.add_argument("--engine", default="fsdp2", help=argparse.SUPPRESS)
    parser.add_argument("--recompute", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_process(engine: str, recompute: str) -> dict[str, Any]:
    """One combination, with the options of this process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        words = [*sys.argv[1:], "--engine", engine, "--recompute", recompute, "--out", str(out)]
        command = [sys.executable, "-m", "tests.gpu.bench_gpu", *words]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        return json.loads(out.read_text())


class Clock(Callback):
    """When steps ended, and the first and last loss; the clock is read with the device idle where it counts."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """One forward per step."""
        done, on_gpu = trainer.global_step, trainer.strategy.root_device.type == "cuda"
        if on_gpu and done in (1, WARMUP_STEPS, trainer.max_steps):
            torch.cuda.synchronize()
        if on_gpu and done == 1:
            torch.cuda.reset_peak_memory_stats()  # the optimizer state is there from now on
        self.times.append(time.perf_counter())
        if done in (1, trainer.max_steps):
            self.losses.append(float(pl_module.step_totals[1] / pl_module.step_totals[0]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train one combination and time it."""
    module = CausalLMModule(name=str(options.model), optim={"lr": 1e-5, "schedule": "constant", "weight_decay": 0.1})
    config = module.source.hf_config
    clock = Clock()
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=1,
        strategy=fsdp_strategy(engine=options.engine, activation_checkpointing=options.recompute, precision="mixed"),
        max_steps=WARMUP_STEPS + options.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    started = time.perf_counter()
    trainer.fit(module, train_dataloaders=random_rows(config.vocab_size, options))
    device = trainer.strategy.root_device
    seconds = clock.times[-1] - clock.times[WARMUP_STEPS - 1]
    return {
        **rates(options, config, options.micro_batch_size * options.length * options.steps / seconds),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (a dry run)",
        "peak_gib": peak_device_bytes(device) / GIB,
        "seconds_to_first_step": clock.times[0] - started,
        "losses": clock.losses,
    }


def random_rows(vocab_size: int, options: argparse.Namespace) -> DataLoader[Any]:
    """Four batches of full rows, over and over."""
    generator = torch.Generator().manual_seed(0)
    batches: Any = []
    for _ in range(4):
        ids = torch.randint(0, vocab_size, (options.micro_batch_size, options.length), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()})
    return DataLoader(batches, batch_size=None)


def rates(options: argparse.Namespace, config: Any, tokens_per_second: float) -> dict[str, Any]:
    """Tokens per second as FLOP/s, and as a share of the device's peak where that is known."""
    num_params = num_parameters(build_on_meta(config))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * head_dim * options.length
    flops_per_token = 6 * num_params + attention
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = options.peak_tflops or next((value for key, value in PEAK_TFLOPS.items() if key in name), None)
    tflops = tokens_per_second * flops_per_token / 1e12
    return {
        "model": options.model.stem,
        "engine": options.engine,
        "recompute": options.recompute,
        "shape": f"{options.micro_batch_size} × {options.length} tokens",
        "num_params": num_params,
        "flops_per_token": flops_per_token,
        "tokens_per_second": tokens_per_second,
        "tflops": tflops,
        "peak_tflops": peak,
        "mfu": tflops / peak if peak else None,
    }


def summary(result: dict[str, Any]) -> str:
    """The result in a cell."""
    mfu = f"{result['mfu']:.1%} MFU of {result['peak_tflops']:g}" if result["mfu"] is not None else "MFU unknown"
    speed = f"{result['tokens_per_second']:,.0f} tokens/s, {result['tflops']:.3g} TFLOP/s ({mfu})"
    return f"{speed}, peak {result['peak_gib']:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
