"""What the training loop of the input becomes, and files that a file names."""

from __future__ import annotations

import json
from pathlib import Path

from lit_fsdp.convert.convert import convert_file

BF16_V2 = {"mode": "mixed", "reduce_dtype": "bf16"}
ZERO = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}


def test_hf_loop_becomes_optimizer_batches_and_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nlearning_rate: 2e-5\nwarmup_ratio: 0.1\n"
        "max_steps: 200\nlr_scheduler_type: cosine\nsave_steps: 50\nsave_total_limit: 3\nseed: 7\n"
        "eval_strategy: steps\neval_steps: 25\nmax_grad_norm: 0.5\nadam_beta2: 0.95\nmodel_name_or_path: a/b\n"
        "train_file: rows.jsonl\n"
    )
    recipe = convert_file("hf-trainer", file, 16, 2).recipe
    assert recipe["model"] == {
        "name": "a/b",
        "optim": {"lr": 2e-5, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "schedule": "cosine",
                  "warmup_steps": 20},
    }  # fmt: skip
    assert recipe["data"] == {"micro_batch_size": 4, "global_batch_size": 128, "train": "rows.jsonl"}
    assert recipe["checkpoint"] == {"every_steps": 50, "keep_last": 3}
    assert recipe["seed_everything"] == 7
    trainer = {
        key: recipe["trainer"][key] for key in ("max_steps", "gradient_clip_val", "val_check_interval", "devices")
    }
    assert trainer == {"max_steps": 200, "gradient_clip_val": 0.5, "val_check_interval": 50, "devices": 8}


def test_hf_without_ranks_says_that_the_global_batch_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "args.json"
    file.write_text('{"per_device_train_batch_size": 4}')
    found = convert_file("hf-trainer", file)
    assert [fate.key for fate in found.fates if fate.differs] == ["gradient_accumulation_steps (1 by default)"]
    assert "global_batch_size" not in found.recipe["data"]


def test_deepspeed_ranks_follow_from_its_batches(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**ZERO, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}))
    found = convert_file("deepspeed", file)
    assert found.recipe["trainer"]["devices"] == 4
    assert found.recipe["data"] == {"global_batch_size": 16, "micro_batch_size": 2}
    assert not found.differs


def test_files_named_inside_are_read_beside_it(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    (tmp_path / "fsdp.json").write_text('{"transformer_layer_cls_to_wrap": "Block"}')
    accelerate, trainer = tmp_path / "a.yaml", tmp_path / "t.json"
    accelerate.write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: zero.json}\n"
    )
    trainer.write_text('{"fsdp": "full_shard", "fsdp_config": "fsdp.json"}')
    zero = convert_file("accelerate", accelerate).recipe["trainer"]["strategy"]["init_args"]
    assert (zero["sharding"], zero["precision"]) == ("full_shard", BF16_V2)
    named = convert_file("hf-trainer", trainer, 2).recipe["trainer"]["strategy"]["init_args"]["wrap"]
    assert named["classes"] == ["Block"]
