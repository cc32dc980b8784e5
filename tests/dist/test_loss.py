"""The loss on both engines: any head as the plain way in one process, and a global batch cut in any way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.forks import on_ranks
from tests.dist.packing_jobs import samples

_LLAMA = {
    **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2},
    "tie_word_embeddings": False,
}
_GEMMA = {**_LLAMA, "model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"name": _LLAMA},
    "capped": {"name": _GEMMA, "attn_implementation": "eager"},
    "adapters": {"name": _LLAMA, "lora": {"r": 4, "target_modules": ["q_proj", "lm_head"]}},
    "whole_head": {"name": _LLAMA, "lora": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}},
}


@pytest.mark.parametrize("model", MODELS)
def test_a_head_of_any_kind_trains_as_the_plain_way_does(model: str) -> None:
    plain, chunked = ({**MODELS[model], "loss": loss} for loss in ({"backend": "plain"}, {"chunk_tokens": 7}))
    (wanted,) = on_ranks("train_with_loss", 1, strategy={"engine": "single", "precision": "fp32"}, model=plain)
    for engine in ("fsdp2", "fsdp1"):
        strategy = {"engine": engine, "precision": "fp32", "activation_checkpointing": "full"}
        for found in on_ranks("train_with_loss", 2, strategy=strategy, model=chunked):
            assert found["losses"][0] == pytest.approx(wanted["losses"][0], rel=1e-6)
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
            assert found["names"] == wanted["names"]
            assert found["patched"] == []
            accuracy = "train_token_accuracy"
            assert found["metrics"][accuracy] == pytest.approx(wanted["metrics"][accuracy], rel=1e-4)
    assert wanted["losses"][-1] < wanted["losses"][0]


def _cut(folder: Path, ranks: int, engine: str, packed: bool, place: Path) -> tuple[Any, Any]:
    file = place / f"{ranks}-{engine}-{packed}.pt"
    found = on_ranks("gradients_of_a_cut", ranks, folder=folder, file=str(file), engine=engine, packed=packed)
    return found[0], torch.load(file, weights_only=True)


def test_a_global_batch_cut_in_any_way(tiny_model: Path, tmp_path: Path) -> None:
    """1 x 8, 2 x 4 and 4 x 2 ranks x accumulation, padded and packed: equal losses and gradients to fp32 rounding."""
    wanted, gradients = _cut(tiny_model, 1, "single", False, tmp_path)
    assert wanted["tokens"] == sum(int((s["labels"][1:] != -100).sum()) for s in samples())
    norm = torch.cat([grad.flatten() for grad in gradients.values()]).norm()
    cuts = [(1, "single", True), (2, "fsdp2", False), (2, "fsdp1", True), (4, "fsdp2", True), (4, "fsdp1", False)]
    for ranks, engine, packed in cuts:
        found, others = _cut(tiny_model, ranks, engine, packed, tmp_path)
        assert found["tokens"] == wanted["tokens"]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-6), (ranks, engine, packed)
        assert others.keys() == gradients.keys()
        difference = torch.cat([(others[name] - grad).flatten() for name, grad in gradients.items()]).norm()
        assert difference <= 2e-6 * norm, (ranks, engine, packed)
