"""Tiny models of the families that are supported, a cache of the test's own, and a way to fill a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.weights import Weights, open_weights
from tests.unit.models import families


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    own = {"tie_word_embeddings": True, "pad_token_id": 5} if model_type == "llama" else {}
    return type(config := families.tiny(model_type))(**{**config.to_dict(), **own, **changes})


def fill(weights: Weights, meta: PreTrainedModel) -> PreTrainedModel:
    """A CPU model every tensor of which was read by name; tied ones stay tied."""
    names = {id(module): name for name, module in meta.named_modules()}
    meta.to_empty(device="cpu").tie_weights()
    for module in meta.modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                tensor.data.copy_(weights.read(names[id(module)], module, attribute))
    return meta.eval()


def opened(folder: Path, **options: Any) -> tuple[Any, Weights, PreTrainedModel]:
    """What a model folder is resolved to, its weights, and the model on meta."""
    source = resolve_model(ModelConfig(name=str(folder), **options))
    model = build_on_meta(source.hf_config, "eager")
    return source, open_weights(source, model, 1), model


@pytest.fixture
def tiny() -> Callable[..., PretrainedConfig]:
    return tiny_config


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change the tensors in the one file of a model folder."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def to_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of GPT-OSS in a folder by others in MXFP4; returns what transformers unpacks them to."""
    config, packed = json.loads((folder / "config.json").read_text()), {}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))

    def pack(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = stored.pop(name).shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            exponents = torch.randint(110, 135, blocks.shape[:3], dtype=torch.uint8)
            packed[name] = convert_moe_packed_tensors(blocks, exponents)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        return stored

    rewrite(folder, pack)
    return packed


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
