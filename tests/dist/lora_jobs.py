"""Runs with adapters, and the plain loop of peft they are held against."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
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
    folder: str,
    strategy: dict[str, Any],
    model: dict[str, Any],
    run: str | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Ten steps; losses, what is trained, and whether the frozen rest stayed as it was. Saves every fifth in run."""
    torch.manual_seed(SEED)
    losses = Losses()
    callbacks = [losses] if run is None else [losses, Checkpoint(every_steps=5)]
    trainer = trainer_for(strategy, callbacks, **{"max_steps": 10, "default_root_dir": run, **options})
    module = lora_module(folder, **model)
    trainer.fit(module, datamodule=TinyData(), ckpt_path=ckpt_path)
    live: Any = trainer.strategy
    names = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in module.named_parameters()}
    owner = live.model if strategy["engine"] == "fsdp1" else module
    state = {name: t for name, t in get_model_state_dict(owner).items() if name in names}  # a checkpoint's is a part
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
        "changed": sorted(n for n, t in kept.items() if n in base and not torch.equal(t, base[n].to(t.dtype))),
        "dtypes": live.contract.report(),
        "names": sorted(full),
        "trained": sorted(name for name, param in names.items() if param.requires_grad),
        "only_trained_are_optimized": held == trained,
    }


def peft_losses(folder: str, lora: dict[str, Any], steps: int = 10) -> list[float]:
    """Plain peft in one process in fp32, from the same random adapters: the loss of each global batch."""
    source = resolve_model(ModelConfig(name=folder), 0)
    meta = build_on_meta(source.hf_config)
    settings = apply_lora(meta, LoraConfig(**lora))
    weights = LoraWeights(open_weights(source, build_on_meta(source.hf_config), SEED), meta, SEED)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
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
