"""Saves in the background off a device: the default there, through pinned memory, with the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_fsdp import CausalLMModule, Checkpoint, fsdp_strategy
from lit_fsdp.checkpoint.store import BackgroundSaver
from tests.dist.async_jobs import tensors_of
from tests.dist.jobs import Losses, TinyData
from tests.dist.reference import LEARNING_RATE


def train(folder: Path, accelerator: str, run: Path, engine: Any, async_save: bool | None) -> dict[str, Any]:
    """Six steps, saved after every second one."""
    torch.manual_seed(7)
    losses, saving = Losses(), Checkpoint(every_steps=2, keep_last=-1, async_save=async_save)
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=fsdp_strategy(engine=engine),
        callbacks=[losses, saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=-1,
        max_steps=6,
        deterministic=True,
        default_root_dir=str(run),
    )
    trainer.fit(CausalLMModule(name=str(folder), optim={"lr": LEARNING_RATE, "schedule": "constant"}), TinyData())
    torch.distributed.destroy_process_group()
    return {"losses": losses.values, "saver": saving._background}


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_the_same_bytes_as_a_save_that_training_waits_for(
    tiny_model: Path, tmp_path: Path, accelerator: str, device: str, engine: str
) -> None:
    waited = train(tiny_model, accelerator, tmp_path / "sync", engine, async_save=False)
    wanted = None if device == "cuda" else True  # null means true on CUDA
    went_on = train(tiny_model, accelerator, tmp_path / "async", engine, async_save=wanted)
    assert waited["saver"] is None
    assert isinstance(went_on["saver"], BackgroundSaver)
    assert went_on["losses"] == waited["losses"]
    saved, expected = tensors_of(str(tmp_path / "async")), tensors_of(str(tmp_path / "sync"))
    assert list(saved) == ["step-00000002", "step-00000004", "step-00000006"]
    assert saved == expected


def test_what_the_device_computes_later_is_not_saved(tmp_path: Path, device: str) -> None:
    saver = BackgroundSaver(torch.device(device, 0) if device == "cuda" else torch.device("cpu"), 30.0)
    tensor = torch.zeros(1 << 22, device=device)
    for step in range(1, 4):
        tensor.add_(1)
        parts: dict[str, Any] = {"state": {}, "manifest": {"global_step": step}, "layout": "sharded"}
        saver.save(tmp_path / f"step-{step:08d}", tensors={"model/w": tensor}, **parts)
        tensor.add_(100).sub_(100)
    saver.close()
    for step, hashes in enumerate(tensors_of_folder(tmp_path), start=1):
        assert hashes == float(step)


def tensors_of_folder(folder: Path) -> list[float]:
    """The one value of each checkpoint's only tensor."""
    from lit_fsdp.checkpoint.store import load_tensors

    found = []
    for path in sorted(folder.iterdir()):
        into = torch.empty(1 << 22)
        load_tensors(path, {"model/w": into})
        assert into.min() == into.max()
        found.append(float(into[0]))
    return found
