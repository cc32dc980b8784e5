"""One case of ``tests.gpu.bench_gpu``, trained and timed: packs of random tokens, the same rows for both sides."""

from __future__ import annotations

import random
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase, TrainerCallback

from lit_fsdp import CausalLMModule, fsdp_strategy
from lit_fsdp.data.packing import plan_packs
from lit_fsdp.host import GIB
from lit_fsdp.metrics.flops import flop_formula
from lit_fsdp.metrics.hardware import peak_device_bytes, peak_flops
from lit_fsdp.metrics.step_metrics import step_counts
from lit_fsdp.models.build import build_on_meta, num_parameters
from tests.gpu.bench_cases import Case, model_config

OPTIM = {"lr": 1e-5, "schedule": "constant", "weight_decay": 0.1}
LORA = {"r": 16, "alpha": 32.0, "target_modules": "all-linear"}
_SUPERVISED_FROM = 0.3  # of a row; what is before is its prompt
_MEDIAN_SHARE, _SPREAD = 0.15, 0.9  # row lengths: log-normal around this share of a pack


class Clock:
    """Clock and counts at the end of the warm-up and of the run, with the device idle."""

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.last = warmup, warmup + steps
        self.times: dict[int, float] = {}
        self.losses: list[float] = []
        self.counts = dict.fromkeys(("tokens", "supervised_tokens", "squared_tokens", "slots"), 0.0)

    def ended(self, step: int, counts: dict[str, float]) -> None:
        """After optimizer step ``step``, from 1."""
        on_gpu = torch.cuda.is_available()
        if step in (1, self.warmup, self.last):
            if on_gpu:
                torch.cuda.synchronize()
            self.times[step] = time.perf_counter()
        if step == 1 and on_gpu:
            torch.cuda.reset_peak_memory_stats()  # the optimizer state is there from now on
        if step > self.warmup:
            for name in self.counts:
                self.counts[name] += counts[name]

    @property
    def seconds(self) -> float:
        """From the end of the warm-up to the end of the run."""
        return self.times[self.last] - self.times[self.warmup]


def measure(case: Case, options: Any) -> dict[str, Any]:
    """Train one case.

    Args:
        case: Which.
        options: ``length``, ``warmup``, ``steps``, ``dry_run`` and ``peak_tflops``.

    Returns:
        Rates, MFU (by :mod:`lit_fsdp.metrics.flops`, on both sides), peak memory and losses.
    """
    config = AutoConfig.for_model(**model_config(case, options.dry_run))
    rows = random_rows(config.vocab_size, case.micro_batch_size * (options.warmup + options.steps), options.length)
    clock = Clock(options.warmup, options.steps)
    started = time.perf_counter()
    formula = (run_ours if case.side == "ours" else run_trl)(case, options, config, rows, clock)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU (a dry run)"
    peak = options.peak_tflops * 1e12 if options.peak_tflops else peak_flops(name, "bf16")
    flops_per_second = formula.train_flops(clock.counts) / clock.seconds
    return {
        "name": case.name,
        "group": case.group,
        "side": case.side,
        "shape": f"{case.micro_batch_size} packs of {options.length}",
        "num_params": num_parameters(build_on_meta(config)),
        "tokens_per_second": clock.counts["tokens"] / clock.seconds,
        "supervised_tokens_per_second": clock.counts["supervised_tokens"] / clock.seconds,
        "fill": clock.counts["tokens"] / clock.counts["slots"],
        "tflops": flops_per_second / 1e12,
        "mfu": flops_per_second / peak if peak else None,
        "peak_tflops": peak / 1e12 if peak else None,
        "device": name,
        "peak_gib": peak_device_bytes(device) / GIB,
        "seconds_to_first_step": clock.times[1] - started,
        "losses": [clock.losses[0], clock.losses[-1]],
    }


def random_rows(vocab_size: int, num_packs: int, length: int) -> list[dict[str, list[int]]]:
    """Rows of random tokens, as many as fill about so many packs, with prompts that are not learnt."""
    source, rows, left = random.Random(0), [], float(num_packs * length) * 1.05
    while left > 0:
        size = min(length, max(8, round(source.lognormvariate(0, _SPREAD) * _MEDIAN_SHARE * length)))
        ids = [source.randrange(vocab_size) for _ in range(size)]
        prompt = round(size * _SUPERVISED_FROM)
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
        left -= size
    return rows


def packed_batches(rows: list[dict[str, list[int]]], micro: int, length: int) -> list[dict[str, Any]]:
    """Batches of packs, as our data module makes them."""
    members, offsets = plan_packs([len(row["input_ids"]) for row in rows], length)
    packs = [members[a:b] for a, b in pairwise(offsets)]
    return [_packed(rows, packs[at : at + micro], length) for at in range(0, len(packs) - micro + 1, micro)]


def _packed(rows: list[dict[str, list[int]]], packs: list[Any], length: int) -> dict[str, Any]:
    ids, labels, positions, sizes, real = [], [], [], [], []
    for pack in packs:
        chosen = [rows[int(row)] for row in pack]
        lengths = [len(row["input_ids"]) for row in chosen]
        real += lengths
        rest = length - sum(lengths)
        ids.append(torch.tensor([i for row in chosen for i in row["input_ids"]] + [0] * rest))
        labels.append(torch.tensor([i for row in chosen for i in [-100, *row["labels"][1:]]] + [-100] * rest))
        whole = [*lengths, *([rest] if rest else [])]
        positions.append(torch.cat([torch.arange(size) for size in whole]))
        sizes += whole
    counts = [sum(real), len(real), len(packs) * length, sum(size * size for size in real)]
    return {
        "input_ids": torch.stack(ids),
        "labels": torch.stack(labels),
        "position_ids": torch.stack(positions),
        "cu_seq_lens": torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32),
        "longest": length,
        "counts": torch.tensor(counts),
    }


def run_ours(case: Case, options: Any, config: Any, rows: list[Any], clock: Clock) -> Any:
    """Our module under Lightning's Trainer; returns the FLOP formula."""

    class Steps(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            counts = step_counts(pl_module.step_totals) if trainer.global_step > clock.warmup else {}
            clock.ended(trainer.global_step, counts)
            if trainer.global_step in (1, clock.last):
                clock.losses.append(float(pl_module.step_totals[1] / pl_module.step_totals[0]))

    module = CausalLMModule(
        name=model_config(case, options.dry_run),
        optim=OPTIM,
        attn_implementation=case.attention,
        loss={"backend": case.loss},
        lora=LORA if case.lora else None,
    )
    module._tokenizer = _no_tokenizer()  # nothing is tokenized, and a config names none
    formula = flop_formula(module.build().model)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu" if options.dry_run else "gpu",
        devices=1,
        strategy=fsdp_strategy(
            engine=case.engine,  # type: ignore[arg-type]
            activation_checkpointing=case.recompute,  # type: ignore[arg-type]
            precision=case.precision,  # type: ignore[arg-type]
            compile=case.compile,
        ),
        max_steps=clock.last,
        max_epochs=-1,
        gradient_clip_val=1.0,
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    loader: DataLoader[Any] = DataLoader(packed_batches(rows, case.micro_batch_size, options.length), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, train_dataloaders=loader)
    return formula


def run_trl(case: Case, options: Any, config: Any, rows: list[Any], clock: Clock) -> Any:
    """TRL's SFTTrainer with packing and no padding, Liger's kernels where the case says so; returns the formula."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    counted: list[dict[str, float]] = []

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.ended(state.global_step, counted[state.global_step - 1])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                clock.losses.append(float(logs["loss"]))

    dtype = torch.bfloat16 if case.precision == "low_precision" else torch.float32
    with torch.device("cpu" if options.dry_run else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=case.attention)
    with tempfile.TemporaryDirectory() as place:
        arguments = SFTConfig(output_dir=place, **_trl_options(case, options, clock))
        trainer: Any = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=_no_tokenizer(),
            peft_config=_peft() if case.lora else None,
            callbacks=[Steps()],
        )
        trainer.data_collator = _counting(trainer.data_collator, counted, case.micro_batch_size * options.length)
        formula = flop_formula(trainer.model.get_base_model() if case.lora else trainer.model)
        trainer.train()
    return formula


def _trl_options(case: Case, options: Any, clock: Clock) -> dict[str, Any]:
    return {
        "max_steps": clock.last,
        "per_device_train_batch_size": case.micro_batch_size,
        "learning_rate": OPTIM["lr"],
        "weight_decay": OPTIM["weight_decay"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": True,
        "use_cpu": options.dry_run,
        "gradient_checkpointing": case.recompute == "full",
        "use_liger_kernel": case.loss == "liger",
        "max_length": options.length,
        "packing": True,
        "packing_strategy": "bfd",
        "logging_steps": clock.last - 1,
        "logging_first_step": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _peft() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=LORA["r"], lora_alpha=LORA["alpha"], target_modules=LORA["target_modules"], task_type="CAUSAL_LM"
    )


def _counting(collate: Any, counted: list[dict[str, float]], slots: int) -> Any:
    """The collator, which also writes down what each batch holds."""

    def counting(rows: list[Any]) -> Any:
        batch = collate(rows)
        positions = batch["position_ids"].flatten()
        begins = torch.cat([(positions == 0).nonzero()[:, 0], torch.tensor([len(positions)])])
        lengths = begins.diff().double()
        learnt = float((batch["labels"] != -100).sum())
        found = {"tokens": float(lengths.sum()), "squared_tokens": float(lengths.square().sum())}
        counted.append({**found, "supervised_tokens": learnt, "slots": float(slots)})
        return batch

    return counting


def _no_tokenizer() -> PreTrainedTokenizerBase:
    from lit_fsdp.models.tokenizers import miniature_tokenizer

    return miniature_tokenizer()
