"""Files that are no configuration, and values that do not go together: the field and the way out are named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.commands import run
from lit_fsdp.convert.convert import convert_file
from lit_fsdp.errors import ConfigError

FSDP = {"distributed_type": "FSDP", "num_processes": 8}
Z3 = {"zero_optimization": {"stage": 3}}


def _fsdp(**config: Any) -> dict[str, Any]:
    return {**FSDP, "fsdp_config": config}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "with nothing in it"),
        (b"{}", "no key in it"),
        (b"- a\n- b\n", "with list in it"),
        (b"just words", "with str in it"),
        (b"a: [1,\n", "cannot be read"),
        (b"\xff\xfe\x00\x01", "cannot be read"),
        (b"a: !!python/object:os.system x", "cannot be read"),
    ],
)
@pytest.mark.parametrize("kind", ["accelerate", "hf-trainer", "deepspeed"])
def test_a_file_that_is_no_configuration(tmp_path: Path, kind: str, content: bytes, said: str) -> None:
    file = tmp_path / "in.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        convert_file(kind, file)
    assert error.value.field == "file"


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "fsdp_config.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match=r"try fsdp_config\.yaml"):
        convert_file("accelerate", tmp_path / "fsdp_confg.yaml")
    with pytest.raises(ConfigError, match="an existing YAML or JSON file"):
        convert_file("accelerate", tmp_path)


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        ("accelerate", {"num_processes": 1}, "distributed_type"),
        ("accelerate", {"distributed_type": "FSPD"}, "distributed_type"),
        ("accelerate", {"distributed_type": "XLA"}, "distributed_type"),
        ("accelerate", {"distributed_type": "MEGATRON_LM"}, "distributed_type"),
        ("accelerate", {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO"}, "compute_environment"),
        ("accelerate", {**FSDP, "num_process": 1}, "num_process"),
        ("accelerate", {**FSDP, "num_machines": 3}, "num_processes"),
        ("accelerate", {**FSDP, "mixed_precision": "bf32"}, "mixed_precision"),
        ("accelerate", {**FSDP, "fsdp_config": [1]}, "fsdp_config"),
        ("accelerate", _fsdp(fsdp_version=3), "fsdp_config.fsdp_version"),
        ("accelerate", _fsdp(fsdp_sharding_strategy=6), "fsdp_config.fsdp_sharding_strategy"),
        ("accelerate", _fsdp(fsdp_sharding_strategy=True), "fsdp_config.fsdp_sharding_strategy"),
        ("accelerate", _fsdp(fsdp_version=1, version=1), "fsdp_config.version"),
        (
            "accelerate",
            _fsdp(fsdp_sharding_strategy="FULL_SHARD", fsdp_reshard_after_forward="SHARD_GRAD_OP"),
            "fsdp_config.fsdp_reshard_after_forward",
        ),
        ("accelerate", _fsdp(version=2, reshard_after_forward="HYBRID_SHARD"), "fsdp_config.reshard_after_forward"),
        ("accelerate", _fsdp(auto_wrap_policy="BLOCKS"), "fsdp_config.auto_wrap_policy"),
        (
            "accelerate",
            _fsdp(fsdp_transformer_layer_cls_to_wrap="A", fsdp_min_num_params=5),
            "fsdp_config.fsdp_min_num_params",
        ),
        ("accelerate", _fsdp(backward_prefetch="NEVER"), "fsdp_config.backward_prefetch"),
        ("accelerate", _fsdp(offload_params="maybe"), "fsdp_config.offload_params"),
        ("accelerate", _fsdp(version=2, state_dict_type="LOCAL_STATE_DICT"), "fsdp_config.state_dict_type"),
        (
            "accelerate",
            _fsdp(cpu_ram_efficient_loading=True, sync_module_states=False),
            "fsdp_config.cpu_ram_efficient_loading",
        ),
        (
            "accelerate",
            _fsdp(version=2, activation_checkpointing_offload=True),
            "fsdp_config.activation_checkpointing_offload",
        ),
        ("accelerate", {**FSDP, "parallelism_config": {"dp_replicate_size": 2}}, "parallelism_config"),
        (
            "accelerate",
            {**_fsdp(version=2), "parallelism_config": {"dp_shard_size": -1}},
            "parallelism_config.dp_shard_size",
        ),
        (
            "accelerate",
            {**_fsdp(version=2), "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 3}},
            "parallelism_config.dp_shard_size",
        ),
        (
            "accelerate",
            {**_fsdp(version=2), "parallelism_config": {"dp_replicate_size": 8, "dp_shard_size": 1}},
            "parallelism_config.dp_shard_size",
        ),
        ("accelerate", {**FSDP, "mixed_precision": ["bf16"]}, "mixed_precision"),
        ("accelerate", {**FSDP, "use_cpu": True, "mixed_precision": "fp16"}, "mixed_precision"),
        (
            "accelerate",
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_param_device": "cpu"}},
            "deepspeed_config.offload_param_device",
        ),
        (
            "accelerate",
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 4}},
            "deepspeed_config.zero_stage",
        ),
        ("hf-trainer", {"fsdp": True, "fsdp_config": "{version: 1}"}, "fsdp_config"),
        ("hf-trainer", {"fsdp": True, "fsdp_config": {"version": 1, "reshard_after_forward": True}},
         "fsdp_config.reshard_after_forward"),
        ("hf-trainer", {"lr_scheduler_kwargs": "min_lr=1"}, "lr_scheduler_kwargs"),
        ("hf-trainer", {"use_cpu": True, "fp16": True}, "fp16"),
        (
            "hf-trainer",
            {"gradient_accumulation_steps": 2,
             "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
            "accelerator_config.gradient_accumulation_kwargs.num_steps",
        ),
        ("hf-trainer", {"adam_beta2": 1.5}, "adam_beta2"),
        ("deepspeed", {"optimizer": {"params": {"betas": [0.9, 1.5]}}}, "optimizer.params.betas"),
        ("deepspeed", {"optimizer": {"params": {"betas": [0.9, "auto"]}}}, "optimizer.params.betas"),
        ("hf-trainer", {"fsdp": "offload"}, "fsdp"),
        ("hf-trainer", {"fsdp": "full_shard shard_grad_op"}, "fsdp"),
        ("hf-trainer", {"fsdp": "hybrid_shard"}, "fsdp"),
        ("hf-trainer", {"fsdp": "fullshard"}, "fsdp"),
        ("hf-trainer", {"fsdp": 5}, "fsdp"),
        ("hf-trainer", {"fsdp": True, "fsdp_config": {"xla": True}}, "fsdp_config.xla"),
        ("hf-trainer", {"fsdp": True, "fsdp_config": "nowhere.json"}, "fsdp_config"),
        (
            "hf-trainer",
            {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "gradient_checkpointing": True},
            "fsdp_config.activation_checkpointing",
        ),
        ("hf-trainer", {"fsdp": "full_shard", "fsdp_config": {"reshard_after_forward": False}}, "fsdp"),
        ("hf-trainer", {"fsdp": True, "deepspeed": Z3}, "fsdp"),
        ("hf-trainer", {"bf16": True, "fp16": True}, "fp16"),
        ("hf-trainer", {"learning_rate": "fast"}, "learning_rate"),
        ("hf-trainer", {"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ("hf-trainer", {"deepspeed": {**Z3, "gradient_clipping": 5}}, "deepspeed.gradient_clipping"),
        ("deepspeed", {"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ("deepspeed", {"zero_optimization": True}, "zero_optimization"),
        (
            "deepspeed",
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
        ),
        ("deepspeed", {**Z3, "bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
        (
            "deepspeed",
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            "train_batch_size",
        ),
    ],
)  # fmt: skip
def test_values_that_cannot_be(tmp_path: Path, kind: str, given: dict[str, Any], field: str) -> None:
    file = tmp_path / "in.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError) as error:
        convert_file(kind, file)
    assert error.value.field == field
    assert error.value.allowed
    assert error.value.fix


def test_errors_speak_of_the_input_only(tmp_path: Path) -> None:
    file = tmp_path / "in.json"
    file.write_text(json.dumps({**FSDP, "mixed_precision": "bf32"}))
    with pytest.raises(ConfigError) as error:
        convert_file("accelerate", file)
    assert error.value.fix == "write mixed_precision: bf16"
    zero = {"zero_stage": 2, "offload_param_device": "cpu"}
    file.write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": zero}))
    with pytest.raises(ConfigError) as error:
        convert_file("accelerate", file)
    assert error.value.fix == "write deepspeed_config.offload_param_device: none, or zero_stage: 3"
    batches = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 3}
    file.write_text(json.dumps(batches))
    with pytest.raises(ConfigError) as error:
        convert_file("hf-trainer", file, 2)
    assert error.value.field == "accelerator_config.split_batches"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "in.yaml", tmp_path / "recipe.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_ignored_modules: x}\n")
    assert run(["convert", "accelerate", str(file)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "fsdp_config.fsdp_ignored_modules: dropped because" in said.err
    assert run(["convert", "accelerate", str(file), "--allow-differences"]) == 0
    assert "engine: fsdp1" in capsys.readouterr().out
    assert run(["convert", "accelerate", str(file), "--allow-differences", "-o", str(out)]) == 0
    assert out.read_text().startswith("# Converted from in.yaml (accelerate).")
    with pytest.raises(ConfigError, match="does not exist yet"):
        run(["convert", "accelerate", str(file), "--allow-differences", "-o", str(out)])


def test_torch_is_not_imported(tmp_path: Path) -> None:
    file = tmp_path / "in.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 2\n")
    code = (
        "import sys; from lit_fsdp.commands import run; "
        f"rc = run(['convert', 'accelerate', {str(file)!r}]); "
        "sys.exit(rc or any(m in sys.modules for m in ('torch', 'lightning', 'accelerate')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
