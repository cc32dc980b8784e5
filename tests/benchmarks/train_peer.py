"""One epoch with TRL's SFTTrainer or the Transformers Trainer, with every step written down.

    python train_peer.py WORK_FOLDER OUT.json trl-packed|trl-packed-1|trl-padded|trainer-padded

fp32 weights, bf16 autocast where the CPU has instructions for it, fused AdamW, gradients clipped to a norm of 1; no
recomputation, no evaluation.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from lit_fsdp.host import cpu_has_bf16
from lit_fsdp.metrics.hardware import peak_host_bytes, reset_peak_host_bytes


class Steps(TrainerCallback):
    """Clock, CPU seconds, loss and peak memory per optimizer step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.peak_bytes = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.times:
            reset_peak_host_bytes()  # from here on the optimizer state is there
        self.times.append(time.time())
        self.cpu.append(time.process_time())
        self.peak_bytes = peak_host_bytes()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


class Counting:
    """A collator that writes down how many tokens each batch supervises, and how many places it has."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.supervised: list[int] = []
        self.slots: list[int] = []

    def __call__(self, rows: list[Any]) -> Any:
        batch = self.collate(rows)
        self.supervised.append(int((batch["labels"][:, 1:] != -100).sum()))
        self.slots.append(batch["input_ids"].numel())
        return batch


def main(folder: Path, out: Path, side: str) -> None:
    """Train and write ``times``, ``losses``, ``supervised``, ``slots`` per optimizer step, and ``peak_bytes``."""
    work = json.loads((folder / "work.json").read_text())
    rows = Dataset.from_list(json.loads((folder / "tokens.json").read_text()))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    steps, packed = Steps(), "-packed" in side
    what = "packs" if packed else "rows"
    micro = 1 if side.endswith("-1") else work[f"micro_{what}"]
    accumulate = work[f"{what}_per_step"] // micro
    with tempfile.TemporaryDirectory() as place:
        options = {**common_options(place), "per_device_train_batch_size": micro}
        options["gradient_accumulation_steps"] = accumulate
        trainer: Any = (
            trl_trainer(model, rows, tokenizer, options, packed)
            if side.startswith("trl-")
            else Trainer(
                model=model,
                args=TrainingArguments(**options),
                train_dataset=rows,
                data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
            )
        )
        counting = trainer.data_collator = Counting(trainer.data_collator)
        trainer.add_callback(steps)
        trainer.train()
    count = len(steps.times)
    record: dict[str, Any] = {
        "times": steps.times,
        "cpu": steps.cpu,
        "losses": steps.losses[:count],
        "peak_bytes": steps.peak_bytes,
    }
    for name in ("supervised", "slots"):
        per_batch = getattr(counting, name)
        record[name] = [sum(per_batch[i * accumulate : (i + 1) * accumulate]) for i in range(count)]
    out.write_text(json.dumps(record))


def common_options(place: str) -> dict[str, Any]:
    """What both Trainers are told."""
    from train_work import CLIP_NORM, OPTIM, SEED

    return {
        "output_dir": place,
        "num_train_epochs": 1,
        "learning_rate": OPTIM["lr"],
        "weight_decay": OPTIM["weight_decay"],
        "adam_beta1": OPTIM["beta1"],
        "adam_beta2": OPTIM["beta2"],
        "adam_epsilon": OPTIM["eps"],
        "max_grad_norm": CLIP_NORM,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": cpu_has_bf16(),
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
    }


def trl_trainer(model: Any, rows: Any, tokenizer: Any, options: dict[str, Any], packed: bool) -> Any:
    """SFTTrainer; packing is its best-fit-decreasing, without padding."""
    from train_work import MAX_LENGTH
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**options, max_length=MAX_LENGTH, packing=packed, packing_strategy="bfd", shuffle_dataset=True)
    return SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
