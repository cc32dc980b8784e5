"""Runs whose recipe adds tokens, on rows that use them, and the plain loop they are held against."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_fsdp import Checkpoint
from lit_fsdp.config.model import ModelConfig
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.jobs import FromStep, Rows, TinyData, fit, module_for
from tests.dist.lora_jobs import SEED, with_adapters
from tests.dist.reference import global_batch, loop, step_loss

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

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        rows = _Rows(self.trainer.global_rank, self.trainer.world_size, self.trainer.accumulate_grad_batches)
        return DataLoader(FromStep(rows, self.trainer), batch_size=None, generator=torch.Generator())


def train_grown(
    folder: str, strategy: dict[str, Any], run: str, ckpt_path: str | None = None, **model: Any
) -> list[float]:
    """Losses of six steps, or of what is left of them; saves every third step in ``run``."""
    module, saving = module_for(folder, {"add_tokens": TOKENS, **model}), Checkpoint(every_steps=3)
    _, found = fit(module, strategy, [saving], GrownData(), ckpt_path, 6, SEED, default_root_dir=run)
    return found["losses"]


def grown_model(folder: str) -> PreTrainedModel:
    """Plain transformers: the model resized, its new rows set to the mean of the old ones."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    means = [module.weight.detach().double().mean(0).float() for module in ends]
    model.resize_token_embeddings(FIRST + len(TOKENS), mean_resizing=False)
    for module, mean in zip((model.get_input_embeddings(), model.get_output_embeddings()), means, strict=True):
        module.weight.data[FIRST:] = mean
    return model.train()


def grown_losses(folder: str, lora: dict[str, Any] | None) -> list[float]:
    """Plain PyTorch, and peft from the same random adapters, in one process: the loss of each global batch."""
    model: Any = grown_model(folder)
    if lora is not None:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        model = with_adapters(model, ModelConfig(name=folder, add_tokens=TOKENS), lora).model
        for module in ends:
            module.requires_grad_(True)
    return loop(model, lambda step: step_loss(model, with_new_tokens(global_batch(step))), 6)
