"""One epoch with LitGPT's own fine-tuning on a CPU, with every step written down.

    python train_litgpt.py WORK_FOLDER litgpt-padded

Its ``finetune full`` or ``finetune lora`` as a user would call it, one row at a time, which is its default; the
learning rate is constant. It does not clip gradients, weighs rows alike whatever they hold, and has no packs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.data.base import get_sft_collate_fn
from litgpt.finetune import full, lora
from litgpt.prompts import Default
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from torch.utils.data import DataLoader
from train import ROWS_PER_STEP
from work import OPTIM, SEED

from lit_fsdp.host import cpu_has_bf16
from lit_fsdp.metrics.hardware import peak_host_bytes, reset_peak_host_bytes


class Rows(DataModule):
    """The tokens that our data module made."""

    prompt_style = Default()

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        super().__init__()
        self.supervised: list[int] = []  # tokens of each batch
        counts = {"raw": 0, "raw_plus_prompt_template": 0}
        self.rows = [{name: torch.tensor(row[name]) for name in row} | {"token_counts": counts} for row in rows]

    def connect(self, **unused: Any) -> None:
        """Nothing depends on the tokenizer any more."""

    def train_dataloader(self) -> Any:
        collate = get_sft_collate_fn()

        def counting(rows: list[Any]) -> Any:
            batch = collate(rows)
            self.supervised.append(int((batch["labels"][:, 1:] != -100).sum()))
            return batch

        rows: Any = self.rows
        return DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(SEED), collate_fn=counting)

    def val_dataloader(self) -> Any:
        rows: Any = self.rows[:1]
        return DataLoader(rows, collate_fn=get_sft_collate_fn())


class Steps(lightning.Fabric):
    """Fabric that notes clock, loss, tokens and peak of each optimizer step, as it is logged."""

    def __init__(self, data: Rows) -> None:
        super().__init__(devices=1, accelerator="cpu", precision="bf16-mixed" if cpu_has_bf16() else "32-true")
        self.found: dict[str, Any] = {"times": [], "losses": [], "supervised": [], "peak_bytes": 0}
        self._data = data

    def log_dict(self, metrics: Any, step: Any = None) -> None:
        if metrics["step"] == len(self.found["times"]):
            return
        if not self.found["times"]:
            reset_peak_host_bytes()  # from here on the optimizer state is there
        self.found["times"].append(time.time())
        self.found["losses"].append(float(metrics["loss"]))
        self.found["supervised"].append(sum(self._data.supervised[: metrics["iter"]]) - sum(self.found["supervised"]))
        self.found["peak_bytes"] = peak_host_bytes()


def main(folder: Path) -> None:
    work = json.loads((folder / "work.json").read_text())
    place = folder / "litgpt" / "SmolLM2-135M-Instruct"
    if not place.is_dir():
        place.mkdir(parents=True)
        for file in Path(work["model"]).iterdir():
            (place / file.name).symlink_to(file)
        convert_hf_checkpoint(checkpoint_dir=place, model_name=place.name)
    data = Rows(work["tokens"])
    fabric = Steps(data)
    kind: Any = lora if work["lora"] else full
    # an epoch and no more: the loop ends with the rows
    train = TrainArgs(global_batch_size=ROWS_PER_STEP, micro_batch_size=1, log_interval=1, epochs=1, lr_warmup_steps=1)
    options: dict[str, Any] = {"data": data, "checkpoint_dir": place, "out_dir": folder / "litgpt" / "out"}
    adapters = {f"lora_{part}": True for part in ("query", "key", "value", "projection", "mlp")}
    adapters |= {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
    kind.save_hyperparameters = lambda *_: None  # which reads the command line
    config = kind.Config.from_file(place / "model_config.yaml", **(adapters if work["lora"] else {}))
    options |= {"train": train, "eval": EvalArgs(interval=10**9, max_new_tokens=1, final_validation=False)}
    betas = [OPTIM["beta1"], OPTIM["beta2"]]
    arguments = {"lr": OPTIM["lr"], "weight_decay": OPTIM["weight_decay"], "betas": betas, "fused": True}
    options["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": arguments}
    if not work["lora"]:
        options["resume"] = False
    kind.get_lr_scheduler = lambda optimizer, **_: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    fabric.launch(kind.main, devices=1, seed=SEED, config=config, **options)
    (folder / "record.json").write_text(json.dumps(fabric.found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
