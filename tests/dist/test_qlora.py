"""A base in NF4: plain peft and bitsandbytes in one process, whatever is sharded; bytes, memory and resume."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lit_fsdp.models import generate
from tests.dist.forks import command, on_ranks
from tests.dist.lora_jobs import peft_losses
from tests.dist.matrix import worst_difference
from tests.dist.reference import global_batch, step_loss

NF4 = {"r": 4, "alpha": 8, "target_modules": "all-linear", "quantize": "nf4"}
_FP32, _BF16 = torch.float32, torch.bfloat16


def wanted(folder: Path, lora: dict[str, Any], dtype: torch.dtype) -> list[float]:
    """Losses of peft on the model that transformers quantizes by bitsandbytes while it loads it."""
    bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=_BF16,
        bnb_4bit_use_double_quant=lora.get("double_quantization", False),
    )
    plain = {name: value for name, value in lora.items() if name not in ("quantize", "double_quantization")}
    return peft_losses(str(folder), plain, dtype=dtype, quantization_config=bits)


@pytest.mark.parametrize(
    ("strategy", "lora", "dtype", "limit"),
    [
        ({"engine": "fsdp2", "precision": "fp32"}, NF4, _FP32, 1e-5),
        ({"engine": "fsdp2", "activation_checkpointing": "full"}, {**NF4, "double_quantization": True}, _BF16, 1e-3),
        ({"engine": "ddp"}, NF4, _BF16, 1e-3),
    ],
    ids=["fsdp2-fp32", "fsdp2-mixed-double", "ddp-mixed"],
)
def test_losses_are_those_of_peft_and_bitsandbytes(
    tiny_model: Path, strategy: dict[str, Any], lora: dict[str, Any], dtype: torch.dtype, limit: float
) -> None:
    results = on_ranks("train_lora", 2, folder=str(tiny_model), strategy=strategy, model={"lora": lora})
    assert worst_difference(results[0]["losses"], wanted(tiny_model, lora, dtype)) < limit
    assert results[0]["losses"][-1] < 0.985 * results[0]["losses"][0]
    for result in results:
        assert result["only_trained_are_optimized"]
        assert result["changed"] == []
        realized = result["dtypes"]["realized"]
        assert set(realized["packed parameters after setup"]) == {"bf16"}
        assert set(realized["parameters after the first step"]) == {"fp32"}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.23
def test_what_was_saved_is_the_model_that_was_trained(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an adapter and merged it has the loss that comes next, and refuses another base."""
    lora, fp32 = {**NF4, "double_quantization": True}, {"precision": "fp32"}
    job: dict[str, Any] = {"folder": str(tiny_model), "model": {"lora": lora}}
    (whole, _) = on_ranks("train_lora", 2, run=str(tmp_path), strategy={"engine": "fsdp2", **fp32}, **job)
    ckpt = tmp_path / "checkpoints/step-00000003"
    for form in ("adapter", "merge"):
        (done,) = command(1, ["export", "--ckpt", ckpt, "--out", form, f"--{form}", "--verify"], tmp_path)
        assert (done.code, done.err) == (0, "")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # answers in fp32 on every CPU
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)  # whose kernel wants widths of n * 32
    next_loss = torch.no_grad()(lambda model, *rest: [float(step_loss(model, global_batch(3)))])
    monkeypatch.setattr(generate, "answer_batch", next_loss)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merge")
    found = [generate.Chat(str(tmp_path / "adapter")).answer("2 + 2?"), *next_loss(merged)]
    assert found == pytest.approx([whole["losses"][3]] * 2, rel=1e-5)
    rounded = AutoModelForCausalLM.from_pretrained(tiny_model)
    for name, layer in rounded.named_modules():
        if type(layer) is nn.Linear and name != "lm_head":
            packed = quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=True)
            layer.weight.data = dequantize_4bit(*packed)
    wanted = peft.PeftModel.from_pretrained(rounded, tmp_path / "adapter").merge_and_unload().state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in merged.state_dict().items())
    other = shutil.copytree(tiny_model, tmp_path / "other")
    state = load_file(other / "model.safetensors")
    state["model.norm.weight"][0] += 1e-3
    save_file(state, other / "model.safetensors", {"format": "pt"})
    asked = ["generate", "--model", "adapter", "--prompt", "2 + 2?"]
    for words in (asked, ["export", "--ckpt", ckpt, "--out", "merged", "--merge"]):
        (done,) = command(1, [*words, "--base", "other"], tmp_path)
        assert done.code == 2
        assert re.search(r"error: --base: got \S+/other \(xxh3 \w+\), which is not the base", done.err)
