"""What the workers run to show what is in a model when its strategy has loaded it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.dist.jobs import TinyData, module_for, trainer_for


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype, shape and bytes of a tensor, as a short text."""
    whole = tensor.detach().contiguous().cpu()
    data = whole.view(torch.uint8).numpy().tobytes() if whole.dim() else bytes(str(whole.item()), "ascii")
    return f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


class Loaded(Callback):
    """Fingerprints of all tensors, gathered, before the first step."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Every rank gathers; parameters by name, then buffers, those that no file holds too."""
        state = trainer.strategy.lightning_module_state_dict()
        for name, tensor in [*state.items(), *pl_module.named_buffers()]:
            clean = name.replace("_fsdp_wrapped_module.", "").removeprefix("model.")
            if clean.startswith("_val_metrics") or clean.startswith("_test_metrics"):
                continue
            full: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            self.found[clean] = fingerprint(full)


def load_and_fingerprint(model: str, engine: str, seed: int = 11) -> dict[str, str]:
    """Fingerprints of the whole model by name, from a folder or a config."""
    torch.manual_seed(seed)
    loaded = Loaded()
    trainer = trainer_for({"engine": engine, "precision": "fp32"}, [loaded], max_steps=1)
    trainer.fit(module_for(model), datamodule=TinyData())
    return loaded.found
