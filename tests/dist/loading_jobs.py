"""Shows what is in a model when its strategy has loaded it."""

from __future__ import annotations

import hashlib

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.dist.jobs import fit, module_for, whole


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype, shape and bytes of a tensor, as a short text."""
    found = tensor.detach().contiguous()
    data = found.view(torch.uint8).numpy().tobytes() if found.dim() else bytes(str(found.item()), "ascii")
    return f"{found.dtype} {list(found.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


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
            self.found[clean] = fingerprint(whole(tensor))


def load_and_fingerprint(model: str, engine: str, seed: int = 11) -> dict[str, str]:
    """Fingerprints of the whole model by name, from a folder or a config."""
    loaded = Loaded()
    fit(module_for(model), {"engine": engine, "precision": "fp32"}, [loaded], steps=1, seed=seed)
    return loaded.found
