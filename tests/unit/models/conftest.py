"""Tiny models of the families that are supported, a cache of the test's own, and a way to fill a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lit_fsdp.models.weights import Weights

_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_IDS = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
_TINY: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "tie_word_embeddings": True, "pad_token_id": 5},
    "mistral": {**_LLAMA, "sliding_window": 8},
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {**_LLAMA, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {**_LLAMA, "pad_token_id": 0},
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**_LLAMA, "num_key_value_heads": 4},
    "opt": {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
}


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **{**_IDS, **_TINY[model_type], **changes})


def fill_from(weights: Weights, meta: PreTrainedModel) -> PreTrainedModel:
    """A CPU model every tensor of which was read by name; tied ones stay tied."""
    names = {id(module): name for name, module in meta.named_modules()}
    meta.to_empty(device="cpu").tie_weights()
    for module in meta.modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                tensor.data.copy_(weights.read(names[id(module)], module, attribute))
    return meta.eval()


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.fixture(params=sorted(_TINY))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny() -> Callable[..., PretrainedConfig]:
    return tiny_config


@pytest.fixture
def fill() -> Callable[[Weights, PreTrainedModel], PreTrainedModel]:
    return fill_from


@pytest.fixture
def tensors() -> Callable[[nn.Module], dict[str, torch.Tensor]]:
    return own_tensors


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Writes a random tiny model to a folder with save_pretrained."""

    def save(model_type: str, **options: Any) -> Path:
        config = tiny_config(model_type, **options.pop("config", {}))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        folder = tmp_path / f"{model_type}-model"
        model.save_pretrained(folder, **options)
        return folder

    return save


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
