"""What is to be seen on the first day with a GPU: NCCL, precision modes, kernels, memory, saves, and how fast it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_fsdp import Checkpoint
from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.metrics.hardware import peak_flops
from tests.dist.jobs import Losses, TinyData, module_for, trainer_for
from tests.dist.reference import TINY, global_batch, loop, save_tiny, step_loss
from tests.gpu.conftest import DRY_RUN
from tests.runs import content

DEVICE, ACCELERATOR = ("cpu", "cpu") if DRY_RUN else ("cuda", "gpu")
ENGINES = ("fsdp2", "fsdp1")
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # what kernels of fp8 and FlexAttention ask for
ONE_BILLION = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
ONE_BILLION |= {"num_key_value_heads": 8, "max_position_embeddings": 4096}
NO_OFFLOAD = pytest.mark.skipif(DRY_RUN, reason="FSDP1 offloads from accelerators only")


def save_model(folder: Path, **changes: Any) -> Path:
    """The tiny model of other tests with these changes, as a folder."""
    tiny = {name: value for name, value in TINY.to_dict().items() if name != "head_dim"}
    return save_tiny(folder, LlamaConfig(**{**tiny, "hidden_size": 64, "intermediate_size": 128, **changes}))


class Batches(LightningDataModule):
    """One global batch per step, large enough for its activations to be most of the memory."""

    def train_dataloader(self) -> DataLoader[Any]:
        batches = [global_batch(step, *((2, 32) if DRY_RUN else (8, 2048))) for step in range(20)]
        return DataLoader(batches, batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]


class Peak(Callback):
    """The largest allocation of the device after the first step, which makes the optimizer state; 0 on a CPU."""

    num_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if torch.cuda.is_available():
            if trainer.global_step == 1:
                torch.cuda.reset_peak_memory_stats()
            self.num_bytes = torch.cuda.max_memory_allocated()


def train(
    folder: Path,
    strategy: dict[str, Any],
    max_steps: int = 6,
    data: LightningDataModule | None = None,
    model: dict[str, Any] | None = None,
    saving: Checkpoint | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses, realized dtypes, logged metrics, backend and peak memory of a run in a process group of its own."""
    torch.manual_seed(7)
    losses, peak = Losses(), Peak()
    options |= {"accelerator": ACCELERATOR, "log_every_n_steps": 1, "max_steps": max_steps}
    trainer = trainer_for(strategy, [losses, peak, Throughput(), *([saving] if saving else [])], **options)
    try:
        trainer.fit(module_for(str(folder), model), datamodule=data or TinyData())
        live: Any = trainer.strategy
        return {
            "losses": losses.values,
            "realized": {what: set(found) for what, found in live.contract.report()["realized"].items()},
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "backend": torch.distributed.get_backend(),
            "peak_bytes": peak.num_bytes,
        }
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def plain_losses(folder: Path) -> list[float]:
    """Losses of a plain fp32 PyTorch loop on the same batches, on the same device."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).train()

    def loss_of(step: int) -> torch.Tensor:
        return step_loss(model, {name: tensor.to(DEVICE) for name, tensor in global_batch(step).items()})

    return loop(model, loss_of, 6)


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        *((engine, {}) for engine in (*ENGINES, "ddp", "single")),
        *((e, {"compile": True}) for e in ENGINES),
        pytest.param("fsdp1", {"cpu_offload": True}, marks=NO_OFFLOAD),
    ],
)
def test_one_rank_over_nccl_is_the_plain_loop(tiny_model: Path, engine: str, options: dict[str, Any]) -> None:
    found = train(tiny_model, {"engine": engine, "precision": "fp32", **options}, gradient_clip_val=1e9)
    assert found["backend"] == ("gloo" if DRY_RUN else "nccl")
    assert found["losses"] == pytest.approx(plain_losses(tiny_model), rel=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_precision(tiny_model: Path, engine: str) -> None:
    """Dtypes read back, and losses near a plain fp32 loop; bf16 has 8 bits of mantissa. A known peak gives an MFU."""
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
        if mode == "mixed":
            known = DEVICE == "cuda" and peak_flops(torch.cuda.get_device_name(), "bf16") is not None
            assert ("mfu" in found["metrics"]) == known
            assert not known or 0 < found["metrics"]["mfu"] < 1


@pytest.mark.parametrize("engine", ENGINES)
def test_fp8_follows_bf16(tmp_path: Path, engine: str) -> None:
    if DRY_RUN or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs an NVIDIA Hopper GPU or newer")
    pytest.importorskip("torchao", reason="fp8 needs torchao")
    folder = save_model(tmp_path / "model", **WIDE)
    found = train(folder, {"engine": engine, "precision": "fp8"})
    assert found["realized"]["parameters after set-up"] == {"fp32"}
    assert found["losses"] == pytest.approx(plain_losses(folder), rel=0.1)


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
        results[name] = train(folder, {"engine": engine, **options}, max_steps=3, data=Batches())
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
