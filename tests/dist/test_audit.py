"""The audit without a run against the audit and the tensors of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.audit import audit_recipe
from tests.dist.forks import on_ranks
from tests.runs import check_recipe

_NF4 = {"r": 4, "alpha": 8, "target_modules": "all-linear", "quantize": "nf4"}
# Uneven on purpose: 512, 100 and 48 rows over 3 ranks, and FSDP1's flat parameter cut anywhere.
_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2 uneven": (3, {"engine": "fsdp2", "precision": "mixed", "activation_checkpointing": "full"}),
    "fsdp2 bf16 copies": (
        4,
        {"engine": "fsdp2", "sharding": "hybrid_shard", "replicate_degree": 2, "precision": "low_precision"},
    ),
    "fsdp2 by size": (
        2,
        {"engine": "fsdp2", "precision": "fp32", "wrap": {"min_num_params": 8000, "max_root_share": 0.6}},
    ),
    "fsdp1 uneven": (3, {"engine": "fsdp1", "precision": "mixed", "activation_checkpointing": "full"}),
    "ddp": (2, {"engine": "ddp", "precision": "fp32"}),
    "fsdp1 whole": (2, {"engine": "fsdp1", "precision": "fp32", "sharding": "no_shard"}),
    "nf4 uneven": (3, {"engine": "fsdp2"}),
    "nf4 by size": (2, {"engine": "fsdp2", "precision": "low_precision", "wrap": {"min_num_params": 8000}}),
}


@pytest.mark.parametrize("case", _CASES)
def test_it_says_what_a_run_does(tiny_model: Path, case: str) -> None:
    ranks, strategy = _CASES[case]
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
