"""Runs in which something about the parts of a row is wrong, and somebody's own module that cuts its rows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lit_fsdp.models.loss import ONE_ROW
from lit_fsdp.models.parts import RowParts
from tests.dist.jobs import TinyData, fit, here
from tests.dist.packing_jobs import packed_run


def faulty_run(fault: str, **job: Any) -> dict[str, Any]:
    """A run of packs in which positions are those of the wrong rank, packs see each other across the cut, ..."""
    cut = RowParts.cut

    def wrong(context: RowParts, batch: Any) -> dict[str, Any]:
        found = cut(context, batch)
        row = found[ONE_ROW]
        if fault == "positions":
            row["position_ids"] = torch.arange(row["position_ids"].shape[1])[None]
        elif fault == "leak":
            row["sample_lengths"] = (sum(row["sample_lengths"]),)
        elif fault == "lost label":
            row["taken"][-20:] = -1
        elif fault == "counted twice":
            found["counts"] = cut(context, {**batch, "counts": batch["counts"]})["counts"] + batch["counts"]
        return found

    with mock.patch.object(RowParts, "cut", wrong):
        return packed_run(**job)


class OwnModule(LightningModule):
    """A language model whose steps are written out."""

    cuts_rows = True

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder).float()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        context: Any = getattr(self.trainer.strategy, "context", None)
        if context is None:
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        else:
            moved = move_data_to_device(context.cut(batch), self.device)
            assert moved[ONE_ROW]["context"] is context  # Lightning copies what it takes for data
            inputs = context.inputs(batch)
            targets = inputs.pop("targets")
        num_targets = (targets != -100).sum()
        dist.all_reduce(num_targets)
        logits = self.model(**inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / num_targets
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        self.log("train_loss", whole)
        return loss * here()[1]  # by which the engine divides

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def own_run(folder: str, degree: int, **more: Any) -> list[float]:
    """Three steps of :class:`OwnModule`, all ranks one group."""
    strategy = {"engine": "fsdp2", "precision": "fp32", "context_parallel": degree, **more}
    _, found = fit(OwnModule(folder), strategy, [], TinyData(), None, 3)
    return found["losses"]


def named_mesh(folder: str, **strategy: Any) -> list[Any]:
    """After a step of :class:`OwnModule`: the ranks of the mesh, this rank's groups, that of its context, the loss."""
    strategy = {"engine": "fsdp2", "precision": "fp32", **strategy}
    trainer, found = fit(OwnModule(folder), strategy, [], TinyData(), None, 1)
    live: Any = trainer.strategy
    mesh = live.context_mesh
    groups = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    own = dist.get_process_group_ranks(live.context.group)
    return [mesh.mesh.tolist(), groups, own, found["losses"]]
