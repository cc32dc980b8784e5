"""Backends of the loss on a GPU: the plain way's loss and gradients, and less memory. Kernels run where installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fsdp.config.model import LossConfig
from lit_fsdp.models.loss import LossPlan, causal_lm_forward, plan_loss
from tests.gpu.runs import train

PLAIN = LossPlan(LossConfig(backend="plain"), "plain")
_PACKAGES = {"liger": "liger_kernel"}


def _needs(backend: str) -> None:
    package = _PACKAGES.get(backend)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def _model(device: str, dtype: torch.dtype, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=32000,
        tie_word_embeddings=tied,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device, dtype)


def _batch(device: str, rows: int = 4, length: int = 256) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32000, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : length // 4] = -100
    return {name: t.to(device) for name, t in (("input_ids", ids), ("labels", labels))}


def _peak_bytes(reset: bool = False) -> int:
    if not torch.cuda.is_available():  # a dry run
        return 0
    torch.cuda.synchronize()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def _step(model: Any, batch: dict[str, torch.Tensor], plan: LossPlan) -> tuple[float, torch.Tensor, int]:
    model.zero_grad()
    before = _peak_bytes(reset=True)
    loss = causal_lm_forward(model, batch, plan).loss_sum
    loss.backward()
    peak = _peak_bytes() - before
    grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
    return float(loss), torch.cat(grads), peak


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["chunked", "liger"])
def test_loss_and_gradients_in_bf16(device: str, backend: Any, tied: bool) -> None:
    _needs(backend)
    model, batch = _model(device, torch.bfloat16, tied), _batch(device)
    wanted, gradients, peak = _step(model, batch, PLAIN)
    _step(model, batch, plan_loss(model, LossConfig(backend=backend)))  # kernels are compiled at their first call
    found, others, less = _step(model, batch, plan_loss(model, LossConfig(backend=backend)))
    assert found == pytest.approx(wanted, rel=1e-3)
    assert (others - gradients).norm() <= 2e-2 * gradients.norm()
    assert less < peak or device == "cpu"


@pytest.mark.parametrize("backend", ["chunked", "liger"])
def test_loss_and_gradients_in_fp32(device: str, backend: Any) -> None:
    _needs(backend)
    model, batch = _model(device, torch.float32), _batch(device)
    wanted, gradients, _ = _step(model, batch, PLAIN)
    found, others, _ = _step(model, batch, plan_loss(model, LossConfig(backend=backend)))
    assert found == pytest.approx(wanted, rel=1e-6 if backend == "chunked" else 1e-5)
    assert (others - gradients).norm() <= 1e-5 * gradients.norm()


def test_z_loss_of_liger_is_ours(device: str) -> None:
    _needs("liger")
    model, batch = _model(device, torch.float32), _batch(device)
    backends: list[Any] = ["chunked", "liger"]
    ours, theirs = (
        causal_lm_forward(model, batch, plan_loss(model, LossConfig(backend=b, z_loss=1e-3))) for b in backends
    )
    assert theirs.loss_sum.item() == pytest.approx(ours.loss_sum.item(), rel=1e-5)
    assert theirs.nll_sum.item() == pytest.approx(ours.nll_sum.item(), rel=1e-4)
    assert theirs.num_correct.isnan()


@pytest.mark.parametrize("backend", ["chunked", "liger"])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_training_under_an_engine(tiny_model: Path, accelerator: str, engine: str, backend: str) -> None:
    _needs(backend)
    strategy = {"engine": engine, "precision": "mixed"}
    plain = train(tiny_model, accelerator, strategy, max_steps=4, model={"loss": {"backend": "plain"}})
    torch.distributed.destroy_process_group()
    found = train(tiny_model, accelerator, strategy, max_steps=4, model={"loss": {"backend": backend}})
    torch.distributed.destroy_process_group()
    assert found["losses"] == pytest.approx(plain["losses"], rel=5e-3)
