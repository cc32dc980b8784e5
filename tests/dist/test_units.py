"""Units in live runs on both engines: whatever is wrapped, the losses are those of one process, in fp32.

Tolerance: 1e-5 relative over five or six steps; only the order of summation differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from lit_fsdp.audit import audit_recipe
from tests.dist.forks import on_ranks
from tests.dist.reference import reference_losses, save_tiny
from tests.runs import check_recipe

PATTERNS = {"patterns": ["model.layers.*", "model.layers.*.mlp.experts"], "max_root_share": 0.7}
engines = pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])


@pytest.fixture(scope="module")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral with random weights, saved as a model folder."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 512}
    config = MixtralConfig(**heads, **sizes, max_position_embeddings=64, initializer_range=0.08)
    return save_tiny(tmp_path_factory.mktemp("mixture") / "model", config)


@engines
def test_experts_as_units(tiny_mixture: Path, engine: str) -> None:
    wanted = reference_losses(str(tiny_mixture), steps=5)
    layers = [f"model.model.layers.{i}" for i in range(2)]
    for wrap in ("auto", PATTERNS):
        strategy = {"engine": engine, "precision": "fp32", "wrap": wrap}
        units = [*layers, "model.model.embed_tokens", "model.lm_head"]
        units += [] if wrap == "auto" else [f"{layer}.mlp.experts" for layer in layers]
        for result in on_ranks("look", 2, folder=tiny_mixture, steps=5, strategy=strategy):
            assert result["losses"] == pytest.approx(wanted, rel=1e-5)
            assert result["realized"] == result["planned"] == sorted(units)


@engines
def test_experts_inside_recomputed_blocks_in_mixed_precision(tiny_mixture: Path, engine: str) -> None:
    """A unit inside a block is gathered again while the block is recomputed."""
    strategy = {"engine": engine, "wrap": PATTERNS, "precision": "mixed"}
    recomputed, kept = (
        on_ranks("look", 2, folder=tiny_mixture, steps=5, strategy={**strategy, "activation_checkpointing": mode})[0]
        for mode in ("full", "none")
    )
    assert recomputed["losses"] == kept["losses"]  # bit-equal
    assert recomputed["losses"] == pytest.approx(reference_losses(str(tiny_mixture), steps=5), rel=3e-2)
    units = [unit["name"] for unit in recomputed["audit"]["units"] if unit["recompute"] != "no"]
    layers = ["model.model.layers.0", "model.model.layers.1"]
    assert units == [*(f"{layer}.mlp.experts" for layer in layers), *layers]


_NF4 = {"r": 4, "alpha": 8, "target_modules": "all-linear", "quantize": "nf4"}
_COPIES = {"sharding": "hybrid_shard", "replicate_degree": 2}
_RECOMPUTED = {"precision": "mixed", "activation_checkpointing": "full"}
# Uneven on purpose: 512, 100 and 48 rows over 3 ranks, and FSDP1's flat parameter cut anywhere.
_AUDITED: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2 uneven": (3, {"engine": "fsdp2", **_RECOMPUTED}),
    "fsdp2 bf16 copies": (4, {"engine": "fsdp2", "precision": "low_precision", **_COPIES}),
    "fsdp1 uneven": (3, {"engine": "fsdp1", **_RECOMPUTED}),
    "ddp": (2, {"engine": "ddp", "precision": "fp32"}),
    "fsdp1 whole": (2, {"engine": "fsdp1", "precision": "fp32", "sharding": "no_shard"}),
    "nf4 uneven": (3, {"engine": "fsdp2"}),
    "nf4 by size": (2, {"engine": "fsdp2", "precision": "low_precision", "wrap": {"min_num_params": 8000}}),
}


@pytest.mark.parametrize("case", _AUDITED)
def test_it_says_what_a_run_does(tiny_model: Path, case: str) -> None:
    ranks, strategy = _AUDITED[case]
    trainer = {"devices": ranks, "max_steps": 2, "strategy": {"init_args": strategy}}
    data = {"train": "rows.jsonl", "global_batch_size": 12}
    model = {"lora": {**_NF4, "double_quantization": ranks == 3}} if "nf4" in case else {}
    run = check_recipe({"trainer": trainer, "model": {"name": str(tiny_model), **model}, "data": data}, "fit")
    said = audit_recipe(run)
    found = on_ranks("kept_by_a_rank", ranks, folder=tiny_model, strategy=strategy, model=model)
    assert {key: said[key] for key in found[0]["audit"]} == found[0]["audit"]
    assert said["replicate_degree"] * said["shard_degree"] == said["ranks"] == ranks
    assert len(said["state_per_rank"]) == said["shard_degree"]
    for rank, one in enumerate(found):
        assert one["kept"] == said["state_per_rank"][rank % said["shard_degree"]]
        assert one["audit"]["units"] == said["units"]
    scales = sum(unit.get("quantization_bytes", 0) for unit in said["units"])  # of packed weights
    assert scales == said["state_per_rank"][0].get("quantization_bytes", 0)
    assert (scales > 0) == ("nf4" in case)
