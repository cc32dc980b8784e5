"""Runs with adapters, and the plain loop of peft they are held against."""

from __future__ import annotations

from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from lit_fsdp import CausalLMModule, Checkpoint
from lit_fsdp.checkpoint import export as export_module
from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.lora import LoraWeights, apply_lora
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.weights import open_weights
from tests.dist.jobs import Losses, TinyData, command, trainer_for
from tests.dist.reference import LEARNING_RATE, step_loss

SEED = 11


def lora_module(folder: str, **options: Any) -> CausalLMModule:
    """Our module with adapters and the reference's optimizer."""
    optim = {"lr": LEARNING_RATE, "schedule": "constant", "weight_decay": 0.1}
    return CausalLMModule(name=folder, optim=optim, **options)


def train_lora(
    folder: str, strategy: dict[str, Any], model: dict[str, Any], run: str | None = None, **options: Any
) -> dict[str, Any]:
    """Ten steps; losses, what is trained, and whether the frozen rest stayed as it was. Saves its last step in run."""
    torch.manual_seed(SEED)
    losses = Losses()
    callbacks = [losses] if run is None else [losses, Checkpoint(every_steps=10)]
    trainer = trainer_for(strategy, callbacks, **{"max_steps": 10, "default_root_dir": run, **options})
    module = lora_module(folder, **model)
    trainer.fit(module, datamodule=TinyData())
    live: Any = trainer.strategy
    state = live.lightning_module_state_dict()
    full = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    kept = {
        name.removeprefix("model.").replace(".base_layer", ""): t for name, t in full.items() if "lora_" not in name
    }
    if run is not None and trainer.is_global_zero:
        torch.save({name.removeprefix("model."): tensor for name, tensor in full.items()}, f"{run}/live.pt")
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    return {
        "losses": losses.values,
        "audit": live.audit,
        "changed": sorted(n for n, t in kept.items() if n in base and _differ(t, _at_rest(base[n], t))),
        "dtypes": live.contract.report(),
        "names": sorted(full),
        "only_trained_are_optimized": held == trained,
    }


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # packed weights may look like nan


def _at_rest(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of a file as it rests in a run: cast, or packed as bitsandbytes does it."""
    if like.shape == base.shape:
        return base.to(like.dtype)
    from bitsandbytes.functional import quantize_4bit

    packed: torch.Tensor = quantize_4bit(base, quant_type="nf4", quant_storage=like.dtype)[0]
    return packed


def peft_losses(
    folder: str, lora: dict[str, Any], steps: int = 10, dtype: torch.dtype = torch.float32, **options: Any
) -> list[float]:
    """Plain peft in one process, from the same random adapters: the loss of each global batch.

    ``dtype`` is the base's, and ``options`` are further ones of ``from_pretrained``; adapters are fp32 and, beside a
    base in bf16, computed under autocast.
    """
    source = resolve_model(ModelConfig(name=folder), 0)
    meta = build_on_meta(source.hf_config)
    settings = apply_lora(meta, LoraConfig(**lora))
    weights = LoraWeights(open_weights(source, build_on_meta(source.hf_config), SEED), meta, SEED)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **options).train()
    config = peft.PeftConfig.from_peft_type(**{**settings, "inference_mode": False})
    model = peft.LoraModel(base, config, "default")
    for name, module in meta.named_modules():
        if ".lora_A." in name:  # the only random ones; peft's own start is kept everywhere else
            model.model.get_submodule(name).weight.data.copy_(weights.read(name, module, "weight"))
    named = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = step_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def tampered_export(words: list[str], cwd: str) -> dict[str, Any]:
    """``lit-fsdp export`` on a disk that turns one bit of every weight file round."""
    write = export_module._write_file

    def flipping(path: Any, *rest: Any) -> None:
        write(path, *rest)
        data = bytearray(path.read_bytes())
        data[-2] ^= 4
        path.write_bytes(data)

    export_module._write_file = flipping
    try:
        return command(words, cwd)
    finally:
        export_module._write_file = write
