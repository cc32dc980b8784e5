"""Snippets that train the same, with the strategy they become; and those that do not, with what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.convert import convert_file
from lit_fsdp.errors import ConfigError
from tests.unit.convert.inputs import convert, strategy

BF16 = {"mode": "mixed", "reduce_dtype": "bf16"}
ZERO = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
NAMED = {"classes": ["A", "B"], "embedding_and_head": False}


def _fsdp(beside: dict[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    whole = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": config}
    return {**whole, **(beside or {})}


# format, input, arguments of the strategy
SAME: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("accelerate", _fsdp(fsdp_sharding_strategy="HYBRID_SHARD"), {"sharding": "full_shard"}),
    ("accelerate", _fsdp(fsdp_reshard_after_forward=False), {"sharding": "full_shard"}),
    ("accelerate", _fsdp(fsdp_auto_wrap_policy="transformer_based_wrap", fsdp_transformer_layer_cls_to_wrap="A, B"),
     {"wrap": NAMED}),
    ("accelerate", _fsdp(fsdp_auto_wrap_policy="NO_WRAP", fsdp_min_num_params=5), {"wrap": "auto"}),
    ("accelerate", _fsdp({"mixed_precision": False}), {"precision": "fp32"}),
    ("accelerate", _fsdp({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}), {"compile": True}),
    ("accelerate", _fsdp({"dynamo_config": {"dynamo_backend": "NO"}}), {"compile": False}),
    ("accelerate", _fsdp({"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 1}}, version=2),
     {"sharding": "hybrid_shard", "replicate_degree": 2, "shard_degree": 4}),
    ("accelerate", _fsdp({"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}, fsdp_version=2,
     fsdp_reshard_after_forward=False), {"sharding": "hybrid_shard_zero2", "replicate_degree": 2}),
    ("accelerate", _fsdp({"parallelism_config": {"dp_shard_size": 4, "cp_size": 2, "cp_backend": "torch"}}, version=2),
     {"sharding": "full_shard", "shard_degree": 8, "context_parallel": 2}),
    ("accelerate", {"distributed_type": "MULTI_GPU", "num_processes": 2}, {"engine": "ddp", "sharding": "no_shard"}),
    ("accelerate", {"distributed_type": "NO", "num_processes": 8}, {"engine": "single"}),
    ("accelerate", _fsdp({"use_cpu": True}, fsdp_offload_params=True), {"engine": "ddp", "cpu_offload": False}),
    ("hf-trainer", {"fsdp": "", "fsdp_config": {"min_num_params": 5}}, {"engine": "ddp"}),
    ("hf-trainer", {"fsdp": True, "gradient_checkpointing": True}, {"activation_checkpointing": "full"}),
    ("deepspeed", {**ZERO, "zero_optimization": {"stage": 0}}, {"engine": "ddp", "precision": "fp32"}),
    ("deepspeed", {**ZERO, "zero_optimization": {"stage": 1}}, {"engine": "fsdp2", "sharding": "shard_grad_op"}),
    ("deepspeed", {**ZERO, "zero_optimization": {"stage": 2}}, {"engine": "fsdp2", "sharding": "shard_grad_op"}),
    ("deepspeed", {**ZERO, "bf16": {"enabled": True}, "zero_optimization": {
        "stage": 3, "overlap_comm": True, "offload_param": {"device": "nvme"}, "stage3_max_live_parameters": 1e9,
        "max_reuse_distance": 1e9, "gather_16bit_weights_on_model_save": True}},
     {"cpu_offload": True, "precision": BF16}),
    ("deepspeed", {**ZERO, "communication_data_type": "fp32", "fp16": {"enabled": True, "loss_scale": 0}},
     {"precision": {"mode": "fp16_mixed", "reduce_dtype": "fp32"}}),
    ("deepspeed", {**ZERO, "fp16": {"enabled": False, "loss_scale": 128}}, {"precision": "fp32"}),
    ("deepspeed", {**ZERO, "scheduler": {"type": "WarmupDecayLR", "params": {
        "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "warmup_type": "linear", "total_num_steps": 50}}}, {}),
]  # fmt: skip


def test_what_trains_the_same() -> None:
    for kind, given, arguments in SAME:
        found = convert(kind, given, *((8, 2) if kind == "hf-trainer" else ()))
        ours = strategy(found)
        assert {name: ours[name] for name in arguments} == arguments, given
        assert not found.differs, [str(fate) for fate in found.fates]
    devices = {"distributed_type": "MULTI_GPU", "num_processes": 2, "gpu_ids": "0,3"}
    assert convert("accelerate", devices).recipe["trainer"]["devices"] == [0, 3]


def test_what_does_not_names_the_key() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}}
    for kind, given, line in (
        ("accelerate", _fsdp({"mixed_precision": "fp8"}), "mixed_precision: kept as precision.mode: fp8"),
        ("accelerate", _fsdp(fsdp_xla=True), "fsdp_config.fsdp_xla: dropped because FSDP through XLA is for TPUs"),
        ("accelerate", _fsdp(fsdp_ofload_params=True), "fsdp_config.fsdp_ofload_params: dropped because the key "
         "is unknown; the closest is fsdp_config.offload_params"),
        ("accelerate", _fsdp({"parallelism_config": {"tp_size": 2}}, version=2), "parallelism_config.tp_size: dropped"),
        ("hf-trainer", {"deepspeed": "zero.json"}, "deepspeed: dropped because it is not here: convert again in"),
        ("hf-trainer", {"optim": "adafactor"}, "optim: dropped because the recipe uses AdamW"),
        ("hf-trainer", {"num_train_epochs": 1.5}, "num_train_epochs: kept as trainer.max_epochs: 2 (whole epochs"),
        ("hf-trainer", {"beta": 0.1}, "loss_type (sigmoid by default): kept as model.preference.loss: dpo (if the"),
        ("hf-trainer", {"packing": True}, "assistant_only_loss (false by default): dropped because TRL trains on all"),
        ("hf-trainer", {"torch_dtype": "auto"}, "torch_dtype: dropped because weights are in fp32"),
        ("hf-trainer", {"learnin_rate": 1}, "learnin_rate: dropped because the key is unknown; the closest is learn"),
        ("deepspeed", {**ZERO, "fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale: dropped"),
        ("deepspeed", {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, "optimizer.type: dropped because"),
        ("deepspeed", {"scheduler": scheduler}, "scheduler.params.warmup_type (log by default): replaced by a linear"),
    ):  # fmt: skip
        found = [str(fate) for fate in convert(kind, given).fates if fate.differs]
        assert [one[: len(line)] for one in found] == [line]
        assert found[0].endswith(" [trains differently]")


def test_adapters_and_data_of_trl() -> None:
    """With its defaults; what it ignores without ``use_peft`` is ignored."""
    given = {"use_peft": True, "lora_r": 8, "load_in_4bit": True, "dataset_name": "trl-lib/Capybara"}
    given |= {"dataset_config": "small", "assistant_only_loss": True, "torch_dtype": "bfloat16"}
    given["lora_task_type"] = "CAUSAL_LM"
    found = convert("hf-trainer", given, 1)
    assert not found.differs
    lora = {"r": 8, "alpha": 32, "dropout": 0.05, "target_modules": None, "quantize": "nf4"}
    assert found.recipe["model"]["lora"] == {**lora, "double_quantization": False}
    assert found.recipe["data"]["train"] == "trl-lib/Capybara:small:train"
    assert strategy(found)["precision"] == "mixed"  # with the frozen base in bf16
    # TRL validates on the split test by default, if at all
    assert "val" not in found.recipe["data"]
    for split, more in (("test", {}), ("held", {"dataset_test_split": "held"})):
        validates = convert("hf-trainer", {**given, **more, "eval_strategy": "epoch"}, 1)
        assert validates.recipe["data"]["val"] == f"trl-lib/Capybara:small:{split}"
    without = {**given, "eval_strategy": "epoch", "dataset_name": "rows.jsonl"}
    assert "Set data.val or data.val_split: the input validates." in convert("hf-trainer", without, 1).to_give
    base: dict[str, Any] = {"lora_r": 8, "use_dora": True, "dataset_train_split": "train", "completion_only_loss": True}
    whole = convert("hf-trainer", base, 1)
    assert "lora" not in whole.recipe["model"]
    assert not whole.differs
    assert convert("hf-trainer", {"load_in_4bit": True}, 1).differs
    assert convert("hf-trainer", {**given, "lora_task_type": "SEQ_CLS"}, 1).differs
    # weights of 16 bits, which Accelerate upcasts under FSDP
    for more, precision in (({}, "low_precision"), ({"fsdp": "full_shard"}, {"mode": "mixed", "reduce_dtype": "bf16"})):
        whole = convert("hf-trainer", {**base, **more, "torch_dtype": "bfloat16"}, 2)
        assert not whole.differs
        assert strategy(whole)["precision"] == precision


def test_pairs_of_trl() -> None:
    given = {"beta": 0.05, "loss_type": "sigmoid", "max_length": 512, "label_smoothing": 0.1, "dataset_name": "org/d"}
    found = convert("hf-trainer", {**given, "optim": "paged_adamw_32bit", "precompute_ref_log_probs": True}, 1)
    assert not found.differs
    model = found.recipe["model"]
    assert model["class_path"] == "lit_fsdp.PreferenceModule"
    assert model["preference"] == {"beta": 0.05, "loss": "dpo", "label_smoothing": 0.1}
    assert model["optim"]["lr"] == 1e-6
    assert convert("hf-trainer", {**given, "loss_type": "hinge"}, 1).differs
    assert convert("hf-trainer", {**given, "reference_free": True}, 1).differs


def test_a_file_of_trl_has_its_defaults(tmp_path: Path) -> None:
    """Other ones than those of TrainingArguments, in TRL 1.16."""
    (tmp_path / "rows.jsonl").write_text("")
    given = {"dataset_name": "rows.jsonl", "max_steps": 5, "packing_strategy": "bfd", "truncation_mode": "keep_end"}
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(given | {"dataset_text_field": "body", "dtype": "float32"}))
    found = convert_file("hf-trainer", tmp_path / "trl.yaml", 1)
    assert not found.differs
    assert found.get("model.optim.lr") == 2e-5
    own = strategy(found)
    assert (own["precision"], own["activation_checkpointing"]) == ("mixed", "full")
    assert found.recipe["data"] == {
        "micro_batch_size": 8, "train": str(tmp_path / "rows.jsonl"), "truncation": "start", "max_seq_length": 1024,
        "columns": {"text": "body"},
    }  # fmt: skip
    changed = {"gradient_checkpointing": False, "learning_rate": 1e-4, "max_length": 256, "bf16": False}
    found = convert("hf-trainer", {**given, **changed}, 1)
    assert (found.get("model.optim.lr"), found.get("data.max_seq_length")) == (1e-4, 256)
    own = strategy(found)
    assert (own["precision"], own["activation_checkpointing"]) == ("fp32", "none")
    for key, value in (("packing_strategy", "wrapped"), ("dtype", "auto"), ("loss_type", "dft"), ("eos_token", "</s>")):
        assert convert("hf-trainer", {key: value}, 1).differs, key
    told = [str(fate) for fate in convert("hf-trainer", {**given, **changed, "logging_steps": 1}, 1).fates]
    assert not any("keys that are not set" in line for line in told)
    assert convert("hf-trainer", {"packing": True, "eval_strategy": "steps"}, 1).get("trainer.val_check_interval") == 10
    assert convert("hf-trainer", {"max_length": None, "use_peft": False}, 1).differs
    assert (
        convert("hf-trainer", {"dataset_name": "org/d", "dataset_train_split": "sft"}, 1).get("model.optim.lr") == 2e-5
    )
    assert not convert("hf-trainer", {"torch_dtype": "float32"}, 1).differs
    plain = convert("hf-trainer", {"max_steps": 5, "dtype": "float32", "dataset_name": "org/rows"}, 1)
    assert (plain.get("model.optim.lr"), strategy(plain)["precision"]) == (5e-5, "fp32")


def test_keys_of_trls_parser_and_of_the_alignment_handbook() -> None:
    """What does not change training is dropped without the need to allow it; of the rest, it is said what to write."""
    given: dict[str, Any] = {"assistant_only_loss": True, "torch_dtype": "bfloat16", "use_peft": True}
    given |= {"env": {"WANDB_API_KEY": "secret"}, "streaming": False, "preprocessing_num_workers": 12}
    found = convert("hf-trainer", given | {"datasets": [{"path": "org/d", "split": "train"}]}, 1)
    assert not found.differs
    assert found.get("data.num_tokenizers") == 12
    told = [str(fate) for fate in found.fates]
    assert "env: dropped because environment variables train nothing: set them in the job" in told
    assert not any("secret" in line for line in (*told, found.as_yaml("x")))
    for key, value, line in (
        ("dataset_mixer", {"org/d": 0.5}, "write data.train: ['NAME:SPLIT', …]; a share of the rows of one is"),
        (
            "dataset_splits",
            ["train_sft", "test_sft"],
            "write data.train: NAME:CONFIG:SPLIT, and the split of the valid",
        ),
        ("chat_template", "{% for m in messages %}", "write it to a file, and its path as data.chat_template"),
    ):
        (told_of,) = [str(fate) for fate in convert("hf-trainer", {**given, key: value}, 1).fates if fate.differs]
        assert told_of.startswith(f"{key}: dropped because it is ")
        assert line in told_of


def test_a_misspelled_word_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="write distributed_type: FSDP"):
        convert("accelerate", {"distributed_type": "FSPD"})


def test_defaults_of_deepspeed() -> None:
    """Those of version 0.19.8, which the file does not need to set."""

    def optim(kind: str, optimizer: dict[str, Any], **params: Any) -> tuple[dict[str, Any], list[str]]:
        scheduler = {"scheduler": {"type": kind, "params": {"total_num_steps": 5000, **params}}} if kind else {}
        found = convert("deepspeed", {**ZERO, **scheduler, "optimizer": {"type": "AdamW", "params": optimizer}}, 8)
        assert found.get("trainer.gradient_clip_val") == 1.0
        return found.get("model.optim"), [fate.key for fate in found.fates if fate.differs]

    adam = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    linear, log = {"warmup_type": "linear"}, ["scheduler.params.warmup_type (log by default)"]
    assert optim("", {}) == ({**adam, "schedule": "constant"}, [])
    assert optim("", {"torch_adam": True})[0]["weight_decay"] == 0.01
    constant = {**adam, "lr": 2e-5, "schedule": "constant", "warmup_steps": 1000}
    assert optim("WarmupLR", {"lr": 2e-5}, **linear) == (constant, [])
    assert optim("WarmupLR", {"lr": 2e-5}) == (constant, log)
    # this schedule has a rate of its own
    assert optim("WarmupDecayLR", {"lr": 2e-5}) == ({**adam, "schedule": "linear", "warmup_steps": 1000}, log)
    assert optim("WarmupDecayLR", {"lr": 2e-5}, warmup_max_lr=3e-5, **linear)[0]["lr"] == 3e-5
    cosine = {**adam, "lr": 2e-5, "schedule": "cosine", "warmup_steps": 1000, "min_lr_ratio": 0.0001}
    assert optim("WarmupCosineLR", {"lr": 2e-5}, **linear) == (cosine, [])
    assert optim("WarmupCosineLR", {"lr": 2e-5}, warmup_num_steps=1) == ({**cosine, "warmup_steps": 1}, [])
    unknown = convert("deepspeed", {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1e-3}}})
    keys = {fate.key for fate in unknown.fates if fate.differs}
    assert keys == {"scheduler.type", "scheduler.params.cycle_max_lr"}
    biased = {"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}
    assert [fate.key for fate in convert("deepspeed", biased).fates if fate.differs] == [
        "optimizer.params.bias_correction"
    ]
    rate_is_missing = convert("deepspeed", {"scheduler": {"type": "WarmupLR", "params": linear}}).to_give[0]
    assert "model.optim.lr" in rate_is_missing
    own = convert("accelerate", {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"x": 1}})
    assert own.get("trainer.gradient_clip_val") == 1.0  # of Accelerate, in all versions


def test_batch_sizes_of_deepspeed_agree() -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    assert convert("deepspeed", sizes, 8).get("data.global_batch_size") == 64
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    zero = {**dict.fromkeys(sizes, "auto"), "train_batch_size": 64}
    for kind, given, ranks, fix in (
        ("deepspeed", {**sizes, "gradient_accumulation_steps": 2}, 8, 32),
        ("deepspeed", {**sizes, "train_micro_batch_size_per_gpu": 5}, None, 60),
        ("deepspeed", {"train_batch_size": 50, "train_micro_batch_size_per_gpu": 2}, 8, 48),
        ("hf-trainer", {**arguments, "deepspeed": zero}, 8, 32),
    ):
        with pytest.raises(ConfigError) as error:
            convert(kind, given, ranks)
        assert error.value.field.endswith("train_batch_size")
        assert error.value.fix == f"write train_batch_size: {fix}"
    for shared in ({"sequence_parallel_size": 2}, {"tensor_parallel": {"autotp_size": 2}}):  # ranks that share rows
        convert("deepspeed", {**sizes, "train_batch_size": 32, **shared}, 8)


def test_lists_with_one_target() -> None:
    """TRL passes their item to peft: a word or a pattern."""
    for given, ours in (
        (["all-linear"], "all-linear"),
        ("All-Linear", "all-linear"),
        ([r".*\.q_proj"], r".*\.q_proj"),
        (["lm_head"], ["lm_head"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
    ):
        found = convert("hf-trainer", {"use_peft": True, "lora_target_modules": given}, 1)
        assert found.get("model.lora.target_modules") == ours


def test_the_metric_of_the_best_checkpoint_and_which_end_is_better() -> None:
    for given, monitor, mode in (
        ({"metric_for_best_model": "loss"}, "val_loss", "min"),
        ({"metric_for_best_model": "eval_loss", "greater_is_better": False}, "val_loss", "min"),
        ({"metric_for_best_model": "eval_mean_token_accuracy"}, "val_token_accuracy", "max"),
        ({"metric_for_best_model": "eval_rewards/margins", "greater_is_better": True}, "val_rewards/margins", "max"),
        ({"load_best_model_at_end": True}, None, None),
        ({"metric_for_best_model": "accuracy"}, None, None),  # not logged here
        ({"metric_for_best_model": "eval_loss", "greater_is_better": "auto"}, "val_loss", "min"),
        ({"greater_is_better": True}, None, None),  # means nothing without a metric
    ):
        found = convert("hf-trainer", given, 1)
        assert (found.get("checkpoint.monitor"), found.get("checkpoint.mode")) == (monitor, mode)
        assert not found.differs


def test_values_that_switch_a_limit_off() -> None:
    found = convert("hf-trainer", {"ddp_timeout": 180000000, "save_total_limit": 0, "neftune_noise_alpha": 0}, 1)
    assert not found.differs
    assert found.get("timeout_seconds") == 604800
    assert "ddp_timeout: kept as timeout_seconds: 604800 (at most a week)" in map(str, found.fates)
    assert found.get("checkpoint.keep_last") == -1
    assert "neftune_alpha" not in found.recipe["model"]


def test_files_of_other_methods_are_rejected_by_name() -> None:
    for key, method in (("num_generations", "GRPO or RLOO"), ("desirable_weight", "KTO")):
        with pytest.raises(ConfigError, match=f"^{key}: got an argument of {method}"):
            convert("hf-trainer", {"learning_rate": 1e-6, key: 8}, 1)


def test_pretraining_of_axolotl_streams() -> None:
    values = {
        "base_model": "some/model",
        "max_steps": 100,
        "pretraining_dataset": [{"path": "a/b", "type": "pretrain"}],
    }
    for more, streams in (({}, True), ({"streaming": False}, None)):
        assert convert("axolotl", {**values, **more}, 1).get("data.streaming") is streams
    held_out = convert("axolotl", {**values, "max_steps": None, "num_epochs": 1, "val_set_size": 0.1}, 1)
    assert [fate.key for fate in held_out.fates if "a stream has no rows" in fate.text] == ["val_set_size"]
    assert held_out.get("data.val_split") is None
    assert "Set trainer.max_steps: the length of a stream is unknown." in held_out.to_give
    assert convert("hf-trainer", {"learning_rate": 1e-6, "desirable_weight": None}, 1)
