"""What the workers run to show what is in a model when its strategy has loaded it."""

from __future__ import annotations

import ctypes
import hashlib
import resource
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.parallel import kept_memory
from tests.dist.jobs import TinyData, module_for, train, trainer_for


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


def memory_after_training(folder: str, strategy: dict[str, Any], steps: int) -> dict[str, int]:
    """Page faults of five blocks of 40 MiB, one after the other, and how often freed memory was given back."""
    given_back: list[int] = []
    with mock.patch.object(kept_memory, "return_freed_memory", lambda: given_back.append(1)):
        train(folder, strategy, steps)
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which a block would need few
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        bytearray(40 * 2**20)
    return {"faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, "given_back": len(given_back)}
