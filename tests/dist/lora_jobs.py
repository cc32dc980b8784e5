"""Runs with adapters or added tokens, and the plain loops they are held against."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoModelForCausalLM

from lit_fsdp import Checkpoint, EMAWeights
from lit_fsdp.checkpoint import export as export_module
from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.lora import LoraWeights, apply_lora
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.models.weights import open_weights
from lit_fsdp.parallel import activation
from tests.dist.jobs import Rows, TinyData, fit, keep_whole, module_for, program, whole
from tests.dist.reference import global_batch, loop, step_loss

SEED = 11


def train_lora(
    folder: str, strategy: dict[str, Any], model: dict[str, Any], run: str | None = None, ckpt_path: str | None = None
) -> dict[str, Any]:
    """Six steps; what a run finds, what is trained, and whether the frozen rest stayed as it was; every third saved."""
    activation.BACKEND = "aot_eager"  # of what it compiles, as inductor takes minutes on two ranks
    ema = EMAWeights(decay=0.5)
    callbacks = [] if run is None else [ema, Checkpoint(every_steps=3)]
    module = module_for(folder, model)
    trainer, found = fit(module, strategy, callbacks, None, ckpt_path, 6, SEED, default_root_dir=run)
    names = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in module.named_parameters()}
    live: Any = trainer.strategy
    owner = live.model if strategy["engine"] == "fsdp1" else module
    state = {name: t for name, t in get_model_state_dict(owner).items() if name in names}  # a checkpoint's is a part
    full = {name.removeprefix("model."): whole(tensor) for name, tensor in state.items()}
    if run is not None:
        keep_whole(trainer, f"{run}/averages.pt", ema.state_dict()["weights"])
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    kept = {name.replace(".base_layer", ""): t for name, t in full.items() if "lora_" not in name}
    if run is not None and trainer.is_global_zero:
        torch.save(full, f"{run}/live.pt")
    held = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    return found | {
        "changed": sorted(n for n, t in kept.items() if n in base and _differ(t, base[n])),
        "names": sorted(full),
        "trained": sorted(name for name, param in names.items() if param.requires_grad),
        "only_trained_are_optimized": held == {id(p) for p in module.parameters() if p.requires_grad},
    }


def _differ(live: torch.Tensor, stored: torch.Tensor) -> bool:
    """From a tensor of a file as it rests in a run: cast, or packed as bitsandbytes does it."""
    rests = stored.to(live.dtype)
    if live.shape != stored.shape:
        from bitsandbytes.functional import quantize_4bit

        rests = quantize_4bit(stored, quant_type="nf4", quant_storage=live.dtype)[0]
    return not torch.equal(live.view(torch.uint8), rests.view(torch.uint8))  # packed weights may look like nan


def peft_losses(
    folder: str, lora: dict[str, Any], steps: int = 6, dtype: torch.dtype = torch.float32, **options: Any
) -> list[float]:
    """Plain peft in one process, from the same random adapters: the loss of each global batch.

    ``dtype`` is the base's, and ``options`` are further ones of ``from_pretrained``; adapters are fp32 and, beside a
    base in bf16, computed under autocast.
    """
    options = {"attn_implementation": "sdpa", **options}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).train()
    model = with_adapters(base, ModelConfig(name=folder), lora)

    def loss_of(step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return step_loss(model, global_batch(step))

    return loop(model, loss_of, steps)


def with_adapters(base: torch.nn.Module, config: ModelConfig, lora: dict[str, Any]) -> peft.LoraModel:
    """Plain peft around a model, its random tensors those that a run of this config starts from."""
    source = resolve_model(config)
    meta, bare = build_on_meta(source.hf_config), build_on_meta(source.hf_config)
    settings = apply_lora(meta, LoraConfig(**lora))
    weights = LoraWeights(open_weights(source, bare, SEED), meta, SEED)
    model = peft.LoraModel(base, peft.PeftConfig.from_peft_type(**{**settings, "inference_mode": False}), "default")
    for name, module in meta.named_modules():
        if ".lora_A." in name:  # the only random ones; peft's own start is kept everywhere else
            model.model.get_submodule(name).weight.data.copy_(weights.read(name, module, "weight"))
    return model


def tampered_export(words: list[str], cwd: str) -> None:
    """``lit-fsdp export`` on a disk that turns one bit of every weight file round."""
    write = export_module._write_file

    def flipping(path: Any, *rest: Any) -> list[str]:
        large = write(path, *rest)
        data = bytearray(path.read_bytes())
        data[-2] ^= 4
        path.write_bytes(data)
        return large

    export_module._write_file = flipping
    program(words, cwd)


TOKENS = ["<|tool|>", "<|think|>"]
FIRST = len(miniature_tokenizer())


def with_new_tokens(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reference's batch with two of its ids replaced by those of the new tokens."""
    return {
        name: tensor if name == "attention_mask" else tensor.where((tensor != 5) & (tensor != 9), FIRST + tensor // 9)
        for name, tensor in batch.items()
    }


class _Rows(Rows):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return with_new_tokens(super().__getitem__(index))


class GrownData(TinyData):
    """:class:`TinyData` with new tokens in every batch."""

    rows = _Rows


def train_grown(
    folder: str, strategy: dict[str, Any], run: str, ckpt_path: str | None = None, **model: Any
) -> list[float]:
    """Losses of six steps, or of what is left of them; saves every third step in ``run``."""
    module, saving = module_for(folder, {"add_tokens": TOKENS, **model}), Checkpoint(every_steps=3)
    _, found = fit(module, strategy, [saving], GrownData(), ckpt_path, 6, SEED, default_root_dir=run)
    return found["losses"]


def grown_losses(folder: str, lora: dict[str, Any] | None) -> list[float]:
    """Of each global batch, in one process: plain transformers, resized, new rows at the mean of the old; or peft."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    means = [module.weight.detach().double().mean(0).float() for module in ends]
    model.resize_token_embeddings(FIRST + len(TOKENS), mean_resizing=False)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for module, mean in zip(ends, means, strict=True):
        module.weight.data[FIRST:] = mean
    if lora is not None:
        model = with_adapters(model, ModelConfig(name=folder, add_tokens=TOKENS), lora).model
        for module in ends:
            module.requires_grad_(True)
    return loop(model, lambda step: step_loss(model, with_new_tokens(global_batch(step))), 6)
