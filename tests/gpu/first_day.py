"""The first ten minutes with a GPU: what a CPU cannot show, each part in a process of its own with a limit.

    python -m tests.gpu.first_day [--only a c] [--out first_day.json] [--minutes 9]

Every row is in the JSON file as soon as it is known: ``part``, ``what``, ``ok`` (absent where nothing is to be
compared) and what was found. A part that fails or takes too long is a row too, and the others go on.
``LIT_FSDP_GPU_DRY_RUN=1`` runs the same code with miniatures on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from lit_fsdp import Checkpoint
from lit_fsdp.audit import CausalLMModule, settled_strategy
from lit_fsdp.callbacks.progress import RunProgress
from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.checkpoint.files import replace_bytes
from lit_fsdp.models.build import build_trainable
from lit_fsdp.models.loss import causal_lm_forward, plan_loss
from lit_fsdp.models.resolve import resolve_architecture
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.parallel.activation import prepare_blocks
from lit_fsdp.parallel.fully_sharded import apply_fully_shard, unit_options
from lit_fsdp.parallel.precision import cast_parameters
from lit_fsdp.parallel.units import plan_for
from lit_fsdp.plan.memory import rank_memory
from tests.dist.jobs import Losses, TinyData, TinyDataWithValidation, digest, module_for, trainer_for
from tests.dist.reference import TINY, global_batch, loop, save_tiny, step_loss
from tests.gpu.conftest import DRY_RUN
from tests.pages import ROOT
from tests.runs import check_recipe, records

DEVICE, ACCELERATOR = ("cpu", "cpu") if DRY_RUN else ("cuda", "gpu")
LENGTH, STEPS, PACKS = (256, 6, 2) if DRY_RUN else (4096, 12, 4)
FULL, LORA = {"activation_checkpointing": "full"}, {"lora": {"r": 16, "alpha": 32.0, "target_modules": "all-linear"}}
SHAPES = {"1B": "Llama-3.2-1B", "8B": "Llama-3.1-8B"}
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # what kernels of fp8 and FlexAttention ask for


def save_model(folder: Path, **changes: Any) -> Path:
    """The tiny model of other tests with these changes, as a folder."""
    tiny = {name: value for name, value in TINY.to_dict().items() if name != "head_dim"}
    return save_tiny(folder, LlamaConfig(**{**tiny, "hidden_size": 64, "intermediate_size": 128, **changes}))


def plain_losses(folder: Path) -> list[float]:
    """Losses of a plain fp32 PyTorch loop on the same batches, on the same device."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).train()

    def loss_of(step: int) -> torch.Tensor:
        return step_loss(model, {name: tensor.to(DEVICE) for name, tensor in global_batch(step).items()})

    return loop(model, loss_of, 6)


class Odd(TinyData):
    """Batches of an odd number of rows and tokens."""

    def train_dataloader(self) -> DataLoader[Any]:
        batches = [global_batch(step, 3, 13) for step in range(6)]
        return DataLoader(batches, batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]


class CountedWaits(Callback):
    """Counts what makes the host wait for the device in each of the steps after the third."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step >= 3 and not DRY_RUN:
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        if not DRY_RUN:
            torch.cuda.set_sync_debug_mode("default")


def train(folder: Path, strategy: dict[str, Any], *callbacks: Callback, **options: Any) -> dict[str, Any]:
    """Losses, a hash over all that was trained, realized dtypes and metrics of a run in a process group of its own."""
    torch.manual_seed(7)
    data, ckpt_path = options.pop("data", None) or TinyData(), options.pop("ckpt_path", None)
    losses, module = Losses(), module_for(str(folder))
    defaults = {"accelerator": ACCELERATOR, "log_every_n_steps": 1, "max_steps": 6}
    trainer = trainer_for(strategy, [losses, *callbacks], **{**defaults, **options})
    try:
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        live: Any = trainer.strategy
        return {
            "losses": losses.values,
            "bits": digest(module, trainer.optimizers[0]),
            "realized": {what: set(found) for what, found in live.contract.report()["realized"].items()},
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }
    finally:
        torch.distributed.destroy_process_group()
        if not DRY_RUN:
            torch.cuda.empty_cache()


def part_a(row: Callable[..., None], tmp: Path) -> None:
    """fsdp2 with offload: accumulation, validation, samples, saves in the background, resume, against single."""
    folder = save_tiny(tmp / "model", TINY)
    for accumulate in (1, 4):
        common = {"accumulate_grad_batches": accumulate, "data": TinyDataWithValidation(), "val_check_interval": 4}
        alone = train(folder, {"engine": "single", "precision": "fp32"}, **common)["losses"]
        strategy, run = {"engine": "fsdp2", "precision": "fp32", "cpu_offload": True}, tmp / f"run{accumulate}"
        saving = Checkpoint(every_steps=3, keep_last=-1, async_save=True)
        found = train(folder, strategy, saving, default_root_dir=run, **common)
        row(f"losses of single, accumulation {accumulate}", **compared(found["losses"], alone, 1e-4))
        later = {**common, "ckpt_path": str(run / "checkpoints" / "step-00000003"), "default_root_dir": tmp / "again"}
        again = train(folder, strategy, **later)
        same = {"same_bits": again["bits"] == found["bits"]}
        row(
            f"a resume of it, accumulation {accumulate}", **compared(again["losses"], found["losses"][3:], 1e-4), **same
        )
    values = {"data": {"val": "generated:8"}, "samples": {"prompts": "generated:2", "max_new_tokens": 4}}
    offload = {"engine": "fsdp2", "cpu_offload": True}
    row("samples and validation of a recipe", fit("1B", tmp / "samples", offload, miniature=True, **values) is not None)


def part_b(row: Callable[..., None], tmp: Path) -> None:
    """fsdp1 with offload, one micro-batch per step."""
    folder = save_tiny(tmp / "model", TINY)
    found = train(folder, {"engine": "fsdp1", "precision": "fp32", "cpu_offload": not DRY_RUN})["losses"]
    row("losses of a plain loop", **compared(found, plain_losses(folder), 1e-4))


def part_c(row: Callable[..., None], tmp: Path) -> None:
    """fp8 on batches whose tokens 16 does not divide, against bf16."""
    folder = save_model(tmp / "model", **WIDE)
    wanted = train(folder, {"precision": "mixed"}, data=Odd())["losses"]
    found = train(folder, {"precision": "mixed" if DRY_RUN else "fp8"}, data=Odd())["losses"]
    row("losses of bf16 within 10 %", **compared(found, wanted, 0.1))


def part_d(row: Callable[..., None], tmp: Path) -> None:
    """How often the host waits for the device in optimizer steps of two micro-batches: at most once."""
    folder, waits = save_tiny(tmp / "model", TINY), CountedWaits()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"accumulate_grad_batches": 2, "enable_progress_bar": True, "log_every_n_steps": 50, "max_steps": 6}
        train(folder, {"engine": "fsdp2"}, waits, Throughput(), RunProgress(), **options)
    found = Counter(f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message))
    row("waits per optimizer step", sum(found.values()) <= 3, per_step=sum(found.values()) / 3, found=dict(found))


def recipe(shape: str, folder: Path, strategy: dict[str, Any], packs: int = PACKS, **values: Any) -> dict[str, Any]:
    """A recipe with random weights of a shape that ships, on generated rows."""
    config = json.loads((ROOT / "configs" / "model" / f"{SHAPES[shape]}.json").read_text())
    config.pop("_hub_names")  # it is a config, without weights
    small = values.pop("miniature", False) or DRY_RUN
    ranks = values.pop("devices", 1)
    trainer = {"accelerator": ACCELERATOR, "devices": ranks, "max_steps": STEPS, "log_every_n_steps": 2}
    trainer |= {"gradient_clip_val": 1.0, "enable_checkpointing": False, "default_root_dir": str(folder / "run")}
    trainer["strategy"] = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"precision": "mixed", **strategy}}
    model = {"name": config, "tokenizer": str(folder), "miniature": small, "optim": {"lr": 1e-5}}
    data = {"train": f"generated:{200 * packs * ranks}", "packing": True, "max_seq_length": 256 if small else LENGTH}
    data |= {"micro_batch_size": packs, "global_batch_size": packs * ranks}
    given = {"model": model | values.pop("model", {}), "data": data | values.pop("data", {}), **values}
    folder.mkdir(parents=True, exist_ok=True)
    miniature_tokenizer().save_pretrained(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"trainer": trainer, **given}), encoding="utf-8")
    return {"trainer": trainer, **given}


def command(verb: str, folder: Path, *flags: str) -> str | None:
    """What a verb prints for the recipe in a folder; None if it failed, with its reason on standard error."""
    words = [sys.executable, "-m", "lit_fsdp", verb, "--config", str(folder / "recipe.yaml"), *flags]
    # what the strategies of this process have set
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(words, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True, env=env)
    return None if done.returncode else done.stdout


def fit(shape: str, folder: Path, strategy: dict[str, Any], packs: int = PACKS, **values: Any) -> dict[str, Any] | None:
    """Medians of what a run logs."""
    recipe(shape, folder, strategy, packs, **values)
    if command("fit", folder) is None:
        return None
    logged = records(folder / "run" / "metrics.csv")
    columns = ("tokens_per_second", "step_seconds", "mfu", "peak_memory_gib")
    numbers = {column: [float(line[column]) for line in logged if line.get(column)] for column in columns}
    return {column: statistics.median(found) for column, found in numbers.items() if found}


def part_e(row: Callable[..., None], tmp: Path) -> None:
    """Kernels of attention and tokens/s of 1B, recomputed: padded and packed, each attention."""
    cases = [("padded", None), ("packed", None), ("packed", "flex_attention"), ("packed", "flash_attention_2")]
    for rows, attention in cases[: 2 if DRY_RUN else None]:
        folder, name = tmp / f"{rows}-{attention}", f"{rows}, {attention or 'auto'}"
        values = {"model": {"attn_implementation": attention}, "data": {"packing": rows == "packed"}}
        found = fit("1B", folder, FULL, **values)
        if (
            found is None
            or command("profile", folder, "--steps", "1", "--trainer.default_root_dir", str(folder)) is None
        ):
            row(name, False)
            continue
        events = json.loads((folder / "profile" / "rank-0.json").read_text(encoding="utf-8"))["traceEvents"]
        kernels = {event["name"][:80] for event in events if event.get("cat") == "kernel"}
        used = [
            name for name in kernels if any(word in name.lower() for word in ("flash", "fmha", "attention", "flex"))
        ]
        row(name, kernels=sorted(used), **found)


def part_f(row: Callable[..., None], tmp: Path) -> None:
    """Eight ranks of 1B, faked on the one GPU: planned against measured peak, by the real allocator and streams."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name, strategy in (("fsdp2", {}), ("fsdp2, full recomputation", FULL)):
        values = recipe("1B", tmp / name, strategy, devices=8)
        run = check_recipe(values, "plan")
        planned = rank_memory(run).peak
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        try:
            measured = measured_peak(run)
        finally:
            torch.distributed.destroy_process_group()
        ratio = round(planned / measured, 3) if measured else None
        ok = DRY_RUN or 0.95 <= planned / measured <= 1.15
        row(f"1B on 8 ranks, {name}", ok, planned=planned, measured=measured, ratio=ratio)


def measured_peak(run: Any) -> int:
    """Bytes at the highest moment of three steps of rank 0, whose collectives carry nothing."""
    model: Any = build_trainable(resolve_architecture(run.model), run.model)[0]
    strategy, module = settled_strategy(run), CausalLMModule(model)
    cast_parameters(module, strategy)
    plan = plan_for(module, strategy, "strategy")
    prepare_blocks(list(plan.blocks), strategy.activation_config)
    loss_plan = plan_loss(model, run.model.loss)
    module.forward = lambda batch: causal_lm_forward(model, batch, loss_plan).loss_sum  # type: ignore[method-assign]
    mesh = init_device_mesh(DEVICE, (8,), mesh_dim_names=("dp_shard",))
    root = apply_fully_shard(module, plan, strategy, unit_options(strategy, mesh), [], lambda module: None, not DRY_RUN)
    root.to_empty(device=DEVICE)
    model.tie_weights()
    for param in root.parameters():
        torch.nn.init.normal_(param.detach().to_local(), std=0.02)  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(root.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (run.data.micro_batch_size, run.data.max_seq_length), device=DEVICE)
    for _ in range(3):
        root({"input_ids": ids, "labels": ids}).backward()
        optimizer.step()
        optimizer.zero_grad()
    return 0 if DRY_RUN else torch.cuda.max_memory_allocated()


def part_g(row: Callable[..., None], tmp: Path) -> None:
    """Whether a resume is bit-equal, with deterministic kernels (it must be) and without."""
    folder = save_tiny(tmp / "model", TINY)
    for deterministic in (True, False):
        run, options = tmp / f"run-{deterministic}", {"deterministic": deterministic}
        saving = Checkpoint(every_steps=3, keep_last=-1)
        whole = train(folder, {}, saving, default_root_dir=run, **options)["bits"]
        ckpt_path = str(run / "checkpoints" / "step-00000003")
        resumed = train(folder, {}, ckpt_path=ckpt_path, default_root_dir=tmp / "again", **options)["bits"]
        row(f"deterministic {deterministic}", resumed == whole or not deterministic, same_bits=resumed == whole)


def hand_written(shape: str, packs: int) -> dict[str, Any]:
    """Positions/s of a plain loop: transformers' model, autocast to bf16, fused AdamW, causal SDPA without a mask."""
    config = AutoConfig.for_model(**json.loads((ROOT / "configs" / "model" / f"{SHAPES[shape]}.json").read_text()))
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids, times = torch.randint(0, 512, (packs, LENGTH), device=DEVICE), []
    for _ in range(STEPS):
        start = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss)
        times.append(time.perf_counter() - start)
    return {"positions_per_second": packs * LENGTH / statistics.median(times[2:])}


def part_h(row: Callable[..., None], tmp: Path) -> None:
    """Tokens/s, MFU and peak of 1B and 8B, packed, beside the plain loop: rows for the measured table."""
    cases: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
        "1B, single": ("1B", {"engine": "single"}, PACKS, {}),
        "1B, fsdp2": ("1B", {}, PACKS, {}),
        "1B, fsdp2, compiled": ("1B", {"compile": True}, PACKS, {}),
        "1B, fp8, compiled": ("1B", {"precision": "fp8", "compile": True}, PACKS, {}),
        "8B, low_precision, recomputed": ("8B", {"precision": "low_precision", **FULL}, PACKS // 2, {}),
        "8B, LoRA, recomputed": ("8B", FULL, PACKS // 2, {"model": LORA}),
    }
    if not DRY_RUN:  # its shape is a whole one
        row("1B, plain loop", **hand_written("1B", PACKS // 2))
        torch.cuda.empty_cache()
    for name, (shape, strategy, packs, values) in cases.items():
        if DRY_RUN and "compiled" in name:
            continue  # minutes of C++, and no fp8
        found = fit(shape, tmp / name, strategy, packs, **values)
        row(f"{name}, packs of {LENGTH}", found is not None, **(found or {}))


PARTS: dict[str, tuple[Callable[..., None], int]] = {  # seconds, of nine minutes in all
    "a": (part_a, 90),
    "b": (part_b, 30),
    "c": (part_c, 40),
    "d": (part_d, 30),
    "e": (part_e, 130),
    "f": (part_f, 50),
    "g": (part_g, 40),
    "h": (part_h, 130),
}


def compared(found: list[float], wanted: list[float], tolerance: float) -> dict[str, Any]:
    """Losses of two runs, for a row, and whether they are the same step by step."""
    near = (math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, wanted, strict=False))
    return {"ok": len(found) == len(wanted) and all(near), "found": found, "wanted": wanted}


def add(out: Path, part: str, what: str, ok: bool | None = None, **found: Any) -> None:
    """Add a row to the file, at once and whole, and show it."""
    rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    rows.append({"part": part, "what": what, **({} if ok is None else {"ok": ok}), **found})
    replace_bytes(out, (json.dumps(rows, indent=1) + "\n").encode())
    print(f"({part}) {what}: {'' if ok is None else 'ok ' if ok else 'FAILED '}{found}", flush=True)


def main() -> int:
    """Run the parts one after the other, each in a process of its own; 1 if a row is not ok."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts (default all)")
    parser.add_argument("--out", type=Path, default=Path("first_day.json"), help="JSON file (default first_day.json)")
    parser.add_argument("--minutes", type=float, default=9.0, help="in all (default 9)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the part that this process is
    options = parser.parse_args()
    if options.inside:
        warnings.simplefilter("ignore")  # Lightning's advice to real runs
        with tempfile.TemporaryDirectory() as folder:
            PARTS[options.inside][0](functools.partial(add, options.out, options.inside), Path(folder))
        return 0
    options.out.unlink(missing_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    names = ("torch", "lightning", "transformers", "torchao", "peft")
    found = {name: version(name) for name in names if importlib.util.find_spec(name)}
    device = "CPU (a dry run)" if DRY_RUN else torch.cuda.get_device_name()
    add(options.out, "", "circumstances", device=device, date=time.strftime("%Y-%m-%d"), **found)
    for name in options.only:
        limit = min(PARTS[name][1] * (4 if DRY_RUN else 1), ends - time.monotonic())
        words = [sys.executable, "-m", "tests.gpu.first_day", "--inside", name, "--out", str(options.out)]
        process = subprocess.Popen(words, start_new_session=True, env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
        try:
            code: int | str = process.wait(max(1.0, limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = f"killed after {limit:.0f} s"
        if code:
            add(options.out, name, "the part did not end", ok=False, exit=code)
    return any(row.get("ok") is False for row in json.loads(options.out.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
