"""Packed samples are isolated on a GPU, with every attention backend that is installed, compiled and not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lit_fsdp import CausalLMDataModule, CausalLMModule, fsdp_strategy
from lit_fsdp.callbacks.isolation import IsolationProof, prove_isolation
from tests.dist.jobs import Losses
from tests.gpu.runs import save_model

_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}


class _Proofs(IsolationProof):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, Any]] = []

    def prove(self, trainer: Trainer, batch: Any) -> dict[str, Any]:
        self.records.append(prove_isolation(trainer, batch))
        return self.records[-1]


def _run(folder: Path, attention: str, packing: bool = True, **strategy: Any) -> tuple[list[float], list[Any]]:
    proofs, losses = _Proofs(), Losses()
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        strategy=fsdp_strategy(**strategy),
        callbacks=[proofs, losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_steps=3,
        max_epochs=-1,
        default_root_dir=str(folder / "run"),
    )
    model = CausalLMModule(name=str(folder / "model"), attn_implementation=attention, optim={"lr": 1e-3})
    rows = {"train": "generated:120", "max_seq_length": 512, "seed": 1, "packing": packing}
    data = CausalLMDataModule(**rows, global_batch_size=128, micro_batch_size=4, cache_dir=str(folder / "cache"))
    trainer.fit(model, datamodule=data)
    return losses.values, proofs.records


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"])
def test_isolated_in_bf16(tmp_path: Path, attention: str, compiled: bool) -> None:
    """The proof passes, bit for bit, and packed training has the loss of padded training."""
    package = _PACKAGES.get(attention)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{attention} needs {package}")
    save_model(tmp_path / "model", _SHAPE)
    packed, (proof,) = _run(tmp_path, attention, compile=compiled)
    assert proof["bit_equal"]
    assert (proof["attn_implementation"], proof["compute_dtype"]) == (attention, "bf16")
    padded, none = _run(tmp_path, "sdpa", packing=False)
    assert not none
    assert packed == pytest.approx(padded, rel=5e-3)  # one epoch a step: the same samples, in bf16
