"""Configurations of Accelerate, the Transformers Trainer and DeepSpeed become recipes, with the fate of every key."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.spec.running import run

ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
"""
TRAINER = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True},
    "bf16": True,
    "gradient_accumulation_steps": 4,
    "learning_rate": 2e-5,
}


def test_one_training_in_two_languages(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    (tmp_path / "trainer.json").write_text(json.dumps(TRAINER))
    found = {}
    for kind, file in (("accelerate", "accelerate.yaml"), ("hf-trainer", "trainer.json")):
        _, said = run("convert", kind, file, "-o", f"{kind}-recipe.yaml")
        found[kind] = yaml.safe_load((tmp_path / f"{kind}-recipe.yaml").read_text())["trainer"]
        given = yaml.safe_load((tmp_path / file).read_text())
        for key in given:
            assert key in said, (kind, key)
    strategies = {kind: trainer["strategy"]["init_args"] for kind, trainer in found.items()}
    for strategy in strategies.values():
        assert strategy["sharding"] == "full_shard"
        assert strategy["precision"] in ("mixed", {"mode": "mixed", "reduce_dtype": "bf16"})
        assert strategy["activation_checkpointing"] == "full"
        assert strategy["wrap"]["classes"] == ["LlamaDecoderLayer"]
    assert found["hf-trainer"]["accumulate_grad_batches"] == 4
