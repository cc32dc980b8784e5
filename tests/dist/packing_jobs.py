"""Runs packed and padded, cut in any way, with a loss computed in any way, and the proof of isolation in live runs."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from lit_fsdp import CausalLMDataModule, CausalLMModule, Checkpoint
from lit_fsdp.callbacks.isolation import IsolationProof
from lit_fsdp.data.batches import collate, collate_packs
from tests.dist.jobs import fit, here, module_for, trainer_for, whole


class Proofs(IsolationProof):
    """Keeps what was proved."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    def prove(self, trainer: Trainer, batch: Any, shares: bool = False) -> dict[str, Any]:
        """As the callback does, and remembers; also whether it left random numbers and modes alone."""
        before, seen = torch.get_rng_state(), []
        embedding: Any = trainer.lightning_module.model.get_input_embeddings()  # type: ignore[union-attr, operator]
        hook = embedding.register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
        record = super().prove(trainer, batch, shares)
        hook.remove()
        same = torch.equal(before, torch.get_rng_state())
        is_training = all(child.training for child in trainer.lightning_module.model.modules())
        record |= {"left_alone": same and is_training, "tokens": sum(seen), "step": trainer.global_step}
        self.records.append(record)
        return record


def packed_run(
    folder: str,
    run: str,
    strategy: dict[str, Any],
    steps: int,
    data: dict[str, Any],
    ckpt_path: str | None = None,
    model: dict[str, Any] | None = None,
    every: int | None = None,
    grads: str | None = None,
) -> dict[str, Any]:
    """Train on generated rows; what a run finds, what was proved, and gradients as a file."""
    os.environ["LIT_FSDP_CACHE"] = f"{Path(run).parent}/cache"
    proofs, gradients = Proofs(), _Gradients()
    module = module_for(folder, model, warmup_steps=4)
    rows = {"train": "generated:60", "max_seq_length": 64, "seed": 3, **data}
    callbacks = [proofs, gradients, Checkpoint(every_steps=every, keep_last=-1)]
    run_of = {"steps": steps, "ckpt_path": ckpt_path, "default_root_dir": run, "seed": 5}
    trainer, found = fit(module, {"precision": "fp32", **strategy}, callbacks, CausalLMDataModule(**rows), **run_of)
    if grads is not None and trainer.is_global_zero:
        torch.save(torch.cat([grad.flatten() for _, grad in sorted(gradients.full.items())]), grads)
    totals = {"supervised": float(module.step_totals[0]), "slots": float(module.step_totals[4])}
    return {**found, **totals, "proofs": proofs.records}


def leaking_run(folder: str, run: str, strategy: dict[str, Any], how: str) -> None:
    """A run in which the ``mask`` overlooks packs, there is a ``2d`` one, or ``positions`` do not restart.

    Or layers declare, as those of Llama 4, that a pack of 320 tokens gets another ``scale``.
    """
    from transformers.models.llama import modeling_llama

    from lit_fsdp.data import batches

    packs = batches.collate_packs
    mask = lambda *given: {**packs(*given), "attention_mask": torch.ones_like(packs(*given)["input_ids"])}  # noqa: E731
    places: dict[str, tuple[Any, str, Any]] = {
        "mask": (
            modeling_llama.LlamaAttention,
            "forward",
            _passing_over_lengths(modeling_llama.LlamaAttention.forward),
        ),
        "2d": (batches, "collate_packs", mask),
        "positions": (modeling_llama.LlamaRotaryEmbedding, "forward", _place_as_angle),
        "scale": (modeling_llama.LlamaAttention, "floor_scale", 319),
    }
    setattr(*places[how])
    modeling_llama.LlamaAttention.attn_temperature_tuning = True
    modeling_llama.LlamaAttention.use_rope = False
    data = {"packing": True, "global_batch_size": 4, "micro_batch_size": 2, "max_seq_length": 160}
    packed_run(folder, run, strategy, 1, data)


def _passing_over_lengths(forward: Any) -> Any:
    """As a family whose attention is not given all that the model is."""
    return lambda self, *args, sample_lengths=None, **kwargs: forward(self, *args, **kwargs)


def _place_as_angle(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotations by the square of the place in the pack: they differ between places, other than rotary ones do."""
    places = torch.arange(position_ids.shape[1], device=x.device, dtype=torch.float32).expand_as(position_ids)
    angles = (places.square()[..., None] * self.inv_freq).repeat(1, 1, 2)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def validate_run(folder: str, data: dict[str, Any], strategy: dict[str, Any], **options: Any) -> dict[str, float]:
    trainer = trainer_for({"precision": "fp32", **strategy}, [], **options)
    (metrics,) = trainer.validate(CausalLMModule(name=folder), CausalLMDataModule(**data), verbose=False)
    return dict(metrics)


def train_with_loss(strategy: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Losses of a random model, and what else the last step logged; adapters start as random, not as zeros."""
    module = CausalLMModule(**{"optim": {"lr": 3e-3, "schedule": "constant"}, **model})
    trainer, run = fit(module, strategy, steps=4, seed=5)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    names = sorted(name.replace("_fsdp_wrapped_module.", "") for name, _ in module.named_parameters())
    patched = [name for name, m in module.named_modules() if "loss_forward" in repr(m.__dict__.get("forward"))]
    return {"losses": run["losses"], "metrics": metrics, "names": names, "patched": patched}


def samples() -> list[dict[str, torch.Tensor]]:
    """Sixteen samples of 6 to 14 tokens; each supervises another number of tokens, one none at all."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(16):
        ids = torch.randint(0, 40, (6 + index % 9,), generator=generator)
        labels = ids.clone()
        labels[: len(ids) if index == 4 else index % 5] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def micro_batches(packed: bool) -> list[dict[str, Any]]:
    """The samples in pairs: two padded rows, or one row that holds both and a sequence of padding."""
    found = [(sample["input_ids"].numpy(), (sample["labels"] != -100).numpy()) for sample in samples()]
    pairs = list(zip(found[::2], found[1::2], strict=True))
    return [collate_packs([pair], 2 * 14 + 1, 0) if packed else collate(pair, 0) for pair in pairs]


class _Cut(LightningDataModule):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        mine = micro_batches(self.packed)[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(mine, batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]


class _Gradients(Callback):
    """All of the first step's, as the optimizer sees them."""

    def __init__(self) -> None:
        self.full: dict[str, torch.Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.optimizers[0].register_step_pre_hook(lambda *ignored: self._keep(pl_module))

    def _keep(self, module: LightningModule) -> None:
        if self.full:
            return
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
