"""Peak host memory per rank while a model is loaded, each figure from fresh processes; tests/dist holds it to its aim.

    RANK=0 WORLD_SIZE=2 ... python loading.py ENGINE MODEL_FOLDER OUT

loads once, up to the first training step, with fp32 weights at rest; ``qlora`` is fsdp2 with a base in NF4. What is
counted is the resident set, mapped pages of files included, above the one after the imports; the aim is (the rank's
shard + the largest unit + an allowance).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from lit_fsdp.host import free_port
from tests.benchmarks.record import python

MB = 1_000_000


def write_random_llama(folder: Path, shape: dict[str, Any]) -> Path:
    """A Llama folder with random bf16 weights in files of 30 MB, and a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lit_fsdp.models.tokenizers import miniature_tokenizer

    LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(folder, max_shard_size="30MB")
    miniature_tokenizer().save_pretrained(folder)
    return folder


def measure(engine: str, model: Path, ranks: int) -> list[dict[str, Any]]:
    """Of each rank of one fresh run ``imported_bytes``, ``peak_bytes``, ``held_bytes`` and counts of parameters."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": 0}
    meeting |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    places = [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        python([__file__, engine, model, folder], ranks, places, OMP_NUM_THREADS="1")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def above_imports(record: dict[str, Any]) -> int:
    """Bytes that loading took at most, above what was resident after the imports."""
    return record["peak_bytes"] - record["imported_bytes"]


def bound(record: dict[str, Any], allowance: int) -> int:
    """The aim in bytes: the rank's shard, the largest unit in fp32, and an allowance."""
    return record["held_bytes"] + 4 * record["largest_unit"] + allowance


def load(engine: str, folder: str, out: Path) -> None:
    """Our module under our strategy, in an ordinary Trainer, whose process ends before the first step."""
    import torch
    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader
    from transformers.models.llama import LlamaForCausalLM

    from lit_fsdp import CausalLMModule, fsdp_strategy
    from lit_fsdp.metrics.hardware import peak_host_bytes, reset_peak_host_bytes

    class Measure(Callback):
        """Writes the record of this rank when all ranks are here."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            audit = trainer.strategy.audit
            params = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in module.parameters()]
            assert sum(int(param.count_nonzero()) for param in params)  # a file may be mapped but not read yet
            record = {"imported_bytes": imported, "peak_bytes": peak_host_bytes(), "num_params": audit["num_params"]}
            record["held_bytes"] = sum({param.data_ptr(): param.nbytes for param in params if param.numel()}.values())
            record["largest_unit"] = max(unit["num_params"] for unit in audit["units"])
            Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(record))
            trainer.strategy.barrier()
            os._exit(0)  # nothing is to be trained

    model: dict[str, Any] = {}
    if engine == "qlora":
        import bitsandbytes
        import peft

        assert bitsandbytes.__name__ != peft.__name__  # imported before anything is measured
        engine, model = "fsdp2", {"lora": {"quantize": "nf4"}}
    strategy: Any = fsdp_strategy(engine=engine, wrap={"max_root_share": 1.0})  # type: ignore[arg-type]
    assert LlamaForCausalLM  # its code is imported before memory is counted
    reset_peak_host_bytes()
    imported = peak_host_bytes()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    options = {"accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "max_steps": 1}
    trainer = Trainer(**options, strategy=strategy, callbacks=[Measure()], **dict.fromkeys(quiet, False))
    trainer.fit(CausalLMModule(name=folder, optim={"schedule": "constant"}, **model), DataLoader([torch.zeros(1)]))


if __name__ == "__main__":
    load(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
