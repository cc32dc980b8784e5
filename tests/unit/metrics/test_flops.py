"""The formula against torch's own count of what runs, operation for operation; peaks of devices by their names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.metrics.flops import ModelFlops, flop_formula, num_pairs
from lit_fsdp.metrics.hardware import host_bytes, peak_flops
from lit_fsdp.module import CausalLMModule
from lit_fsdp.parallel.activation import prepare_blocks, recomputes

ROWS, LENGTH = 2, 16
_LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 4}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gemma3_text": {**_LLAMA, "head_dim": 32, "sliding_window": 4},
    "mixtral": {**_LLAMA, **_MIXTURE},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 32},
    "deepseek_v3": {**_LLAMA, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 3},
}
_COMMON = {"num_hidden_layers": 3, "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def build(kind: str, device: str = "cpu") -> Any:
    """A model whose experts run one by one, each on its own tokens, so that what runs is what a token needs."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**_COMMON, **MODELS[kind], use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    return model.train()


def counted(model: Any) -> int:
    """FLOPs of a forward and backward pass with a head at every token, as torch sees them."""
    ids = torch.randint(3, 128, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):  # a block again is all of it
        model(input_ids=ids).logits.logsumexp(dim=-1).sum().backward()
    # angles of positions are products before transformers 5.16, and no work of a token's
    angles = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - angles


def all_pairs(formula: ModelFlops) -> tuple[ModelFlops, dict[str, float]]:
    """Eager attention computes every pair, masked or not: no windows, and twice the half that counts."""
    blocks = {name: dataclasses.replace(block, window=None) for name, block in formula.blocks.items()}
    tokens = float(ROWS * LENGTH)
    counts = {"tokens": tokens, "supervised_tokens": tokens, "squared_tokens": 2 * tokens * LENGTH}
    return dataclasses.replace(formula, blocks=blocks), counts


def test_as_torch_counts() -> None:
    cases: Any = [("llama", "none"), ("llama", "every_n"), ("llama", "selective"), *((k, "full") for k in MODELS)]
    for kind, mode in cases:
        model = build(kind)
        formula, counts = all_pairs(flop_formula(model))
        blocks = {name: model.get_submodule(name) for name in formula.blocks}
        assert len(blocks) == 3
        prepare_blocks(blocks.values(), ActivationConfig(mode=mode))
        again = formula.recomputed_flops(counts, {name: recomputes(block) for name, block in blocks.items()})
        assert again is not None
        assert (again > 0) == (mode != "none")  # eager attention is always computed again
        assert formula.train_flops(counts) + again == counted(model), (kind, mode)


def test_adapters() -> None:
    """More is counted than runs in one place: the first block's first projections need no gradient of their input."""
    peft = pytest.importorskip("peft")
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        model = peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets), build("llama"))
        formula, counts = all_pairs(flop_formula(model))
        adapters = 3 if targets == "all-linear" else 2
        spared = 2 * counts["tokens"] * (64 * 64 + 2 * 64 * 32 + adapters * 4 * 64)
        if adapters == 2:  # nor are there gradients of keys, which nothing that is trained has made
            spared += 2 * ROWS * 4 * LENGTH**2 * 16
        assert formula.train_flops(counts) - counted(model) == spared, targets


def test_pairs_of_samples_and_windows() -> None:
    lengths = [100, 3, 7]
    counts = {"tokens": float(sum(lengths)), "squared_tokens": float(sum(n * n for n in lengths))}
    assert num_pairs(counts, None) == num_pairs(counts, 100) == (100**2 + 3**2 + 7**2) / 2
    equal = {"tokens": 300.0, "squared_tokens": 3 * 100.0**2}
    assert num_pairs(equal, 10) == 3 * (10 * 100 - 10**2 / 2)
    exact = sum(n * n / 2 if n <= 10 else 10 * n - 50 for n in lengths)
    assert exact <= num_pairs(counts, 10) <= 1.1 * exact
    assert num_pairs({"tokens": 0.0, "squared_tokens": 0.0}, 4) == 0


def test_what_cannot_be_counted_is_said_and_ends_no_run() -> None:
    model = build("llama", "meta")
    model.config.layer_types = ["linear_attention"] * 3
    with pytest.raises(ValueError, match="linear_attention"):
        flop_formula(model)
    model.config.layer_types, model.config.num_hidden_layers = None, 5
    with pytest.raises(ValueError, match="list of 5 blocks"):
        flop_formula(model)
    mixture = build("mixtral", "meta")
    mixture.config.num_experts_per_tok = 0
    with pytest.raises(ValueError, match="one number of experts per token"):
        flop_formula(mixture)
    if "gemma4_text" not in CONFIG_MAPPING:  # of later releases
        return
    # the width of a head of Gemma 4 differs by layer, and its config refuses to name one
    module, meter = CausalLMModule(name={"model_type": "gemma4_text"}), Throughput()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    meter.setup(trainer, module, "fit")
    line = meter.read_device(trainer, module)
    assert line.startswith("MFU is not logged, as FLOPs are not counted: 'head_dim' is a per-layer attribute")
    assert meter.rates({}, 1.0) == {}


def test_a_part_of_a_device_has_no_known_peak() -> None:
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX 3090 with Max-Q Design"):
        assert peak_flops(name, "bf16") is None, name


def test_the_memory_of_a_host_is_limited_by_control_groups(tmp_path: Path) -> None:
    groups, own = tmp_path / "groups", tmp_path / "own"
    physical = host_bytes(groups, own)
    assert physical > 2**20
    (groups / "job" / "step").mkdir(parents=True)
    own.write_text("1:cpu:/other\n0::/job/step\n")
    for limits, wanted in (
        ({"job/step": "max"}, physical),
        ({"job/step": "max", "job": "1048576"}, 2**20),
        ({"job/step": "4096", "job": "1048576"}, 4096),
        ({"job/step": str(2 * physical), "job": "max"}, physical),
    ):
        for folder, limit in limits.items():
            (groups / folder / "memory.max").write_text(f"{limit}\n")
        assert host_bytes(groups, own) == wanted
    (groups / "memory.max").write_text("2048\n")  # of a container, which sees only its own groups
    own.write_text("0::/\n")
    assert host_bytes(groups, own) == 2048
