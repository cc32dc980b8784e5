"""One rank that loads a model in one way and writes how much memory that took; started fresh for every figure.

    RANK=0 WORLD_SIZE=2 ... python load_once.py SIDE MODEL_FOLDER OUT.json

SIDE is ``fsdp2`` or ``fsdp1`` (our strategy, up to the first training step), ``qlora`` (fsdp2 and a base in NF4),
``transformers`` (``from_pretrained`` on
every rank) or ``accelerate`` (``init_empty_weights`` and ``load_checkpoint_in_model``, then ``fully_shard``). Its FSDP
with ``cpu_ram_efficient_loading`` cannot be measured here: with ``cpu=True`` an Accelerator 1.15 that is given an FSDP
plugin becomes ``MULTI_CPU``, which replicates. Weights are fp32 at rest on all sides. What is counted is the resident
set, mapped pages of files included, above the one after the imports.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaForCausalLM

from lit_fsdp.metrics.hardware import peak_host_bytes, reset_peak_host_bytes

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main(side: str, folder: str, out: Path) -> None:
    """Import, note the resident set, load, write the peak."""
    if side in ("fsdp2", "fsdp1"):
        load_ours(side, folder, out)
    elif side == "qlora":
        import bitsandbytes
        import peft

        assert bitsandbytes.__name__ != peft.__name__  # imported before anything is measured
        load_ours("fsdp2", folder, out, lora={"quantize": "nf4"})
    elif side == "transformers":
        imported = start()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        finish(out, imported, model)
    else:
        load_with_accelerate(folder, out)


def load_ours(engine: str, folder: str, out: Path, **model: Any) -> None:
    """Our module under our strategy, in an ordinary Trainer."""
    from lightning.pytorch import Callback, Trainer

    from lit_fsdp import CausalLMModule, fsdp_strategy

    class Measure(Callback):
        """Ends the process before the first step."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            audit = trainer.strategy.audit
            largest = max(unit["num_params"] for unit in audit["units"])
            finish(out, imported, module, num_params=audit["num_params"], largest_unit=largest)

    strategy: Any = fsdp_strategy(engine=engine, wrap={"max_root_share": 1.0})  # type: ignore[arg-type]
    imported = start()
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        callbacks=[Measure()],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = CausalLMModule(name=folder, optim={"schedule": "constant"}, **model)
    trainer.fit(module, DataLoader([torch.zeros(1)]))


def load_with_accelerate(folder: str, out: Path) -> None:
    """Accelerate's own reader into a model made by its ``init_empty_weights``, then ``fully_shard`` by hand."""
    from accelerate import init_empty_weights, load_checkpoint_in_model
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig

    imported = start()
    dist.init_process_group("gloo")
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.tie_weights()
    load_checkpoint_in_model(model, folder, device_map={"": "cpu"}, dtype=torch.float32)
    model.tie_weights()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    finish(out, imported, model)


def start() -> int:
    """The resident set now, in bytes; the peak starts here."""
    assert LlamaForCausalLM  # its code is imported on all sides before this
    reset_peak_host_bytes()
    return peak_host_bytes()


def finish(out: Path, imported: int, model: torch.nn.Module, **more: Any) -> NoReturn:
    """Write the record of this rank and end the process when all ranks are here."""
    params = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in model.parameters()]
    assert not any(param.is_meta for param in params)
    assert sum(int(param.count_nonzero()) for param in params)  # a file may be mapped but not read yet
    peak = peak_host_bytes()
    held = sum({param.data_ptr(): param.nbytes for param in params if param.numel()}.values())
    record = {"imported_bytes": imported, "peak_bytes": peak, "held_bytes": held, **more}
    out.with_suffix(f".{RANK}.json").write_text(json.dumps(record))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # nothing is to be trained


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
