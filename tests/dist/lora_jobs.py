"""Runs with adapters, and the plain loop of peft they are held against."""

from __future__ import annotations

from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM

from lit_fsdp import Checkpoint
from lit_fsdp.checkpoint import export as export_module
from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.lora import LoraWeights, apply_lora
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.weights import open_weights
from lit_fsdp.parallel import activation
from tests.dist.jobs import fit, module_for, program, whole
from tests.dist.reference import global_batch, loop, step_loss

SEED = 11


def train_lora(
    folder: str, strategy: dict[str, Any], model: dict[str, Any], run: str | None = None, **options: Any
) -> dict[str, Any]:
    """Ten steps; what a run finds, what is trained, and whether the frozen rest stayed as it was; saved in ``run``."""
    activation.BACKEND = "aot_eager"  # of what it compiles, as inductor takes minutes on two ranks
    callbacks = [] if run is None else [Checkpoint(every_steps=10)]
    module = module_for(folder, model)
    trainer, found = fit(module, strategy, callbacks, seed=SEED, **{"default_root_dir": run, **options})
    state = trainer.strategy.lightning_module_state_dict()
    full = {name.removeprefix("model."): whole(tensor) for name, tensor in state.items()}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    kept = {name.replace(".base_layer", ""): t for name, t in full.items() if "lora_" not in name}
    if run is not None and trainer.is_global_zero:
        torch.save(full, f"{run}/live.pt")
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    return found | {
        "changed": sorted(name for name, t in kept.items() if name in base and not torch.equal(t.float(), base[name])),
        "names": sorted(full),
        "only_trained_are_optimized": held == {id(p) for p in module.parameters() if p.requires_grad},
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
    return loop(model, lambda step: step_loss(model, global_batch(step)), steps)


def tampered_export(words: list[str], cwd: str) -> None:
    """``lit-fsdp export`` on a disk that turns one bit of every weight file round."""
    write = export_module._write_file

    def flipping(path: Any, *rest: Any) -> None:
        write(path, *rest)
        data = bytearray(path.read_bytes())
        data[-2] ^= 4
        path.write_bytes(data)

    export_module._write_file = flipping
    program(words, cwd)
