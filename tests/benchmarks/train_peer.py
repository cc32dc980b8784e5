"""One epoch with TRL's SFTTrainer or the Transformers Trainer, with every step written down.

    python train_peer.py WORK_FOLDER trl-packed|trl-packed-1|trl-padded|trainer-padded|trl-long|trl-dpo[-precomputed]

fp32 weights, bf16 autocast where the CPU has instructions for it, fused AdamW, gradients clipped to a norm of 1; no
evaluation, recomputation of long rows alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from train import MICRO_PACKS, PAIRS_PER_STEP, ROWS_PER_STEP
from work import CLIP_NORM, OPTIM, SEED

from lit_fsdp.host import cpu_has_bf16
from lit_fsdp.metrics.hardware import peak_host_bytes, reset_peak_host_bytes

# What both Trainers are told.
_NAMES = {"lr": "learning_rate", "beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
OPTIONS = {_NAMES.get(name, name): value for name, value in OPTIM.items() if name != "schedule"}
OPTIONS |= {"max_grad_norm": CLIP_NORM, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "seed": SEED}
OPTIONS |= {"num_train_epochs": 1, "bf16": cpu_has_bf16(), "use_cpu": True, "gradient_checkpointing": False}
OPTIONS |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}


class Steps(transformers.TrainerCallback):
    """Clock, loss and peak memory per optimizer step, and CPU seconds of the start."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"times": [], "losses": [], "peak_bytes": 0}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.setdefault("start_cpu_seconds", sum(os.times()[:4]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.found["times"]:
            reset_peak_host_bytes()  # from here on the optimizer state is there
        self.found["times"].append(time.time())
        self.found["peak_bytes"] = peak_host_bytes()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.found["losses"].append(float(logs["loss"]))


def main(folder: Path, side: str) -> None:
    """Train and write ``times``, ``losses`` and ``supervised`` per optimizer step, and ``peak_bytes``."""
    work = json.loads((folder / "work.json").read_text())
    rows = Dataset.from_list(work["tokens"])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(work["model"])
    packed, is_long, is_dpo = "-packed" in side, side == "trl-long", "-dpo" in side
    micro = 1 if side.endswith("-1") or is_long else MICRO_PACKS if packed else ROWS_PER_STEP
    micro = PAIRS_PER_STEP if is_dpo else micro
    accumulate = 1 if is_dpo else (work["packs_per_step"] if packed or is_long else ROWS_PER_STEP) // micro
    options = {"output_dir": folder / "peer", "per_device_train_batch_size": micro, **OPTIONS}
    options |= {"gradient_accumulation_steps": accumulate, "gradient_checkpointing": is_long}
    if side.startswith("trl-"):
        from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

        class Tokenized(DPOTrainer):
            """Takes rows that are tokens already, as SFTTrainer does."""

            def _prepare_dataset(self, dataset: Any, *unused: Any) -> Any:
                return dataset

        adapters = None
        if work["lora"]:
            from peft import LoraConfig

            adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        side_options = {"train_dataset": rows, "processing_class": tokenizer, "peft_config": adapters}
        trainer: Any
        if is_dpo:
            more = {"max_length": work["length"], "precompute_ref_log_probs": side.endswith("-precomputed")}
            trainer = Tokenized(model, args=DPOConfig(**options, **more), **side_options)
        else:
            more = {"max_length": work["length"], "packing": packed, "packing_strategy": "bfd", "shuffle_dataset": True}
            trainer = SFTTrainer(model, SFTConfig(**options, **more), **side_options)
    else:
        padded = transformers.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
        trainer = transformers.Trainer(model, transformers.TrainingArguments(**options), padded, rows)
    supervised: list[int] = []  # tokens of each batch
    collate = trainer.data_collator

    def counting(rows: list[Any]) -> Any:
        batch = collate(rows)
        counted = batch["completion_mask"].sum() if is_dpo else (batch["labels"][:, 1:] != -100).sum()
        supervised.append(int(counted))
        return batch

    trainer.data_collator = counting
    steps = Steps()
    trainer.add_callback(steps)
    trainer.train()
    count = len(steps.found["times"])
    per_step = [sum(supervised[i * accumulate : (i + 1) * accumulate]) for i in range(count)]
    found = {**steps.found, "losses": steps.found["losses"][:count], "supervised": per_step}
    (folder / "record.json").write_text(json.dumps(found))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(Path(sys.argv[1]), sys.argv[2])
