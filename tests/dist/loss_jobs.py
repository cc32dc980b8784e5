"""Runs that differ in how the loss is computed, or in how a global batch is cut."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from lit_fsdp import CausalLMModule
from tests.dist.jobs import fit, here, whole

_SAMPLES, _LENGTH = 16, 14


def train_with_loss(strategy: dict[str, Any], model: dict[str, Any], steps: int = 4) -> dict[str, Any]:
    """Losses of a random model, and what else the last step logged; adapters start as random, not as zeros."""
    module = CausalLMModule(**{"optim": {"lr": 3e-3, "schedule": "constant"}, **model})
    trainer, run = fit(module, strategy, steps=steps, seed=5)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    names = sorted(name.replace("_fsdp_wrapped_module.", "") for name, _ in module.named_parameters())
    patched = [name for name, m in module.named_modules() if "loss_forward" in repr(m.__dict__.get("forward"))]
    return {"losses": run["losses"], "metrics": metrics, "names": names, "patched": patched}


def samples() -> list[dict[str, torch.Tensor]]:
    """Sixteen samples of different lengths; each supervises another number of tokens, one none at all."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(_SAMPLES):
        ids = torch.randint(0, 40, (6 + index % 9,), generator=generator)
        labels = ids.clone()
        labels[: len(ids) if index == 4 else index % 5] = -100
        found.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(len(ids))})
    return found


def micro_batches(packed: bool) -> list[dict[str, torch.Tensor]]:
    """The samples in pairs: two padded rows, or one row that holds both and a sequence of padding."""
    pairs, all_samples = [], samples()
    for a, b in zip(all_samples[::2], all_samples[1::2], strict=True):
        if packed:
            fill = torch.arange(2 * _LENGTH + 1 - len(a["input_ids"]) - len(b["input_ids"]))
            ends = {"input_ids": fill * 0, "labels": fill * 0 - 100, "position_ids": fill}
            pairs.append({name: torch.cat([a[name], b[name], ends[name]])[None] for name in a})
            continue
        fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        both = [{**s, "attention_mask": torch.ones_like(s["labels"])} for s in (a, b)]
        pairs.append(
            {
                name: torch.stack(
                    [torch.cat([s[name], s[name].new_full((_LENGTH - len(s[name]),), fill)]) for s in both]
                )
                for name, fill in fills.items()
            }
        )
    return pairs


class _Cut(LightningDataModule):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        mine = micro_batches(self.packed)[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(mine, batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]


class _Gradients(Callback):
    def __init__(self) -> None:
        self.full: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.optimizers[0].register_step_pre_hook(lambda *ignored: self._keep(pl_module))

    def _keep(self, module: LightningModule) -> None:
        root: Any = module.trainer.strategy.model
        gathered: Any = nullcontext()
        if isinstance(root, FullyShardedDataParallel):
            gathered = FullyShardedDataParallel.summon_full_params(root, with_grads=True, writeback=False)
        with gathered:
            for name, param in module.named_parameters():
                grad: Any = param.grad
                if grad is not None:
                    self.full[name.replace("_fsdp_wrapped_module.", "")] = whole(grad).clone()


def gradients_of_a_cut(folder: str, file: str, engine: str, packed: bool) -> dict[str, Any]:
    """Loss of one global batch of eight micro-batches over the ranks, and its gradients in ``file``."""
    gradients, module = _Gradients(), CausalLMModule(name=folder, optim={"lr": 1e-3, "schedule": "constant"})
    accumulation = {"accumulate_grad_batches": len(micro_batches(packed)) // here()[1]}
    strategy = {"engine": engine, "precision": "fp32"}
    trainer, found = fit(module, strategy, [gradients], _Cut(packed), steps=1, seed=5, **accumulation)
    if trainer.is_global_zero:
        torch.save(gradients.full, Path(file))
    return {"loss": found["losses"][0], "tokens": float(module.step_totals[0])}
