"""Convert Axolotl's YAML, which contains arguments of the Transformers Trainer, some under other names."""

from pathlib import Path
from typing import Any

from lit_fsdp.config.command_line import PREFERENCE
from lit_fsdp.convert.accelerate import fsdp_table, put_shards
from lit_fsdp.convert.conversion import Conversion, Given, names, number
from lit_fsdp.convert.deepspeed import put_deepspeed, put_precision
from lit_fsdp.convert.hf_trainer import ADAPTERS, ARGUMENTS, put_loop, put_strategy
from lit_fsdp.convert.tables import (
    FILLED_IN,
    OFF,
    ONLY_ADAMW,
    UNSUPPORTED,
    Drop,
    Keep,
    Source,
    Table,
    put_data_sets,
    rows,
)
from lit_fsdp.errors import require

_ALIASES = {
    "base_model": "model_name_or_path", "micro_batch_size": "per_device_train_batch_size", "optimizer": "optim",
    "num_epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type", "sequence_len": "max_seq_length",
    "cosine_min_lr_ratio": "lr_scheduler_kwargs.min_lr_rate",
}  # fmt: skip
_DEFAULTS = {**FILLED_IN, "data.max_seq_length": 512, "data.truncation": "drop", "data.micro_batch_size": 1,
             "checkpoint.keep_last": 4, "model.optim.schedule": "cosine"}  # fmt: skip
_FORMATS = {"chat_template": "messages", "sharegpt": "sharegpt", "alpaca": "instruction", "completion": "text",
            "pretrain": "text"}  # fmt: skip
_TEMPLATES = {"tokenizer_default": None, "chatml": "chatml", "llama3": "llama3", "gemma": "gemma"}
_OFFLOAD = {"mode": "full", "offload_activations": True}
_KEPT = {
    "tokenizer_config": "model.tokenizer", "trust_remote_code": "model.trust_remote_code", "tokens": "model.add_tokens",
    "overrides_of_model_config": "model.config_overrides", "model_config": "model.config_overrides",
    "peft_use_dora": "model.lora.use_dora", "peft_use_rslora": "model.lora.use_rslora",
    "rl_beta": "model.preference.beta", "orpo_alpha": "model.preference.beta",
    "simpo_gamma": "model.preference.gamma", "dpo_label_smoothing": "model.preference.label_smoothing",
    "train_on_inputs": "data.train_on_prompt", "context_parallel_size": "context_parallel",
    "sequence_parallel_degree": "context_parallel",
    "dp_replicate_size": "replicate_degree",
}  # fmt: skip
_MASKS: Table = {
    "chat_template": Keep("data.chat_template", _TEMPLATES, other="this named template is not supported: write "
                          "chat_template: tokenizer_default if the tokenizer's own is the same, or set "
                          "data.chat_template to a file"),
    "roles_to_train": Drop("only assistant turns are supervised", "['assistant'] assistant"),
    **rows("train_on_eos train_on_eot", Drop("only the end of supervised turns is supervised", "turn")),
    "eot_tokens": Drop("the template defines where turns end"),
}  # fmt: skip
_AXOLOTL: Table = {
    **ARGUMENTS,
    **rows("rl adapter fp8 load_in_4bit lora_target_linear datasets test_datasets pretraining_dataset dp_shard_size "
           "tensor_parallel_size", None),
    **ADAPTERS,
    **{theirs: Keep(ours) for theirs, ours in _KEPT.items()},
    **_MASKS,
    "optim": Drop(ONLY_ADAMW,
                  "adamw_torch adamw_torch_fused adamw_hf paged_adamw_32bit"),
    "streaming": Keep("data.streaming", {"true": True, "false": None}),
    "sample_packing": Keep("data.packing", {"true": True, "false": None},
                           "micro_batch_size counts packs, of the same size as in Axolotl"),
    "excess_length_strategy": Keep("data.truncation", {"drop": "drop", "truncate": "end", "raise": "error"}),
    "val_set_size": Keep("data.val_split", lambda key, value: number(key, value) or None),
    "evals_per_epoch": Keep("trainer.val_check_interval", lambda key, value: 1 / max(1, number(key, value))),
    "saves_per_epoch": Drop("checkpoint.every_steps counts steps; the end and the best validation are saved"),
    "gradient_checkpointing": Keep("activation_checkpointing", {"true": {"mode": "full"}, "false": None,
                                   "offload": _OFFLOAD, "offload_disk": _OFFLOAD}),
    "fsdp_version": Keep("engine", {"1": "fsdp1", "2": "fsdp2"}),
    "special_tokens.pad_token": Drop("padding is never supervised"),
    "special_tokens.*": Drop("the tokenizer's own tokens apply: edit a folder, and set it as model.tokenizer", "none"),
    "plugins": Drop("model and loss plugins are not supported", "['axolotl.integrations.liger.ligerplugin'] "
                    "['axolotl.integrations.cut_cross_entropy.cutcrossentropyplugin']"),
    **rows("pad_to_sequence_len sample_packing_* eval_sample_packing batch_flattening lora_*_kernel unsloth_* liger_* "
           "cut_cross_entropy flash_attn_* flash_attention sdp_attention flex_attention xformers_attention "
           "eager_attention attn_implementation heads_k_stride ring_attn_func fsdp_final_state_dict_type "
           "activation_offloading use_scattermoe use_sonicmoe use_kernels flex_attn_* bfloat16 "
           "experimental_skip_move_to_device resize_token_embeddings_to_32x "
           "fsdp_config.final_state_dict_type fsdp_config.cpu_offload_pin_memory",
           Drop("it affects speed, memory and files, not results")),
    "loss_watchdog_*": Drop("training ends at gradients that are not finite, at no other loss"),
    "early_stopping_patience": Drop("EarlyStopping in trainer.callbacks counts validations: add it", OFF),
    "strict": Drop("every key of a recipe is checked"),
    "model_type": Drop("the model is causal, and its config names the class", "automodelforcausallm llamaforcausallm "
                       "mistralforcausallm mixtralforcausallm qwen2forcausallm gemmaforcausallm phiforcausallm"),
    **rows("shuffle_merged_datasets dataset_prepared_path dataset_processes tokenizer_type tokenizer_use_fast "
           "is_*_derived_model hf_*", Drop("model, data or the command determines it")),
    **rows("wandb_* mlflow_* comet_* use_wandb use_mlflow use_comet use_tensorboard use_trackio use_otel_metrics",
           Drop("loggers are classes: set trainer.logger")),
    **rows("load_in_8bit lora_* peft_* loraplus_* relora* bnb_config_kwargs s2_attention rpo_alpha cpo_alpha trl qat "
           "float16 gptq embedding_lr* lr_groups batch_size cosine_constant_lr_ratio "
           "base_model_config revision_of_model unfrozen_parameters default_system_message chat_template_jinja "
           "dataset_exact_deduplication curriculum_sampling reinit_weights peft model_quantization_config* "
           "lr_scheduler_kwargs.num_cycles", UNSUPPORTED),
}  # fmt: skip


def convert_axolotl(conversion: Conversion, values: dict[str, Any], folder: Path, ranks: int | None) -> None:
    """Convert a configuration of Axolotl; the ``folder`` may contain its DeepSpeed file."""
    require(values.get("base_model"), "base_model", "none", "a name or a folder", "write base_model: NAME")
    parts = values.get("context_parallel_size") or values.get("sequence_parallel_degree") or 1
    version, table = fsdp_table(values, str(values.get("fsdp_version") or (1 if parts == 1 else 2)), {})
    source = Source(conversion, {**table, **_AXOLOTL}, values, aliases=_ALIASES)
    _data(conversion, source)
    put_rest = put_deepspeed(conversion, source, folder, ranks)
    if not put_rest:
        put_strategy(conversion, source, version, ranks, False, bool(values.get("fsdp_config")) or parts != 1)
    put_shards(conversion, source, "dp_shard_size", parts, "tensor_parallel_size")
    _adapter(conversion, source)
    _precision(conversion, source)
    values = {_ALIASES.get(key, key): value for key, value in values.items()}
    total = max(0, number("max_steps", values.get("max_steps") or 0))
    if source.look("lr_scheduler_type") != "constant" and not (
        values.get("warmup_steps") or values.get("warmup_ratio")
    ):
        rise = Given("warmup_steps (by default 3 % of the steps, 100 at most)", "")
        if 0.03 * total > 100:
            conversion.keep(rise, "model.optim.warmup_steps", 100)
        else:
            note = "" if total else "set model.optim.warmup_steps: 100 if the run has more than 3,333 steps"
            conversion.keep(rise, "model.optim.warmup_ratio", 0.03, note, differs=not total)
    save, evaluate = ("steps" if values.get(key) else "epoch" for key in ("save_steps", "eval_steps"))
    put_loop(conversion, source, values, 1, save, evaluate, first_ends=True)
    source.rest()
    if values.get("saves_per_epoch"):
        conversion.to_give.append("Set checkpoint.every_steps: saves_per_epoch counts parts of an epoch.")
    for path, value in _DEFAULTS.items():
        conversion.put(path, value)
    if put_rest:
        put_rest()


def _data(conversion: Conversion, source: Source) -> None:
    loss = source.take("rl")
    if loss.key:
        conversion.put("model.class_path", PREFERENCE)
        allowed = ("dpo", "ipo", "orpo", "simpo")
        word, fix = str(loss.value).lower(), "this method is not supported; use preference pairs"
        require(word in allowed, "rl", loss.value, " | ".join(allowed), fix)
        penalty = word == "simpo" and number("cpo_alpha", source.take("cpo_alpha", 1).value) != 0
        note = "without the additional plain loss of cpo_alpha, 1 by default" if penalty else ""
        conversion.keep(loss, "model.preference.loss", word, note, differs=penalty)

    def begin(key: str, own: str, entry: dict[str, Any]) -> Source:
        found = Source(conversion, _of_data_set(own, "prompt" if loss.key else "messages"), entry, key)
        kind = found.take("type", "chat_template")
        if isinstance(kind.value, dict):  # a prompt style of its own
            conversion.put(f"{own}.format", "preference" if loss.key else "instruction")
            Source(conversion, _of_prompt_style(own), kind.value, kind.key).rest()
            return found
        word = str(kind.value).partition(":")[0].partition(".")[0]
        form = "preference" if loss.key else _FORMATS.get(word, "auto")
        differs = form != "text" and word not in ("chat_template", "sharegpt")
        why = "turns are formatted by the chat template only" if differs else ""
        if word == "chat_template" and loss.key and not str(kind.value).endswith("argilla_chat"):
            conversion.put(f"{own}.columns.prompt", "messages")
        elif word == "chat_template" and not entry.get("message_field_training"):
            why = "turns with train, training, loss or weight false or 0 have no loss here, in Axolotl they do"
        conversion.keep(kind, f"{own}.format", form, why, differs)
        return found

    for name, to in (("datasets", "data.train"), ("pretraining_dataset", "data.train"), ("test_datasets", "data.val")):
        given = source.take(name)
        if given.key:
            put_data_sets(conversion, given, to, "path", begin)
        if name == "pretraining_dataset" and given.key and source.look("streaming") is None:
            source.fill_in("streaming", True)
    if source.look("streaming") is True:
        share = source.take("val_set_size", 0)
        if share.key:
            why = "a stream has no rows to hold out: set data.val"
            conversion.drop(share, why, differs=share.read(number) > 0)
        if not source.look("max_steps"):
            conversion.to_give.append("Set trainer.max_steps: the length of a stream is unknown.")


def _of_data_set(own: str, messages: str) -> Table:
    """Return the table of one data set with path ``own`` in the recipe."""
    columns, turns = ("system", "tools", "chosen", "rejected"), ("role", "content", "reasoning_content", "tool_calls")
    return {
        "type": None,
        **{f"message_property_mappings.{name}": Keep(f"{own}.turns.{name}") for name in turns},
        **{f"field_{name}": Keep(f"{own}.columns.{name}") for name in columns},
        "field_thinking": Keep(f"{own}.turns.reasoning_content"),
        **rows("drop_system_message split_thinking template_thinking_key", UNSUPPORTED),
        "message_field_training": Keep(f"{own}.turns.train"),
        "roles": Keep(f"{own}.turns.roles", _roles),
        "field_messages": Keep(f"{own}.columns.{messages}"),
        "message_field_role": Keep(f"{own}.turns.role"),
        "message_field_content": Keep(f"{own}.turns.content"),
        "field": Keep(f"{own}.columns.text"),
        "revision": Keep(f"{own}.revision"),
        "ds_type": Drop("it follows from the file extension"),
        **_MASKS,
    }


def _of_prompt_style(own: str) -> Table:
    """Return the table of a prompt style of one data set with path ``own`` in the recipe."""
    columns = ("instruction", "input", "output", "system", "prompt", "chosen", "rejected")
    return {
        **{f"field_{name}": Keep(f"{own}.columns.{name}") for name in columns},
        **rows("*format", Drop("turns are formatted by the chat template", OFF)),
        **rows("system_prompt field", UNSUPPORTED),
    }


def _roles(key: str, value: Any) -> dict[str, str] | None:
    """Map the source's roles to ours where they differ."""
    require(isinstance(value, dict), key, repr(value), "a mapping of lists", f"write {key}: {{user: [human]}}")
    return {theirs: ours for ours, found in value.items() for theirs in names(key, found) if theirs != ours} or None


def _adapter(conversion: Conversion, source: Source) -> None:
    adapter, bits, linear = (source.take(name, False) for name in ("adapter", "load_in_4bit", "lora_target_linear"))
    for given in (bits, linear):
        if not (adapter.key and given.on):
            conversion.drop(given, "it is off, or there is no adapter")
    if not adapter.key:
        source.ignore("lora_ peft_ loraplus_ bnb_config_kwargs", "there is no adapter")
        return
    conversion.say(adapter, "kept as model.lora")
    conversion.put("model.lora", {"r": 8, "alpha": 8})  # defaults of peft
    if adapter.read({"lora": bits.on, "qlora": True}):
        conversion.keep(bits, "model.lora.quantize", "nf4")
        conversion.put("model.lora.double_quantization", True)
    if linear.on:
        conversion.keep(linear, "model.lora.target_modules", "all-linear")
        more = source.take("lora_target_modules", [])
        extra = [name for name in more.read(names) if not name.endswith("_proj")]
        why = f"lora_target_linear does not include {', '.join(extra)}" if extra else "lora_target_linear includes them"
        conversion.drop(more, why, differs=bool(extra))


def _precision(conversion: Conversion, source: Source) -> None:
    """Convert the precision switches; bf16 is the default, also for loaded weights, which only FSDP trains in fp32."""
    fp16, bf16, fp8 = source.take("fp16", False), source.take("bf16", "auto"), source.take("fp8", False)
    if fp8.on:
        put_precision(conversion, Given(fp8.key, "fp8"))
        for given in (fp16, bf16):
            conversion.drop(given, "fp8 applies")
        return
    conversion.drop(fp8, "it is off")
    is_on = bf16.value in ("auto", "full") or bf16.on
    first = fp16.on and (bf16.value == "auto" or not is_on)
    conversion.drop(bf16 if first else fp16, "it is off, or the other precision applies")
    if not is_on or first or conversion.get("model.lora") or conversion.get("engine").startswith("fsdp"):
        word = "fp16" if first else "bf16" if is_on else "no"
        put_precision(conversion, Given(fp16.key if first else bf16.key, word))
    else:
        note = "updates bf16 weights; precision: mixed keeps fp32 weights"
        conversion.keep(bf16, "precision.mode", "low_precision", note)
