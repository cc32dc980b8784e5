"""The training loop of ``TrainingArguments``: batches, optimizer, schedule and length."""

from __future__ import annotations

import math
from typing import Any

from lit_fsdp.convert.hf_run import convert_checkpoints, convert_data, convert_validation
from lit_fsdp.convert.hf_switches import Batches
from lit_fsdp.convert.read import as_bool, as_count, as_number, drop_listed
from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

_NUMBERS: dict[str, float] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 5e-5, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0, "warmup_steps": 0,
    "warmup_ratio": 0.0, "max_steps": -1, "num_train_epochs": 3.0, "seed": 42,
}  # fmt: skip
_WHOLE = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "seed")
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
              "cosine_with_min_lr": "cosine"}  # fmt: skip
_QUIET = {
    **dict.fromkeys(
        "do_train do_eval do_predict overwrite_output_dir resume_from_checkpoint local_rank push_to_hub hub_token "
        "hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision debug skip_memory_metrics".split(),
        "the command decides: lit-fsdp fit, validate, export, --ckpt_path",
    ),
    **dict.fromkeys(
        "logging_strategy logging_first_step logging_dir log_on_each_node logging_nan_inf_filter log_level "
        "log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id include_num_input_tokens_seen include_tokens_per_second".split(),
        "logging is trainer.logger and trainer.log_every_n_steps",
    ),
    **dict.fromkeys(
        "prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
        "include_for_metrics batch_eval_metrics eval_delay bf16_full_eval fp16_full_eval".split(),
        "validation has the precision and the metrics of the recipe",
    ),
    **dict.fromkeys(
        "save_only_model save_on_each_node save_safetensors enable_jit_checkpoint load_best_model_at_end "
        "restore_callback_states_from_checkpoint ignore_data_skip".split(),
        "checkpoints are whole, and last, best or a path is resumed",
    ),
    **dict.fromkeys(
        "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context dataloader_drop_last remove_unused_columns label_names "
        "length_column_name".split(),
        "the data module has its own loader, with whole global batches only",
    ),
    **dict.fromkeys(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph".split(),
        "the strategy decides",
    ),
    **dict.fromkeys(
        ("use_cache", "torch_empty_cache_steps", "full_determinism", "use_liger_kernel", "liger_kernel_config"),
        "it changes speed and memory, not what is computed",
    ),
}
_OTHER_TRAINING = ("label_smoothing_factor", "neftune_noise_alpha", "auto_find_batch_size", "optim_args",
                   "optim_target_modules", "group_by_length", "parallelism_config")  # fmt: skip
KNOWN = (*_NUMBERS, *_QUIET, *_OTHER_TRAINING, "lr_scheduler_type", "lr_scheduler_kwargs", "optim", "tf32", "data_seed",
         "average_tokens_across_devices", "train_sampling_strategy", "logging_steps", "save_steps", "save_strategy",
         "save_total_limit", "eval_steps", "eval_strategy", "evaluation_strategy", "per_device_eval_batch_size",
         "metric_for_best_model", "greater_is_better", "dataloader_num_workers", "output_dir", "model_name_or_path",
         "max_length", "max_seq_length", "train_file", "validation_file")  # fmt: skip


def loop_values(section: Section) -> dict[str, Any]:
    """The numbers of the loop with Transformers' defaults; the keys stay in the section."""
    found: dict[str, Any] = {}
    for key, default in _NUMBERS.items():
        value, name = section.peek(key, default), section.name(key)
        least = -1 if key == "max_steps" else 1 if key in _WHOLE[:2] else 0
        found[key] = as_count(name, value, least) if key in _WHOLE else as_number(name, value, least)
    return found


def convert_loop(
    conversion: Conversion, section: Section, ranks: int | None, zero: dict[str, Any], batches: Batches
) -> None:
    """Convert everything that is not the strategy.

    Args:
        conversion: Takes the recipe and the lines.
        section: The arguments.
        ranks: Ranks of the run, if known.
        zero: The DeepSpeed configuration beside it, if any.
        batches: What ``accelerator_config`` says about the batches.
    """
    values = loop_values(section)
    if batches.steps_key:
        values["gradient_accumulation_steps"] = batches.steps
    said = {key: taken[0] for key in _NUMBERS if (taken := section.take(key))}

    def put(key: str, path: str, value: Any, note: str = "", differs: bool = False) -> None:
        if key in said:
            conversion.keep(said[key], path, value, note, differs)
        else:
            conversion.put(path, value)

    put("seed", "seed_everything", values["seed"])
    _batches(conversion, said, values, ranks, batches)
    _length(conversion, put, said, values)
    if "gradient_clipping" not in zero or zero["gradient_clipping"] == "auto":
        if values["max_grad_norm"]:
            put("max_grad_norm", "trainer.gradient_clip_val", values["max_grad_norm"])
        elif "max_grad_norm" in said:
            conversion.drop(said["max_grad_norm"], "0 clips nothing")
    elif "max_grad_norm" in said:
        conversion.drop(said["max_grad_norm"], "the deepspeed configuration says the same")
    if not isinstance(zero.get("optimizer"), dict):
        put("learning_rate", "model.optim.lr", values["learning_rate"])
        put("weight_decay", "model.optim.weight_decay", values["weight_decay"], "matrices only, as there")
        put("adam_beta1", "model.optim.beta1", values["adam_beta1"])
        put("adam_beta2", "model.optim.beta2", values["adam_beta2"])
        put("adam_epsilon", "model.optim.eps", values["adam_epsilon"])
    else:
        for key in ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
            if key in said:
                conversion.drop(said[key], "the optimizer of the deepspeed configuration takes its place")
    _schedule(conversion, section, put, said, values, zero)
    _optimizer(conversion, section)
    convert_checkpoints(conversion, section)
    convert_validation(conversion, section, values)
    convert_data(conversion, section, ranks)
    drop_listed(conversion, section, _QUIET)
    for key in _OTHER_TRAINING:
        if taken := section.take(key):
            off = taken[1] in (False, 0, "", "none", [])
            conversion.drop(taken[0], "it is off" if off else "there is no such method here", differs=not off)


def _batches(
    conversion: Conversion, said: dict[str, str], values: dict[str, Any], ranks: int | None, batches: Batches
) -> None:
    micro, steps = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    size = said.get("per_device_train_batch_size", "per_device_train_batch_size (8 by default)")
    key = said.get("gradient_accumulation_steps", "gradient_accumulation_steps (1 by default)")
    total = micro * steps * ranks if ranks else None
    factors = f"{micro} * {steps} * {ranks} ranks"
    if batches.split:
        total, factors = micro * steps, f"{micro} over all ranks * {steps}"
        micro = micro // ranks if ranks else 1
        conversion.put("data.micro_batch_size", micro)
        conversion.replace(size, f"data.micro_batch_size: {micro}", f"{batches.split} splits a batch over the ranks")
        conversion.replace(batches.split, f"data.global_batch_size: {total}", factors)
    elif "per_device_train_batch_size" in said:
        conversion.keep(size, "data.micro_batch_size", micro)
    else:
        conversion.put("data.micro_batch_size", micro)
    if batches.steps_key and "gradient_accumulation_steps" in said:
        conversion.drop(key, f"{batches.steps_key} takes its place")
    key = batches.steps_key or key
    if total:
        conversion.put("data.global_batch_size", total)
        conversion.replace(key, f"data.global_batch_size: {total}", factors)
    elif conversion.get("data.global_batch_size") is None:
        conversion.to_give.append(f"Set data.global_batch_size: {micro * steps} * ranks.")
        if not any(fate.differs and "--ranks" in fate.text for fate in conversion.fates):
            conversion.replace(key, "data.global_batch_size, which you give",
                               "the ranks are not in this file: add --ranks N", differs=True)  # fmt: skip
        elif batches.steps_key or "gradient_accumulation_steps" in said:
            conversion.replace(key, "data.global_batch_size, which you give", "see above")
    elif batches.steps_key or "gradient_accumulation_steps" in said:
        conversion.replace(key, f"data.global_batch_size: {conversion.get('data.global_batch_size')}", "as DeepSpeed")


def _length(conversion: Conversion, put: Any, said: dict[str, str], values: dict[str, Any]) -> None:
    epochs, steps = values["num_train_epochs"], values["max_steps"]
    if steps > 0:
        put("max_steps", "trainer.max_steps", steps)
        if "num_train_epochs" in said:
            conversion.drop(said["num_train_epochs"], "max_steps is above it")
        return
    if "max_steps" in said:
        conversion.drop(said["max_steps"], "it leaves the length to num_train_epochs")
    whole = max(1, math.ceil(epochs))
    note = "" if whole == epochs else f"whole epochs only, not {epochs:g}: set trainer.max_steps"
    put("num_train_epochs", "trainer.max_epochs", whole, note, whole != epochs)


def _schedule(
    conversion: Conversion, section: Section, put: Any, said: dict[str, str], values: dict[str, Any],
    zero: dict[str, Any],
) -> None:  # fmt: skip
    taken, extra = section.take("lr_scheduler_type"), section.take("lr_scheduler_kwargs")
    if isinstance(zero.get("scheduler"), dict):
        written = [taken and taken[0], extra and extra[0], said.get("warmup_steps"), said.get("warmup_ratio")]
        for path in written:
            if path:
                conversion.drop(path, "the scheduler of the deepspeed configuration takes its place")
        return
    word = str(taken[1]).lower() if taken else "linear"
    if word in _SCHEDULES:
        conversion.put("model.optim.schedule", _SCHEDULES[word])
        if taken:
            conversion.keep(taken[0], "model.optim.schedule", _SCHEDULES[word])
    elif taken:
        conversion.drop(taken[0], f"there is no schedule {word} here", differs=True)
    if extra:
        if not isinstance(extra[1], dict):
            raise ConfigError(extra[0], repr(extra[1]), "a mapping or JSON text", f"write {extra[0]}: {{}}")
        for key, value in extra[1].items():
            path = f"{extra[0]}.{key}"
            if word == "cosine_with_min_lr" and key in ("min_lr_rate", "min_lr"):
                peak = values["learning_rate"] or 1.0
                share = float(f"{as_number(path, value) / (peak if key == 'min_lr' else 1):.9g}")
                conversion.keep(path, "model.optim.min_lr_ratio", share)
            else:
                conversion.drop(path, "the schedules here have no such number", differs=True)
    warmup, key = values["warmup_steps"], "warmup_steps"
    if not warmup and values["warmup_ratio"]:
        warmup, key = values["warmup_ratio"], "warmup_ratio"
    if word == "constant":
        warmup = 0
    if 0 < warmup < 1 and values["max_steps"] <= 0:
        conversion.to_give.append(f"Set model.optim.warmup_steps: {warmup:g} of all steps.")
        conversion.drop(said[key], "a share of the steps needs max_steps: set model.optim.warmup_steps", differs=True)
    else:
        steps = math.ceil(warmup * values["max_steps"]) if 0 < warmup < 1 else int(warmup)
        put(key, "model.optim.warmup_steps", steps, "the first step has 1/n of the rate instead of 0" if steps else "")
    for other in ("warmup_steps", "warmup_ratio"):
        if other != key and other in said:
            conversion.drop(said[other], f"{key} decides")


def _optimizer(conversion: Conversion, section: Section) -> None:
    if taken := section.take("optim"):
        same = str(taken[1]).lower() in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "default_optim")
        conversion.replace(taken[0], "torch's fused AdamW", "the same formula" if same else
                           f"{taken[1]} is another optimizer", differs=not same)  # fmt: skip
    if taken := section.take("tf32"):
        lowers = as_bool(*taken) and conversion.get("precision") == "fp32"
        why = "fp32 means fp32 here" if lowers else "no matrix product is left in fp32 that it would change"
        conversion.drop(taken[0], why if as_bool(*taken) else "it is off here too", differs=lowers)
