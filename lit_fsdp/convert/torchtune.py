"""Convert torchtune's YAML: trees of components, with references to other keys."""

import re
from pathlib import Path
from typing import Any

from lit_fsdp.config.command_line import PREFERENCE
from lit_fsdp.convert.accelerate import put_shards
from lit_fsdp.convert.conversion import Conversion, Given, names, number
from lit_fsdp.convert.deepspeed import put_engine
from lit_fsdp.convert.tables import ONLY_ADAMW, UNSUPPORTED, Drop, Keep, Source, Table, put_data_sets, rows
from lit_fsdp.errors import require

_DATA_SETS = {
    "alpaca_dataset": ("instruction", "tatsu-lab/alpaca"), "instruct_dataset": ("instruction", None),
    "alpaca_cleaned_dataset": ("instruction", "yahma/alpaca-cleaned"), "chat_dataset": ("messages", None),
    "slimorca_dataset": ("sharegpt", "Open-Orca/SlimOrca-Dedup"), "preference_dataset": ("preference", None),
    "text_completion_dataset": ("text", None),
    "stack_exchange_paired_dataset": ("preference", "lvwerra/stack-exchange-paired"),
}  # fmt: skip
_CROSS_ENTROPY = ("CrossEntropyLoss", "CEWithChunkedOutputLoss", "LinearCrossEntropyLoss")
_TARGETS = {"apply_lora_to_mlp": "gate_proj up_proj down_proj", "apply_lora_to_output": "lm_head"}
_FUSED = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
          **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")}  # fmt: skip
_COSINE = "get_cosine_schedule_with_warmup"
_KEPT = {
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches", "clip_grad_norm": "trainer.gradient_clip_val",
    "seed": "seed_everything", "shuffle": "data.shuffle", "output_dir": "trainer.default_root_dir",
    "log_every_n_steps": "trainer.log_every_n_steps", "tokenizer.max_seq_len": "data.max_seq_length",
    "optimizer.lr": "model.optim.lr",
    "optimizer.betas": "model.optim.beta1 model.optim.beta2", "optimizer.eps": "model.optim.eps",
    "loss.beta": "model.preference.beta",
    "loss.label_smoothing": "model.preference.label_smoothing", "checkpointer.checkpoint_dir": "model.name",
    "save_every_n_steps": "checkpoint.every_steps", "enable_async_checkpointing": "checkpoint.async_save",
    "fsdp_cpu_offload": "cpu_offload",
    "data_parallel_replicate_dim": "replicate_degree", "context_parallel_dim": "context_parallel",
    "enable_activation_offloading": "activation_checkpointing.offload_activations", "model.lora_rank": "model.lora.r",
    "model.lora_alpha": "model.lora.alpha", "model.lora_dropout": "model.lora.dropout",
    "model.use_dora": "model.lora.use_dora", "batch_size": "data.micro_batch_size",
}  # fmt: skip
_TORCHTUNE: Table = {
    **rows("model._component_ model.lora_attn_modules model.apply_lora_to_mlp model.apply_lora_to_output dataset "
           "dataset_val epochs max_steps_per_epoch loss._component_ dtype data_parallel_shard_dim "
           "ref_checkpointer.checkpoint_dir run_val_every_n_steps optimizer.weight_decay", None),
    **{theirs: Keep(ours) for theirs, ours in _KEPT.items()},
    "model.quantize_base": Keep("model.lora.quantize", {"true": "nf4", "false": None}),
    "compile": Keep("compile", lambda key, value: any(value.values()) if isinstance(value, dict) else value),
    "device": Keep("trainer.accelerator", {"cuda": "gpu", "cpu": "cpu", "mps": "mps"}),
    "enable_activation_checkpointing": Keep("activation_checkpointing.mode", {"true": "full", "false": None}),
    "fsdp_reshard_after_forward": Keep("sharding", {"true": "full_shard", "false": "shard_grad_op"}),
    "lr_scheduler.num_warmup_steps": Keep("model.optim.warmup_steps", why="the first step has 1/n of the rate, not 0"),
    "optimizer._component_": Drop(ONLY_ADAMW, "torch.optim.adamw"),
    "optimizer.*": Drop("lit_fsdp uses torch's fused AdamW"),
    "lr_scheduler._component_": Drop("this schedule is not supported", f"torchtune.training.lr_schedulers.{_COSINE} "
                                     f"torchtune.modules.{_COSINE}"),
    "lr_scheduler.*": Drop("the schedule falls to 0 once", "0.5"),
    "tokenizer._component_": Keep("data.chat_template", {"torchtune.models.llama3.llama3_tokenizer": "llama3"},
                                  "no EOS follows the last turn", "the folder's template formats the turns"),
    "tokenizer.prompt_template": Drop("turns are formatted by data.chat_template", "none"),
    **rows("tokenizer.* model.* checkpointer._component_ checkpointer.checkpoint_files checkpointer.model_type",
           Drop("the folder of the model defines it")),
    **rows("checkpointer.* save_* keep_last_n_checkpoints resume_from_checkpoint metric_logger.* log_* "
           "batch_size_val", Drop("the sections checkpoint, trainer and data of the recipe set it")),
    "profiler.*": Drop("lit-fsdp profile records steps"),
    "ref_checkpointer.*": Drop("the reference is the model that training starts from"),
    **rows("custom_sharded_layers memory_efficient_fsdp_wrap ac_* low_cpu_ram optimizer_in_bwd cudnn* fsdp_* "
           "loss.num_output_chunks cp_rotate_method", Drop("it affects speed and memory, not results")),
    **rows("tensor_parallel_plan loss.* collate_fn quantizer enable_fp8_training teacher_* kd_*", UNSUPPORTED),
}  # fmt: skip


def convert_torchtune(conversion: Conversion, values: dict[str, Any], _: Path, ranks: int | None) -> None:
    """Convert a torchtune configuration for one or several devices."""
    values = _resolved(values, values)
    is_known = "policy_model" not in values
    require(is_known, "policy_model", "a recipe for PPO", "SFT, or DPO with DPOLoss", "this method is not supported")
    tokenizer = values.get("tokenizer")
    length = "tokenizer.max_seq_len (null by default)"
    if isinstance(tokenizer, dict) and tokenizer.get("max_seq_len", 0) is None:
        length = "tokenizer.max_seq_len"
        values["tokenizer"] = {key: value for key, value in tokenizer.items() if key != "max_seq_len"}
    source = Source(conversion, _TORCHTUNE, values)
    put_engine(conversion, "" if ranks == 1 else "fsdp2", ranks)
    parts = values.get("context_parallel_dim") or 1
    put_shards(conversion, source, "data_parallel_shard_dim", parts, "tensor_parallel_dim")
    _model(conversion, source)
    for name, to in (("dataset", "data.train"), ("dataset_val", "data.val")):
        given = source.take(name)
        if given.key:
            put_data_sets(conversion, given, to, "source", lambda *words: _data_set(conversion, *words))
    dtype = source.take("dtype", "bf16")
    mode = dtype.read({"bf16": "low_precision", "fp32": "fp32"})
    conversion.keep(dtype, "precision.mode", mode, "precision: mixed keeps fp32 weights" if mode != "fp32" else "")
    epochs, cut = source.take("epochs", 1), source.take("max_steps_per_epoch")
    if cut.key:
        total = int(epochs.read(number) * cut.read(number))
        conversion.keep(cut, "trainer.max_steps", total, "epochs * max_steps_per_epoch, in one order")
    conversion.keep(epochs, "trainer.max_epochs", int(epochs.read(number)))
    base, start = source.take("ref_checkpointer.checkpoint_dir"), values.get("checkpointer") or {}
    differs = base.value != start.get("checkpoint_dir")
    conversion.drop(base, "the reference is the model that training starts from", differs=differs)
    decay = source.take("optimizer.weight_decay", 0.01)  # as torch.optim.AdamW
    decay = Given(decay.key or "optimizer.weight_decay (0.01 by default)", decay.value)
    conversion.keep(decay, "model.optim.weight_decay", decay.read(number), "of matrices, not of biases and norms")
    accumulation = "gradient_accumulation_steps"
    every, batches = source.take("run_val_every_n_steps"), number(accumulation, values.get(accumulation) or 1)
    if every.key and conversion.get("data.val"):
        conversion.keep(every, "trainer.val_check_interval", int(every.read(number) * batches), "in micro-batches")
        conversion.put("trainer.check_val_every_n_epoch", None)
    else:
        conversion.drop(every, "there are no validation rows")
    source.rest()
    if not conversion.get("data.max_seq_length"):
        why = "torchtune does not truncate: set data.max_seq_length (2,048 by default)"
        conversion.drop(Given(length, None), why, differs=True)
    conversion.put("model.optim.schedule", "cosine" if values.get("lr_scheduler") else "constant")
    for name, value in {"lr": 1e-3, "beta2": 0.999}.items():  # defaults of torch.optim.AdamW
        conversion.put(f"model.optim.{name}", value)


def _resolved(value: Any, values: dict[str, Any], depth: int = 0) -> Any:
    """Resolve references (``${output_dir}``, ``${a.b}``) in a value."""
    if isinstance(value, dict):
        return {key: _resolved(part, values, depth) for key, part in value.items()}
    if isinstance(value, list):
        return [_resolved(part, values, depth) for part in value]

    def look(found: re.Match[str]) -> str:
        target: Any = values
        for part in found[1].split("."):
            target = target.get(part) if isinstance(target, dict) else None
        fits = target is not None and depth < 10
        require(fits, found[1], found[0], "the name of another key, not circular", f"write {found[1]}: VALUE")
        return str(_resolved(target, values, depth + 1))

    return re.sub(r"\$\{([^}]*)\}", look, value) if isinstance(value, str) else value


def _model(conversion: Conversion, source: Source) -> None:
    builder, loss = source.take("model._component_", ""), source.take("loss._component_", "CrossEntropyLoss")
    allowed, fix = "a builder of torchtune.models", "write model: {_component_: torchtune.models.NAME}"
    require("torchtune.models." in str(builder.value), "model._component_", builder.value or "none", allowed, fix)
    conversion.say(builder, "replaced by model.name, the folder with the model's config.json")
    if str(loss.value).endswith(".DPOLoss"):
        conversion.put("model.class_path", PREFERENCE)
        conversion.keep(loss, "model.preference.loss", "dpo")
    else:
        known = str(loss.value).rpartition(".")[2] in _CROSS_ENTROPY
        conversion.drop(loss, "lit_fsdp uses cross-entropy with equal weight per token", differs=not known)
    name = str(builder.value).rpartition(".")[2]
    if "lora" not in name:
        return
    modules = source.take("model.lora_attn_modules", [])
    targets = ["o_proj" if one == "output_proj" else one for one in modules.read(names)]
    switches = {source.take(f"model.{key}", False): words.split() for key, words in _TARGETS.items()}
    targets += [one for switch, found in switches.items() if switch.on for one in found]
    is_fused = bool(re.search(r"models\.phi[34]\.", str(builder.value)))
    if is_fused:  # as the config's model has them
        targets = list(dict.fromkeys(_FUSED.get(one, one) for one in targets))
    for given in (modules, *switches):
        note = " (one adapter for the fused layers of the model)" if is_fused else ""
        conversion.say(given, f"kept as model.lora.target_modules: [{', '.join(targets)}]{note}", differs=is_fused)
    conversion.put("model.lora", {"r": 8, "alpha": 16})
    conversion.put("model.lora.target_modules", targets, modules.key)
    if name.startswith("q"):
        conversion.put("model.lora.quantize", "nf4")
        conversion.put("model.lora.double_quantization", True)


def _data_set(conversion: Conversion, key: str, own: str, entry: dict[str, Any]) -> Source:
    """Begin a data set; only Alpaca data sets supervise prompts by default."""
    name = str(entry.get("_component_")).rpartition(".")[2]
    form, location = _DATA_SETS.get(name, ("auto", entry.get("source")))
    require(form != "auto" or location, f"{key}._component_", name, " | ".join(_DATA_SETS), "set its source")
    is_alpaca, is_stack, is_instruct = name.startswith("alpaca"), name.startswith("stack_"), name == "instruct_dataset"
    columns = ("instruction", "output", "chosen", "rejected", "prompt")
    table: Table = {
        **rows("_component_ train_on_input", None),
        **{f"column_map.{column}": Keep(f"{own}.columns.{column}") for column in columns},
        "column_map.input": Keep(f"{own}.columns.{'instruction' if is_instruct else 'input'}"),
        "conversation_column": Keep(f"{own}.columns.messages"),
        "column": Keep(f"{own}.columns.text"),
        "packed": Keep("data.packing"),
        "max_seq_len": Keep("data.max_seq_length"),
        **rows("conversation_style split_across_pack add_eos", Drop("turns are detected; split texts end with EOS")),
        **rows("new_system_prompt filter_fn", Drop("it must be applied to the rows themselves", "none")),
    }
    source = Source(conversion, table, {"source": location, **entry} if location else entry, key)
    why = "turns are formatted by the chat template only" if form != "text" else ""
    why += "; torchtune reads the folder data/rl only" if is_stack and not entry.get("data_dir") else ""
    conversion.keep(
        source.take("_component_"), f"{own}.format", form, why, differs=is_alpaca or is_stack or form == "auto"
    )
    if is_instruct:
        conversion.put(f"{own}.columns.instruction", "input")
    if is_stack:
        for column, theirs in (("prompt", "question"), ("chosen", "response_j"), ("rejected", "response_k")):
            conversion.put(f"{own}.columns.{column}", theirs)
    prompts = source.take("train_on_input", is_alpaca)
    given = Given(prompts.key or f"{key}.train_on_input (by default)", prompts.value)
    if form in ("text", "preference"):
        conversion.drop(prompts, f"rows of format {form} do not have this option")
    else:
        conversion.keep(given, "data.train_on_prompt", given.on)
    return source
