"""Convert Transformers ``TrainingArguments`` from JSON or YAML."""

import math
import re
from pathlib import Path
from typing import Any

from lit_fsdp.config.command_line import PREFERENCE
from lit_fsdp.config.words import ROWS_FILES
from lit_fsdp.convert.accelerate import SHARDINGS, convert_fsdp, fsdp_table
from lit_fsdp.convert.conversion import Conversion, Given, choose, names, number, read_mapping
from lit_fsdp.convert.deepspeed import put_deepspeed, put_engine, put_precision
from lit_fsdp.convert.tables import FILLED_IN, OFF, ONLY_ADAMW, Drop, Keep, Source, Table, put_data_sets, rows
from lit_fsdp.errors import require

_RECOMPUTE = Keep("activation_checkpointing.mode", {"true": "full", "false": None}, "the blocks of the wrap choice")
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
              "cosine_with_min_lr": "cosine"}  # fmt: skip
ARGUMENTS: Table = {
    **rows("fsdp use_cpu bf16 fp16 max_steps num_train_epochs warmup_steps warmup_ratio save_strategy "
           "save_steps eval_strategy evaluation_strategy eval_steps lr_scheduler_kwargs.min_lr deepspeed", None),
    "seed": Keep("seed_everything"),
    "per_device_train_batch_size": Keep("data.micro_batch_size"),
    **rows("gradient_accumulation_steps accelerator_config.gradient_accumulation_kwargs.num_steps",
           Keep("trainer.accumulate_grad_batches")),
    "max_grad_norm": Keep("trainer.gradient_clip_val"),
    "learning_rate": Keep("model.optim.lr"),
    "weight_decay": Keep("model.optim.weight_decay", why="matrices only, as in Transformers"),
    "adam_beta1": Keep("model.optim.beta1"),
    "adam_beta2": Keep("model.optim.beta2"),
    "adam_epsilon": Keep("model.optim.eps"),
    "lr_scheduler_type": Keep("model.optim.schedule", _SCHEDULES, other="this schedule is not supported"),
    "lr_scheduler_kwargs.min_lr_rate": Keep("model.optim.min_lr_ratio"),
    "optim": Drop(ONLY_ADAMW,
                  "adamw_torch adamw_torch_fused adamw_hf paged_adamw paged_adamw_32bit "
                  "default_optim"),
    "save_total_limit": Keep("checkpoint.keep_last", lambda key, value: max(0, number(key, value)) or -1,
                             "and the best checkpoint"),
    "output_dir": Keep("trainer.default_root_dir", lambda key, value: value or None),
    "per_device_eval_batch_size": Drop("validation uses data.micro_batch_size"),
    "data_seed": Keep("data.seed"),
    "dataloader_num_workers": Keep("data.num_workers"),
    **rows("max_seq_length max_length", Keep("data.max_seq_length")),
    "packing": Keep("data.packing", {"true": True, "false": None}),
    "assistant_only_loss": Drop("assistant turns are supervised; data.train_on_prompt: true supervises all", "true"),
    "completion_only_loss": Drop("completions are supervised; data.train_on_prompt: true supervises all", "true none"),
    "model_name_or_path": Keep("model.name", lambda key, value: value or None),
    "train_file": Keep("data.train", lambda key, value: value or None),
    "validation_file": Keep("data.val", lambda key, value: value or None),
    "train_sampling_strategy": Keep("data.shuffle", {"random": True, "sequential": False}, other="rows are shuffled"),
    **rows("gradient_checkpointing activation_checkpointing", _RECOMPUTE),
    "torch_compile": Keep("compile", {"true": True, "false": None}, "block by block"),
    "torch_compile_backend": Keep("compile", {"inductor": True}, other="only inductor compiles blocks"),
    "ddp_timeout": Keep("timeout_seconds", lambda key, value: min(number(key, value), 604_800), "at most a week"),
    "ddp_backend": Keep("process_group_backend", {"nccl": "nccl", "gloo": "gloo"}, other="only gloo and nccl work"),
    "tf32": Drop("fp32 never uses TF32 here; with bf16 and fp16 it has no effect"),
    "average_tokens_across_devices": Drop("every token has equal weight here, on any rank", "true"),
    "neftune_noise_alpha": Keep("model.neftune_alpha", lambda key, value: number(key, value) or None),
    **rows("label_smoothing_factor auto_find_batch_size optim_args optim_target_modules "
           "group_by_length parallelism_config accelerator_config.split_batches",
           Drop("this method is not supported", OFF)),
    **rows("do_* overwrite_output_dir resume_from_checkpoint local_rank push_to_hub hub_* debug skip_memory_metrics",
           Drop("the command sets it: lit-fsdp fit, validate, export, --ckpt_path")),
    "logging_steps": Keep("trainer.log_every_n_steps", lambda key, value: int(number(key, value)) or None),
    **rows("logging_* log_* disable_tqdm report_to run_name project trackio_* include_*",
           Drop("logging is trainer.logger and trainer.log_every_n_steps")),
    **rows("prediction_loss_only eval_* batch_eval_metrics *_full_eval", Drop("the recipe configures validation")),
    **rows("metric_for_best_model greater_is_better", None),
    "load_best_model_at_end": Drop("best in the run folder is that checkpoint; checkpoint.export: best exports it"),
    **rows("save_* enable_jit_checkpoint restore_callback_states_from_checkpoint ignore_data_skip",
           Drop("the section checkpoint sets it")),
    **rows("dataloader_* remove_unused_columns label_names length_column_name accelerator_config.*",
           Drop("the data module has its own loader, with whole global batches only")),
    **rows("torch_compile_mode gradient_checkpointing_kwargs activation_checkpointing_kwargs ddp_* use_cache "
           "torch_empty_cache_steps full_determinism use_liger_kernel liger_kernel_config",
           Drop("it affects speed and memory, not results")),
}  # fmt: skip


_METRICS = {
    "loss": "val_loss", "mean_token_accuracy": "val_token_accuracy", "rewards/margins": "val_rewards/margins",
    "rewards/accuracies": "val_rewards/accuracies",
}  # fmt: skip
"""Metrics of an evaluation, without the prefix ``eval_``, that are logged here."""


def _put_monitor(conversion: Conversion, source: Source) -> None:
    """Convert the metric of the best checkpoint, and whether a larger value is better."""
    metric, greater = source.take("metric_for_best_model"), source.take("greater_is_better")
    ours = _METRICS.get(str(metric.value).removeprefix("eval_"))
    if ours is None:
        conversion.drop(metric, f"val_loss selects the best checkpoint; other metrics: {', '.join(_METRICS.values())}")
        conversion.drop(greater, "it belongs to metric_for_best_model")
        return
    conversion.keep(metric, "checkpoint.monitor", ours)
    is_max = not ours.endswith("loss") if greater.value in (None, "auto") else greater.on
    conversion.put("checkpoint.mode", "max" if is_max else "min")
    conversion.say(greater, f"kept as checkpoint.mode: {'max' if is_max else 'min'}")


def _targets(key: str, value: Any) -> Any:
    """Return a name as a list, but all-linear and a pattern as text, for which TRL takes a list with one item."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if str(one).lower() == "all-linear":
        return "all-linear"
    return [one] if re.fullmatch(r"[\w.]+", str(one)) else one


ADAPTERS: Table = {
    **{f"lora_{name}": Keep(f"model.lora.{name}") for name in "r alpha dropout modules_to_save".split()},
    "lora_target_modules": Keep("model.lora.target_modules", _targets),
}
_TRL: Table = {  # its SFTConfig, ModelConfig and ScriptArguments, 1.16
    **rows(
        "use_peft load_in_4bit datasets dataset_name dataset_config dataset_train_split dataset_test_split "
        "dataset_text_field dtype",
        None,
    ),
    "chat_template_path": Keep("data.chat_template"),
    **rows("dataset_num_proc preprocessing_num_workers", Keep("data.num_tokenizers")),
    "truncation_mode": Keep("data.truncation", {"keep_start": "end", "keep_end": "start"}),
    "packing_strategy": Drop("packs are built by best-fit decreasing, and longer rows are truncated", "bfd"),
    "loss_type": Drop("the loss is the mean over supervised tokens", "nll chunked_nll"),
    "eos_token": Drop("the chat template ends turns, and the tokenizer's EOS ends texts", OFF),
    "trust_remote_code": Keep("model.trust_remote_code"),
    "model_revision": Drop("models are loaded at their main revision: download another and name its folder", "main"),
    **rows(
        "load_in_8bit lora_target_parameters model_init_kwargs router_aux_loss_coef dataset_kwargs",
        Drop("this key has no counterpart; see model.lora and model.config_overrides", OFF),
    ),
    **rows(
        "shuffle_dataset padding_free pad_to_multiple_of pad_token activation_offloading",
        Drop("it does not change what is trained: rows are shuffled, and padding is never supervised"),
    ),
    **ADAPTERS,
    "use_rslora": Keep("model.lora.use_rslora"),
    "use_dora": Keep("model.lora.use_dora"),
    "use_bnb_nested_quant": Keep("model.lora.double_quantization"),
    **rows("bnb_4bit_quant_type bnb_4bit_quant_storage", Drop("4-bit weights are NF4", "nf4 uint8")),
    "lora_task_type": Drop("the model is causal", "CAUSAL_LM"),
    "attn_implementation": Keep("model.attn_implementation"),
    **rows("dataset_streaming streaming ignore_bias_buffers", Drop("it does not change what is trained")),
    "env": Drop("environment variables train nothing: set them in the job"),
    # of the alignment handbook
    **rows("dataset_mixer dataset_mixture", Drop("it is not read: write data.train: ['NAME:SPLIT', …]; a share of the "
                                                 "rows of one is 'NAME:SPLIT[:50%]'", OFF)),
    **rows("dataset_splits dataset_configs", Drop("it is part of a name: write data.train: NAME:CONFIG:SPLIT, and the "
                                                  "split of the validation rows as data.val", OFF)),
    "chat_template": Drop("it is a text: write it to a file, and its path as data.chat_template", OFF),
}  # fmt: skip
"""Keys of TRL's scripts, besides those of TrainingArguments."""
_OF_MIXTURE: Table = {
    "columns": Drop("columns that a row format does not have are not read"),
    "data_dir": Drop("name its files as data_files", OFF),
}
"""Keys of one of TRL's ``datasets``, besides those of all data sets."""
_ONLY_TRL = set(
    "use_peft packing datasets max_length "
    "assistant_only_loss completion_only_loss dataset_train_split dataset_test_split "
    "dataset_text_field dataset_num_proc packing_strategy padding_free truncation_mode chat_template_path".split()
)
"""Keys that scripts of Transformers do not have; a file with one of them has TRL's defaults."""
_DPO: Table = {  # its DPOConfig
    **_TRL,
    "beta": Keep("model.preference.beta"),
    "loss_type": Keep("model.preference.loss", {"sigmoid": "dpo", "ipo": "ipo"}, other="this loss is not supported"),
    "label_smoothing": Keep("model.preference.label_smoothing"),
    **rows("precompute_ref_log_probs precompute_ref_batch_size use_logits_to_keep generate_during_eval "
           "disable_dropout", Drop("it does not change what is trained")),
    **rows("ref_model_* reference_free sync_ref_model rpo_alpha use_weighting f_divergence_type ld_alpha loss_weights "
           "max_prompt_length max_completion_length", Drop("this option is not supported", f"{OFF} reverse_kl")),
}  # fmt: skip


_OTHER_METHODS = {
    "num_generations": "GRPO or RLOO", "num_ppo_epochs": "PPO", "desirable_weight": "KTO",
    "center_rewards_coefficient": "a reward model", "lmbda": "GKD",
}  # fmt: skip
"""Arguments that only TRL's other trainers have."""
_MASKS_OF_TRL = ("assistant_only_loss", "completion_only_loss", "dataset_text_field")
"""Keys that select the supervised tokens."""


def put_defaults_of_trl(conversion: Conversion, values: dict[str, Any], is_bf16: bool, is_dpo: bool) -> None:
    """Apply TRL's defaults that differ from those of TrainingArguments to keys that the file does not set."""
    found = ["bf16"] if is_bf16 else []
    for key, path, value in (
        ("learning_rate", "model.optim.lr", 1e-6 if is_dpo else 2e-5),  # DPOConfig, SFTConfig
        ("gradient_checkpointing", "activation_checkpointing.mode", "full"),
        ("logging_steps", "trainer.log_every_n_steps", 10),
        ("max_length", "data.max_seq_length", 1024),
    ):
        if key == "max_length" and key in values and values[key] is None:
            conversion.say(Given(key, None), "dropped because TRL does not truncate: set data.max_seq_length", True)
        elif values.get(key) is None and not (key == "max_length" and values.get("max_seq_length")):
            conversion.put(path, value)
            found.append(f"{key} {value}")
    if found:
        conversion.say(Given("(keys that are not set)", ""), f"as in TRL: {', '.join(found)}")
    if not is_dpo and all(values.get(key) is None for key in _MASKS_OF_TRL):
        why = "TRL trains on all tokens of conversations, but here only on assistant turns: set data.train_on_prompt: "
        why += "true, or write assistant_only_loss: true (prompts and completions: completion_only_loss: true) into "
        why += "the file"
        conversion.drop(Given("assistant_only_loss (false by default)", False), why, differs=True)


def put_adapters(conversion: Conversion, source: Source, folder: Path, validates: bool) -> None:
    """Convert TRL's choice of adapters, with its defaults, and the name of its data; ``validates``: on a split."""
    adapters, bits = source.take("use_peft", False), source.take("load_in_4bit", False)
    if adapters.on:
        conversion.say(adapters, "kept as model.lora")
        conversion.put("model.lora", {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": None})
    else:
        conversion.drop(adapters, "all weights are trained")
    if adapters.on and bits.on:
        conversion.keep(bits, "model.lora.quantize", "nf4")
        conversion.put("model.lora.double_quantization", False)
    else:
        conversion.drop(bits, "only the base of adapters is quantized", differs=bits.on)
    if not adapters.on:
        source.ignore("lora_ use_rslora use_dora use_bnb_nested_quant bnb_", "there are no adapters")
    mixture = source.take("datasets")
    if mixture.key:

        def begin(key: str, own: str, entry: dict[str, Any]) -> Source:
            return Source(conversion, _OF_MIXTURE, entry, key)

        put_data_sets(conversion, mixture, "data.train", "path", begin)
    parts = [source.take(f"dataset_{part}") for part in ("name", "config", "train_split")]
    data, subset, split = parts
    text = source.take("dataset_text_field", "text")
    name = str(data.value)
    if not Path(name).exists() and (folder / name).exists():
        name = str(folder / name)
    is_local = name.endswith(ROWS_FILES) or Path(name).exists()
    if data.key and not is_local:
        name = ":".join(str(part) for part in (name, subset.value, split.value or "train") if part)
    if data.key:
        conversion.keep(data, "data.train", name)
    for part in parts[1:]:
        conversion.drop(part, "files have no configurations and splits" if is_local else "part of data.train")
    tests = source.take("dataset_test_split", "test")
    if validates and data.key and not is_local:
        rows_of = ":".join(str(part) for part in (data.value, subset.value, tests.value) if part)
        conversion.keep(tests, "data.val", rows_of)
    else:
        why = "files have no splits" if data.key else "only dataset_name has this split"
        conversion.drop(tests, why if validates else "no split is validated")
    if text.value != "text":
        conversion.keep(text, "data.columns", {"text": text.value}, "for rows of text; drop it for conversations")
    else:
        conversion.drop(text, "it is the default")


def convert_hf_trainer(conversion: Conversion, values: dict[str, Any], folder: Path, ranks: int | None) -> None:
    """Convert TrainingArguments; file paths are resolved relative to here, then to ``folder``."""
    for key, method in _OTHER_METHODS.items():
        given, fix = f"an argument of {method}", "convert a file for SFT or DPO"
        require(values.get(key) is None, key, given, "arguments of supervised fine-tuning or DPO", fix)
    for key in ("fsdp_config", "accelerator_config", "lr_scheduler_kwargs"):
        if isinstance(values.get(key), str):
            values[key] = read_mapping(key, values[key], folder) if values[key] else None
    first = {"reshard_after_forward": Keep("sharding", SHARDINGS), "limit_all_gathers": Keep("limit_all_gathers")}
    version, table = fsdp_table(values, "2", first)
    is_dpo = values.get("beta") is not None or values.get("loss_type") in ("sigmoid", "ipo")
    own = _DPO if is_dpo else _TRL
    source = Source(conversion, {**ARGUMENTS, **own, **table}, values, aliases={"torch_dtype": "dtype"})
    if is_dpo:
        conversion.put("model.class_path", PREFERENCE)
        if not values.get("loss_type"):
            missing = Given("loss_type (sigmoid by default)", "")
            note = "if the file is for DPO, write it into the file"
            conversion.keep(missing, "model.preference.loss", "dpo", note, differs=True)
    cpu = source.take("use_cpu", False)
    if cpu.on:
        conversion.keep(cpu, "trainer.accelerator", "cpu")
    else:
        conversion.put("trainer.accelerator", "auto")
        conversion.drop(cpu, "it is off")
    is_trl = is_dpo or not _ONLY_TRL.isdisjoint(values)
    fp16 = source.take("fp16", False)
    switches = [source.take("bf16", is_trl and not fp16.on), fp16]
    words = [Given(one.key, name) for one, name in zip(switches, ("bf16", "fp16"), strict=True) if one.on]
    for one in switches:
        if not one.on:
            conversion.drop(one, "it is off")
    put_rest = put_deepspeed(conversion, source, folder, ranks)
    if not put_rest:
        put_strategy(conversion, source, version, ranks, cpu.on)
    _put_dtype(conversion, source, bool(values.get("use_peft")), switches)
    in_bf16 = conversion.get("precision.mode")
    for word in words:
        if in_bf16:
            conversion.drop(word, "the dtype of the weights applies")
        else:
            put_precision(conversion, word)
    if is_trl:
        put_defaults_of_trl(conversion, values, switches[0].on and not switches[0].key, is_dpo)
    elif values.get("dataset_name"):
        note = "as in TrainingArguments; if the file is for TRL's scripts, write max_length: 1024 into it"
        conversion.say(Given("(keys that are not set)", ""), note)
    put_loop(conversion, source, values)
    evaluates = values.get("eval_strategy") or values.get("evaluation_strategy")
    validates = str(evaluates).lower() in ("steps", "epoch")
    put_adapters(conversion, source, folder, validates and is_trl)
    source.rest()
    if validates and not conversion.get("data.val"):
        conversion.to_give.append("Set data.val or data.val_split: the input validates.")
    for path, value in FILLED_IN.items():
        conversion.put(path, value)
    if put_rest:
        put_rest()
    conversion.put("precision.mode", "fp32")


def _put_dtype(conversion: Conversion, source: Source, has_adapters: bool, switches: list[Given]) -> None:
    """Convert the dtype of loaded weights; bf16 weights are trained in bf16, but Accelerate upcasts them for FSDP."""
    dtype = source.take("dtype", "float32")
    word, is_mixed = str(dtype.value).removeprefix("torch."), switches[0].on
    if word == "bfloat16" and is_mixed and (has_adapters or conversion.get("engine").startswith("fsdp")):
        why = "the frozen base is in bf16 here" if has_adapters else "Accelerate trains FSDP's weights in fp32"
        conversion.drop(dtype, why)
    elif word == "bfloat16" and not switches[1].on and not has_adapters:
        note = "updates bf16 weights; precision: mixed keeps fp32 weights"
        conversion.keep(dtype, "precision.mode", "low_precision", note)
    else:
        why = "weights are in fp32; precision bf16-true keeps 16-bit weights"
        conversion.drop(dtype, why, differs=word != "float32")


def put_strategy(
    conversion: Conversion, source: Source, version: str, ranks: int | None, on_cpu: bool, default: bool = False
) -> None:
    """Convert ``fsdp`` and ``fsdp_config``; ``default``: whether FSDP is on if ``fsdp`` is missing."""
    switch = source.take("fsdp", default)
    words = [word.lower() for word in switch.read(names)]
    if on_cpu or words in ([], ["false"]):
        put_engine(conversion, "", ranks)
        why = "Transformers trains with DDP on a CPU" if on_cpu else "fsdp is off"
        conversion.say(switch, f"replaced by engine: {conversion.get('engine')} ({why})")
        source.ignore("fsdp_config. fsdp_version", why)
        return
    convert_fsdp(conversion, source, version, "full", "TRANSFORMER_BASED_WRAP", 0)
    conversion.put("cpu_ram_efficient_loading", False)
    on = ("engine", f"fsdp{version}")
    shardings = list(SHARDINGS.values())[: 2 if version == "2" else 5]  # version 2 has only these
    known = {"true": on, "auto_wrap": on, "offload": ("cpu_offload", True), **{w: ("sharding", w) for w in shardings}}
    for word in words:
        conversion.keep(switch, *choose("fsdp", word, known))


def put_loop(
    conversion: Conversion, source: Source, values: dict[str, Any], default_epochs: int = 3,
    save: str = "steps", evaluate: str = "no", first_ends: bool = False,
) -> None:  # fmt: skip
    """Convert settings that depend on several arguments: length, warm-up, checkpoints and validation.

    The arguments ``save`` and ``evaluate`` are the default strategies; ``first_ends``: whether the run ends with
    ``max_steps`` or the epochs, whichever is first, instead of ``max_steps``.
    """
    length, epochs = source.take("max_steps", -1), source.take("num_train_epochs", default_epochs)
    total = max(0, length.read(number))
    if total:
        conversion.keep(length, "trainer.max_steps", total, "or the epochs, whichever ends first" if first_ends else "")
    else:
        conversion.drop(length, "the number of epochs sets the length")
    if total and not first_ends:
        conversion.drop(epochs, "max_steps overrides it")
    else:
        whole, cut = max(1, math.ceil(epochs.read(number))), isinstance(epochs.read(number), float)
        conversion.keep(epochs, "trainer.max_epochs", whole, "whole epochs, or trainer.max_steps", differs=cut)

    if str(source.look("lr_scheduler_type")).lower() == "constant":
        source.ignore("warmup_", "a constant schedule ignores it")
    warmup, share = source.take("warmup_steps", 0), source.take("warmup_ratio", 0)
    used, other = (warmup, share) if warmup.read(number) else (share, warmup)
    conversion.drop(other, "the other warm-up setting applies")
    note = "the first step has 1/n of the rate instead of 0"
    if 0 < used.read(number) < 1:
        conversion.keep(used, "model.optim.warmup_ratio", used.read(number), note)
    else:
        conversion.keep(used, "model.optim.warmup_steps", math.ceil(used.read(number)), note)
    minimum = source.take("lr_scheduler_kwargs.min_lr")
    if minimum.key:
        peak = values.get("learning_rate") or conversion.get("model.optim.lr") or FILLED_IN["model.optim.lr"]
        peak = number("learning_rate", peak)
        conversion.keep(minimum, "model.optim.min_lr_ratio", float(f"{minimum.read(number) / peak:.9g}"))

    _put_monitor(conversion, source)
    batches = int(number("gradient_accumulation_steps", values.get("gradient_accumulation_steps") or 1))
    old = "evaluation_strategy" if "evaluation_strategy" in values else "eval_strategy"
    logging = values.get("logging_steps") or conversion.get("trainer.log_every_n_steps") or 500
    for name, default, every, steps_by_default, path, factor in (
        ("save_strategy", save, "save_steps", 500, "checkpoint.every_steps", 1),
        (old, evaluate, "eval_steps", logging, "trainer.val_check_interval", batches),  # counts micro-batches
    ):
        strategy, steps = source.take(name, default), source.take(every, steps_by_default)
        for given in (strategy, steps):
            if str(strategy.value).lower() == "steps" and steps.read(number) >= 1:
                conversion.keep(given, path, int(steps.read(number)) * factor)
            elif given is steps and 0 < steps.read(number) < 1:
                conversion.drop(given, f"it is a share of the run: set {path}")
            else:
                conversion.drop(given, f"{name} is {strategy.value}: see {path}")
    if conversion.get("trainer.val_check_interval"):
        conversion.put("trainer.check_val_every_n_epoch", None)
