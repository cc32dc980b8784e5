"""The job of test_optimizers.py: a run with any optimizer, and what a rank keeps for it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lit_fsdp import CausalLMModule, Checkpoint
from tests.dist.jobs import Losses, TinyData, trainer_for


def plain_parts(tensor: Any) -> list[torch.Tensor]:
    """What this rank has of a tensor; of 8-bit state the codes, the scales and the table."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return [local.codes, local.scale, local.qmap] if is_traceable_wrapper_subclass(local) else [local]


@torch.no_grad()
def optimized_run(
    folder: str, run: str, strategy: dict[str, Any], steps: int, model: dict[str, Any], ckpt_path: str | None = None
) -> dict[str, Any]:
    """Losses, a hash of parameters and state, the bytes of the state, and how much of it is kept in 8 bits."""
    torch.manual_seed(3)
    losses = Losses()
    callbacks = [losses, Checkpoint(every_steps=3, keep_last=-1)]
    trainer = trainer_for({"precision": "fp32", **strategy}, callbacks, max_steps=steps, default_root_dir=run)
    module = CausalLMModule(name=folder, **model)
    # torchao compiles its step for every shape, which takes a minute and is not what is looked at
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        trainer.fit(module, datamodule=TinyData(), ckpt_path=ckpt_path)
    optimizer: Any = trainer.optimizers[0]
    state = getattr(optimizer, "_optimizer", optimizer).state
    tensors = [t for _, p in sorted(module.named_parameters()) if p in state for t in state[p].values() if t.dim()]
    digest = hashlib.sha256()
    for tensor in (*module.parameters(), *tensors):
        for part in plain_parts(tensor):
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b"")
    return {
        "losses": losses.values,
        "digest": digest.hexdigest(),
        "state_bytes": sum(part.numel() * part.element_size() for t in tensors for part in plain_parts(t)),
        "in_codes": sum(len(plain_parts(tensor)) > 1 for tensor in tensors),
        "sum_of_state": sum(float(part.double().sum()) for t in tensors for part in plain_parts(t)[:2]),
    }
