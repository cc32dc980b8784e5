"""Whole files: loops, values of auto, files named inside, refusals that name the key, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.commands import run
from lit_fsdp.convert import FORMATS, convert_file
from lit_fsdp.convert.conversion import STRATEGY
from lit_fsdp.errors import ConfigError
from tests.unit.convert.inputs import convert, strategy

FSDP = {"distributed_type": "FSDP", "num_processes": 8}
# The usual file: everything that Transformers can fill in is auto.
USUAL: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
}  # fmt: skip


def test_the_loop_of_training_arguments() -> None:
    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": "2e-5", "adam_beta1": 0.8,
        "adam_beta2": 0.95, "warmup_ratio": 0.1, "max_steps": 205, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-6}, "save_steps": 50, "save_total_limit": 3, "seed": 7, "hub_token": None,
        "eval_strategy": "steps", "eval_steps": 25, "model_name_or_path": "a/b", "train_file": ["r.jsonl", "s.jsonl"],
        "packing": True, "assistant_only_loss": False,
    }  # fmt: skip
    recipe = convert("hf-trainer", given, 16, 2).recipe
    optim = {"lr": 2e-5, "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.95, "eps": 1e-8}
    schedule = {"schedule": "cosine", "warmup_ratio": 0.1, "warmup_steps": 0, "min_lr_ratio": 0.05}
    trainer = {"max_steps": 205, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "val_check_interval": 50}
    assert recipe["model"] == {"name": "a/b", "optim": {**optim, **schedule}}
    assert recipe["data"] == {
        "micro_batch_size": 4,
        "packing": True,
        "max_seq_length": 1024,
        "train": ["r.jsonl", "s.jsonl"],
    }
    assert recipe["checkpoint"] == {"every_steps": 50, "keep_last": 3}
    assert recipe["seed_everything"] == 7
    assert {key: recipe["trainer"][key] for key in trainer} == trainer
    assert (recipe["trainer"]["devices"], recipe["trainer"]["num_nodes"]) == (8, 2)


def test_every_auto_is_named() -> None:
    alone = convert("deepspeed", USUAL, 4)
    assert not alone.differs
    assert alone.recipe["model"]["optim"]["lr"] == 5e-5
    assert any("auto in" in line and "optimizer.params.lr" in line for line in alone.to_give)
    assert "now fp32: the file leaves it to --bf16 or --fp16 of the Trainer." in " ".join(alone.to_give)


def test_a_file_named_inside_is_read_beside_it(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('\ufeff{\n\t"transformer_layer_cls_to_wrap": "Block"}', encoding="utf-8")
    (tmp_path / "t.json").write_text('{"fsdp": "full_shard", "fsdp_config": "fsdp.json"}')
    assert strategy(convert_file("hf-trainer", tmp_path / "t.json", 2))["wrap"]["classes"] == ["Block"]


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"- a\n", b"words", b"a: [1,\n", b"\xff\xfe\x00", b"a: !!python/object:os.system x"):
        (tmp_path / "in.yaml").write_bytes(content)
        for kind in FORMATS:
            with pytest.raises(ConfigError) as error:
                convert_file(kind, tmp_path / "in.yaml")
            assert error.value.field == "file"


def test_refusals_name_the_key_of_the_input() -> None:
    mesh = {"fsdp_config": {"version": 2}, "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 3}}
    unsynced = {"sync_module_states": False, "cpu_ram_efficient_loading": True}
    for kind, given, field in (
        ("accelerate", {"distributed_type": "XLA"}, "distributed_type"),
        ("accelerate", {"distributed_type": "SAGEMAKER"}, "distributed_type"),
        ("accelerate", {**FSDP, "num_machines": 3}, "num_processes"),
        ("accelerate", {**FSDP, "fsdp_config": {"sharding_strategy": 6}}, "fsdp_config.sharding_strategy"),
        ("accelerate", {**FSDP, "fsdp_config": {"offload_params": "maybe"}}, "fsdp_config.offload_params"),
        ("accelerate", {**FSDP, "fsdp_config": unsynced}, "fsdp_config.cpu_ram_efficient_loading"),
        ("accelerate", {**FSDP, **mesh}, "parallelism_config.dp_shard_size"),
        ("hf-trainer", {"fsdp": "hybrid_shard"}, "fsdp"),
        ("hf-trainer", {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}},
         "fsdp_config.reshard_after_forward"),
        ("hf-trainer", {"bf16": True, "fp16": True}, "fp16"),
        ("hf-trainer", {"learning_rate": "fast"}, "learning_rate"),
        ("deepspeed", {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            convert(kind, given)
        assert error.value.field == field, given
        assert error.value.fix


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_ignored_modules: x}\n"
    file, out = tmp_path / "in.yaml", tmp_path / "recipe.yaml"
    file.write_text(text)
    assert run(["convert", "accelerate", str(file)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "fsdp_config.fsdp_ignored_modules: dropped because every parameter is in a unit here [trains" in shown.err
    assert run(["convert", "accelerate", str(file), "--allow-differences", "-o", str(out)]) == 0
    assert out.read_text().startswith("# Converted from in.yaml (accelerate).\n# Set model.name, data.train, ")
    reason = "dropped because every parameter is in a unit here"
    assert f"\n# Trains differently: fsdp_config.fsdp_ignored_modules: {reason}\n\ntrainer:" in out.read_text()
    with pytest.raises(ConfigError, match="a new file"):
        run(["convert", "accelerate", str(file), "--allow-differences", "-o", str(out)])


def test_deepspeed_in_an_accelerate_file(tmp_path: Path) -> None:
    """Its own keys as ``accelerate config`` writes them, and a file that it names."""
    own = {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "zero3_init_flag": True}
    own |= {"offload_optimizer_device": "none", "offload_param_device": "cpu", "deepspeed_multinode_launcher": "pdsh"}
    given = {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "bf16", "deepspeed_config": own}
    found = convert("accelerate", given)
    strategy = {"engine": "fsdp2", "sharding": "full_shard", "cpu_offload": True}
    assert found.get(STRATEGY).items() >= strategy.items()
    assert (found.get("precision"), found.get("trainer.devices")) == ({"mode": "mixed", "reduce_dtype": "bf16"}, 8)
    assert found.get("trainer.accumulate_grad_batches") == 4
    assert found.get("trainer.gradient_clip_val") == 0.5
    assert not found.differs
    assert not any("unknown" in fate.text for fate in found.fates)
    default = convert("accelerate", {**given, "deepspeed_config": {"zero3_init_flag": False}})
    assert default.get("sharding") == "shard_grad_op"  # stage 2
    unused = convert("accelerate", {**given, "distributed_type": "MULTI_GPU"})
    assert (unused.get("engine"), unused.get("trainer.gradient_clip_val")) == ("ddp", None)

    named = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": 2}
    (tmp_path / "ds.json").write_text(json.dumps(named))
    file = tmp_path / "accelerate.yaml"
    file.write_text(json.dumps({**given, "deepspeed_config": {"deepspeed_config_file": "ds.json"}}))
    found = convert_file("accelerate", file)
    assert (found.get("sharding"), found.get("data.micro_batch_size")) == ("shard_grad_op", 2)
    assert found.get("precision.mode") == "mixed"
    (tmp_path / "ds.json").unlink()
    with pytest.raises(ConfigError, match="deepspeed_config_file: got ds"):
        convert_file("accelerate", file)
