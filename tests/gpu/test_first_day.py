"""What is to be seen on the first day with a GPU: NCCL, precision modes, kernels, memory, saves, and how fast it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp import Checkpoint
from lit_fsdp.metrics.hardware import peak_flops
from tests.gpu.conftest import DRY_RUN
from tests.gpu.runs import DEVICE, Batches, plain_losses, save_model, train
from tests.runs import content

ENGINES = ("fsdp2", "fsdp1")
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # what kernels of fp8 and FlexAttention ask for
ONE_BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize("engine", [*ENGINES, "ddp", "single"])
def test_one_rank_over_nccl_is_the_plain_loop(tiny_model: Path, engine: str) -> None:
    found = train(tiny_model, {"engine": engine, "precision": "fp32"})
    assert found["backend"] == ("gloo" if DRY_RUN else "nccl")
    assert found["losses"] == pytest.approx(plain_losses(tiny_model), rel=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_precision(tiny_model: Path, engine: str) -> None:
    """Dtypes read back, and losses near a plain fp32 loop; bf16 has 8 bits of mantissa."""
    wanted = plain_losses(tiny_model)
    for mode, param, compute, tolerance in (
        ("fp32", "fp32", "fp32", 1e-4),
        ("mixed", "fp32", "bf16", 2e-2),
        ("low_precision", "bf16", "bf16", 5e-2),
        ("fp16_mixed", "fp32", "fp16", 5e-3),
    ):
        found = train(tiny_model, {"engine": engine, "precision": mode})
        for what in ("parameters after the first step", "gradients", "optimizer state after the first step"):
            assert found["realized"][what] == {param}, (mode, what)
        assert found["realized"]["gathered parameters in the forward"] == {compute}
        assert found["losses"] == pytest.approx(wanted, rel=tolerance), mode


@pytest.mark.parametrize("engine", ENGINES)
def test_fp8_follows_bf16(tmp_path: Path, engine: str) -> None:
    if DRY_RUN or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs an NVIDIA Hopper GPU or newer")
    pytest.importorskip("torchao", reason="fp8 needs torchao")
    folder = save_model(tmp_path / "model", **WIDE)
    found = train(folder, {"engine": engine, "precision": "fp8"})
    assert found["realized"]["parameters after set-up"] == {"fp32"}
    assert found["losses"] == pytest.approx(plain_losses(folder), rel=0.1)


@pytest.mark.skipif(DRY_RUN, reason="FSDP1 offloads from accelerators only")
def test_fsdp1_keeps_the_state_on_the_host(tiny_model: Path) -> None:
    strategy = {"engine": "fsdp1", "precision": "fp32", "cpu_offload": True}
    found = train(tiny_model, strategy, gradient_clip_val=1e9)
    assert found["losses"] == pytest.approx(plain_losses(tiny_model), rel=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_blocks_train_as_eager_ones(tiny_model: Path, engine: str) -> None:
    strategy = {"engine": engine, "precision": "fp32", "compile": True}
    assert train(tiny_model, strategy)["losses"] == pytest.approx(plain_losses(tiny_model), rel=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_flex_attention_trains_as_sdpa(tmp_path: Path, engine: str) -> None:
    if DRY_RUN:
        pytest.skip("FlexAttention trains on GPUs only")
    folder = save_model(tmp_path / "model", **WIDE)
    wanted = train(folder, {"engine": engine})
    found = train(folder, {"engine": engine}, model={"attn_implementation": "flex_attention"})
    assert found["losses"][0] == pytest.approx(wanted["losses"][0], rel=2e-3)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=5e-2)  # bf16


MODES: dict[str, dict[str, Any]] = {
    "none": {"activation_checkpointing": "none"},
    "every_n": {"activation_checkpointing": {"mode": "every_n", "n": 2}},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offload": {"activation_checkpointing": {"offload_activations": True}},
    "full, offload": {"activation_checkpointing": {"mode": "full", "offload_activations": True}},
    "budget 0.5": {"compile": True, "activation_checkpointing": {"mode": "memory_budget", "memory_budget": 0.5}},
    "budget 0": {"compile": True, "activation_checkpointing": {"mode": "memory_budget", "memory_budget": 0.0}},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_of_every_activation_checkpointing_mode(tmp_path: Path, engine: str) -> None:
    """On a 1B shape with a small vocabulary, so that logits do not hide the blocks; ``pytest -s`` shows the GiB."""
    folder = save_model(tmp_path / "model", **({} if DRY_RUN else ONE_BILLION))
    results: dict[str, dict[str, Any]] = {}
    for name, options in MODES.items():
        if DRY_RUN and options.get("compile"):
            continue  # minutes of C++ on a CPU; the compiler has tests of its own
        torch._dynamo.reset()
        data = Batches(2, 32) if DRY_RUN else Batches(8, 2048)
        results[name] = train(folder, {"engine": engine, **options}, max_steps=3, data=data)
        print(f"{engine} {name}: {results[name]['peak_bytes'] / 2**30:.2f} GiB peak")
    # the backward pass of attention may add in any order on CUDA, and compiled blocks round bf16 elsewhere
    assert all(found["losses"] == pytest.approx(results["none"]["losses"], rel=1e-2) for found in results.values())
    if DEVICE == "cuda":
        peak = {name: result["peak_bytes"] for name, result in results.items()}
        assert 0 < peak["full"] < peak["every_n"] < peak["none"]
        assert peak["full"] < peak["selective"] < peak["none"]
        assert peak["offload"] < peak["none"]
        assert peak["full, offload"] < peak["full"]
        assert peak["budget 0"] < peak["budget 0.5"] < peak["none"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_save_in_the_background_has_the_same_bytes(tiny_model: Path, tmp_path: Path, engine: str) -> None:
    """It goes through pinned memory, while the device computes the next step."""
    found = []
    for is_async in (False, True):
        saving, run = Checkpoint(every_steps=2, keep_last=-1, async_save=is_async), tmp_path / str(is_async)
        options = {"saving": saving, "default_root_dir": str(run), "deterministic": True}
        losses = train(tiny_model, {"engine": engine}, **options)["losses"]
        tensors = {name: data for name, data in content(run).items() if name.endswith(".safetensors")}
        found.append((losses, tensors))
    assert {Path(name).parts[1] for name in found[0][1]} == {"step-00000002", "step-00000004", "step-00000006"}
    assert found[0] == found[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_mfu_is_measured_against_the_peak_of_the_device(tiny_model: Path, engine: str) -> None:
    found = train(tiny_model, {"engine": engine, "precision": "mixed"})["metrics"]
    assert found["tokens_per_second"] > 0
    known = DEVICE == "cuda" and peak_flops(torch.cuda.get_device_name(), "bf16") is not None
    assert ("mfu" in found) == known
    if known:
        assert 0 < found["mfu"] < 1
        assert found["peak_memory_gib"] * 2**30 < torch.cuda.get_device_properties(0).total_memory
