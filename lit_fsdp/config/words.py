"""Names of keys, verbs and flags in other trainers, mapped to ours for suggestions in errors about unknown names."""

import difflib
import itertools
import re
import shlex
from collections.abc import Collection, Sequence

from lit_fsdp.errors import ConfigError

UNKNOWN_KEY = "a key that does not exist"
NOT_A_FLAG = "a word that is not a flag"
TYPO = 0.84
"""The least likeness (of difflib) of a name with a typo: one wrong letter of four is less."""
_S, _LOGGER = "trainer.strategy.init_args", "trainer.logger: {class_path: lightning.pytorch.loggers"
_KEYS = {
    "seed_everything": "seed random_seed", "data.seed": "data_seed", "data.cache_dir": "dataset_prepared_path",
    "ckpt_path": "resume_from_checkpoint resume_from resume_checkpoint auto_resume_from_checkpoints checkpoint_path "
    "ckpt load_checkpoint",
    "trainer.max_epochs": "epochs num_epochs num_train_epochs n_epochs", "trainer.accelerator": "device",
    "trainer.max_steps": "num_steps total_steps max_train_steps num_training_steps max_iters train_iters",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps gradient_accumulation_iters "
    "gradient_accumulation", "trainer.accelerator: cpu": "use_cpu no_cuda",
    "trainer.gradient_clip_val": "max_grad_norm clip_grad_norm max_norm grad_clip gradient_clipping",
    "trainer.log_every_n_steps": "logging_steps log_interval", "trainer.enable_progress_bar: false": "disable_tqdm",
    "trainer.deterministic: true": "full_determinism", "checkpoint.mode": "greater_is_better",
    "checkpoint.export: best": "load_best_model_at_end",
    "trainer.val_check_interval": "eval_steps eval_interval eval.interval",
    "trainer.val_check_interval: 1.0": "eval_strategy evaluation_strategy", f"{_S}.precision: fp32": "fp32",
    "checkpoint.every_steps: 100": "save_strategy",
    "trainer.limit_val_batches": "eval_iters eval.max_iters", "trainer.num_nodes": "nnodes num_machines nodes",
    "trainer.devices": "num_gpus n_gpu gpus nproc_per_node num_processes", f"{_S}.precision: 16-mixed": "fp16",
    "trainer.default_root_dir": "output_dir out_dir save_dir run_dir logging_dir checkpoint.dir checkpoint.dirpath",
    f"{_S}.precision: bf16-mixed": "bf16 mixed_precision", f"{_S}.precision": "dtype torch_dtype",
    f"{_LOGGER}.WandbLogger}}": "wandb wandb_project wandb_name report_to log_with logger_name",
    f"{_LOGGER}.TensorBoardLogger}}": "tensorboard", f"{_LOGGER}.CSVLogger}}": "csv",
    f"{_LOGGER}.CometLogger}}": "comet comet_ml",
    f"{_LOGGER}.MLFlowLogger}}": "mlflow mlflow_experiment_name", f"{_S}.compile: true": "torch_compile",
    f"{_S}.activation_checkpointing: full": "gradient_checkpointing enable_activation_checkpointing",
    f"{_S}.activation_checkpointing: {{mode: full, offload_activations: true}}": "enable_activation_offloading",
    f"{_S}.cpu_offload: true": "fsdp_cpu_offload offload_params",
    f"{_S}.engine": "fsdp_version distributed_type strategy",
    f"{_S}.sharding": "fsdp sharding_strategy fsdp_sharding_strategy", f"{_S}.timeout_seconds": "ddp_timeout",
    f"{_S}.context_parallel": "context_parallel_size context_parallel_dim sequence_parallel_degree cp_size",
    "checkpoint.every_steps": "checkpoint.every save_steps save_interval checkpointing_steps save_every_n_steps "
    "every_n_train_steps", f"{_S}.wrap": "fsdp_transformer_layer_cls_to_wrap transformer_layer_cls_to_wrap",
    "checkpoint.keep_best": "save_top_k",
    "checkpoint.keep_last": "save_total_limit keep_last_n_checkpoints", "checkpoint.monitor": "metric_for_best_model",
    "model.name": "base_model model_name_or_path model_name model_id model_path checkpoint_dir model.path name_or_path "
    "model._component_",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer.path", "model.optim.beta1": "adam_beta1",
    "model.attn_implementation: flash_attention_2": "flash_attention flash_attn use_flash_attention_2",
    "model.optim.lr": "learning_rate peak_lr max_lr", "model.optim.beta2": "adam_beta2",
    "model.optim.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "model.optim.warmup_steps": "lr_warmup_steps num_warmup_steps warmup_iters",
    "model.optim.min_lr_ratio": "min_lr min_lr_rate cosine_min_lr_ratio", "model.lora.alpha": "lora_alpha",
    "model.optim.optimizer: torch.optim.AdamW": "optim optimizer optimizer._component_ "
    "model.optim.name optim.name",
    "model.optim.eps": "adam_epsilon", "model.optim.weight_decay": "wd",
    "model.loss.backend: liger": "use_liger_kernel",
    "model.lora: {}": "lora use_lora peft use_peft adapter",
    "model.lora.r": "r rank lora_r lora_rank", "model.lora.dropout": "lora_dropout",
    "model.lora.target_modules": "target_modules targets lora_target_modules lora_attn_modules",
    "model.lora.target_modules: all-linear": "lora_target_linear", "model.lora.use_dora": "use_dora peft_use_dora",
    "model.lora.use_rslora": "use_rslora peft_use_rslora",
    "model.lora.quantize: nf4": "quantize load_in_4bit quantize_base qlora", "model.add_tokens": "special_tokens",
    "model.class_path: lit_fsdp.PreferenceModule": "rl loss_type", "model.neftune_alpha": "neftune_noise_alpha",
    "data.train": "dataset datasets dataset_name dataset_path dataset.source dataset._component_ train_file data_files "
    "data.path datasets.path train_path train_data_path json_path",
    "data.val": "validation validation_file eval_file eval_dataset test_datasets",
    "data.packing": "sample_packing packed",
    "data.val_split": "val_set_size val_split_fraction", "data.columns": "dataset_text_field column_map",
    "data.chat_template": "chat_template_path chat_template_jinja prompt_style template",
    "data.supervise: all": "mask_prompt", "data.train_on_prompt": "train_on_inputs train_on_input",
    "data.train_on_prompt: false": "assistant_only_loss completion_only_loss",
    "data.max_seq_length": "max_length max_seq_len seq_len seq_length sequence_len cutoff_len block_size",
    "data.micro_batch_size": "bs batch_size train_batch_size per_device_train_batch_size "
    "per_device_eval_batch_size eval_batch_size",
    "data.num_workers": "dataloader_num_workers", "data.num_tokenizers": "dataset_num_proc preprocessing_num_workers",
}  # fmt: skip
_VERBS = {
    "fit": "launch train finetune fine_tune finetune_full finetune_lora sft lora qlora tune pretrain run",
    "fit --model lit_fsdp.PreferenceModule": "dpo orpo ipo simpo",
    "validate": "eval evaluate", "generate --model": "chat infer inference serve ask", "doctor": "env",
    "export --merge": "merge merge_lora", "export --ckpt": "convert_to_hf convert_from_litgpt merge_weights "
    "merge_sharded_fsdp_weights push upload", "bench": "benchmark",
    "model prepare": "download convert_to_litgpt", "data inspect": "inspect preprocess tokenize",
    "plan": "estimate estimate_memory",
    "recipes ls": "ls list", "recipes cp": "cp copy init", "slurm submit": "submit sbatch",
    "report": "compare diff", "fit --ckpt_path last": "resume continue",
}  # fmt: skip
_FLAGS = {
    "--ckpt": "config checkpoint ckpt_path checkpoint_dir checkpoint_path model",
    "--out": "output output_dir out_dir save_dir",
    "--model": "config ckpt ckpt_path checkpoint checkpoint_dir model_name_or_path",
    "--max_new_tokens": "max_tokens max_length",
}
_VALUES = {
    **{(key, "false"): "data.train_on_prompt: true" for key in ("assistant_only_loss", "completion_only_loss")},
    **{(key, "true"): "ckpt_path: last" for key in ("resume_from_checkpoint", "auto_resume_from_checkpoints")},
    **{(key, name): f"{_S}.precision: {mode}" for key in ("dtype", "torch_dtype") for name, mode in (
        ("bfloat16", "bf16-true"), ("bf16", "bf16-true"), ("float32", "fp32"), ("fp32", "fp32"), ("auto", "auto"),
        ("fp8", "fp8"), ("float16", "16-mixed"), ("fp16", "16-mixed"))},
    ("metric_for_best_model", "eval_loss"): "checkpoint.monitor: val_loss",
    ("metric_for_best_model", "loss"): "checkpoint.monitor: val_loss",
    ("greater_is_better", "true"): "checkpoint.mode: max", ("greater_is_better", "false"): "checkpoint.mode: min",
    ("strategy", "fsdp"): f"{_S}.engine: fsdp2", ("strategy", "ddp"): f"{_S}.engine: ddp",
    ("report_to", "none"): "trainer.logger: false", ("adapter", "qlora"): "model.lora.quantize: nf4",
    **{(key, name.lower().removesuffix("logger")): f"{_LOGGER}.{name}}}" for key in ("report_to", "log_with")
       for name in ("TensorBoardLogger", "MLFlowLogger", "CSVLogger", "WandbLogger", "CometLogger")},
    ("mixed_precision", "fp16"): f"{_S}.precision: 16-mixed", ("mixed_precision", "no"): f"{_S}.precision: fp32",
    ("lr_scheduler_type", "polynomial"): "model.optim.schedule: linear",
    ("lr_scheduler_type", "constant_with_warmup"): "model.optim.schedule: constant",
    **{(key, f"{name}{more}"): f"{_S}.sharding: {name}" for more in ("", " auto_wrap")
       for key in ("fsdp", "sharding_strategy", "fsdp_sharding_strategy")
       for name in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")},
}  # fmt: skip
"""What a value of another trainer's key means here, where it differs from :data:`HERE`."""
_CALLBACKS = "add trainer.callbacks: [{class_path: "
MEANINGS = {
    "data.format": {
        **dict.fromkeys(("chat", "chatml", "openai", "conversation"), "messages"), "completion": "text",
        **dict.fromkeys(("alpaca", "instruct"), "instruction"), "dpo": "preference", "pretraining": "text"},
    f"{_S}.activation_checkpointing": {"true": "full", "false": "none"},
}  # fmt: skip
"""By key, what a value means that other trainers accept there."""
_OPTIMIZERS = {
    **{name.lower(): f"torch.optim.{name}" for name in (
        "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD")},
    **dict.fromkeys(("adamw8bit", "adamw_8bit", "adamw_bnb_8bit"), "torchao.optim.AdamW8bit"),
}  # fmt: skip
"""By lower-case name, the class that an optimizer's name without a package means."""
ELSEWHERE = {
    "deepspeed": "run lit-fsdp convert deepspeed FILE",
    "mail_type": "write slurm.extra: [--mail-type=END]",
    "mail_user": "write slurm.extra: [--mail-user=ADDRESS]",
    "gres": "write --gpus-per-node N",
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo"),
        "after the run: lit-fsdp export --ckpt RUN --out FOLDER --push-to-hub NAME",
    ),
    "run_name": "write trainer.default_root_dir: runs/NAME; for a logger's name: trainer.logger.init_args.name",
    "ema_decay": _CALLBACKS + "lit_fsdp.EMAWeights, init_args: {decay: 0.999}}]",
    "early_stopping_patience": _CALLBACKS
    + "lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: val_loss}}]",
    "local_rank": "remove it: lit-fsdp starts the ranks, and torchrun and srun set it",
    "fsdp_config": "run lit-fsdp convert hf-trainer FILE",
    **dict.fromkeys(
        ("dataset_config", "dataset_config_name", "dataset_configs"),
        "save the configuration as files with datasets, and write data.train: FOLDER",
    ),
    **dict.fromkeys(
        ("ref_model", "ref_model_name_or_path", "reference_model"),
        "remove it: the reference is the model before training",
    ),
    **dict.fromkeys(("tokenizer_type", "model_type", "tokenizer_class"), "remove it: the files of the model name it"),
    "load_in_8bit": "write model.lora.quantize: nf4; bases in 8 bits are not supported",
    "lora_model_dir": "run lit-fsdp ckpt import FOLDER, and write ckpt_path with its result",
    "betas": "write model.optim.beta1 and model.optim.beta2",
    "beta": "write model.preference.beta, with model.class_path: lit_fsdp.PreferenceModule",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "remove it: the verb (fit, validate or predict) selects it"),
}
"""Fixes for keys of other trainers that no single key of a recipe replaces."""
HERE, VERBS = ({word: ours for ours, words in table.items() for word in words.split()} for table in (_KEYS, _VERBS))
"""Maps a key or verb of another trainer to ours, which may be followed by a value or a flag."""
OTHER_SCHEDULES = "write model.optim.schedule: linear; for others override configure_optimizers of CausalLMModule"
"""The fix for a schedule that is a class."""
_SECTIONS = {"model": "--model.name VALUE", "data": "--data.train VALUE", "model.lora": "model.lora: {}",
             "resume": "--ckpt_path last", "model.optim": "--model.optim.class_path torch.optim.AdamW"}  # fmt: skip
ROWS_FILES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz")


def here(name: str) -> str:
    """Our name for a key of another trainer, alone or below a section; empty if unknown."""
    name = name.replace("-", "_")
    return HERE.get(name) or HERE.get(name.rpartition(".")[2], "")


def fix_of_typo(name: str) -> str:
    """The fix for a misspelled key of another trainer, which a value may change; empty if none is similar."""
    near = difflib.get_close_matches(name.rpartition(".")[2].replace("-", "_"), HERE, n=1, cutoff=TYPO)
    return f"if {near[0]} is meant: write {HERE[near[0]]}" if near else ""


def logger_meant(name: str) -> str:
    """The key and value that the name of a logger means, with or without ``Logger``; empty if unknown."""
    meant = HERE.get(name.lower().removesuffix("logger").rstrip("_"), "")
    return meant if meant.startswith("trainer.logger:") else ""


def meant_flag(name: str, flags: list[str]) -> str:
    """The flag among a verb's ``flags`` that ``name`` means; empty if unknown."""
    return next((flag for flag, words in _FLAGS.items() if flag in flags and name[2:] in words.split()), "")


def section_fix(section: str, value: str = "VALUE") -> str:
    """What to write instead of a single value for a whole section."""
    if section == "model" and re.fullmatch(r"(CausalLM|Preference)Module|[\w.]+:[A-Z]\w*", value):  # a class
        return f"--model {value.replace(':', '.') if ':' in value else f'lit_fsdp.{value}'}"
    return _SECTIONS.get(section, f"--{section}.KEY VALUE").replace("VALUE", value)


def underscored(word: str) -> str:
    """Replace ``-`` by ``_`` in the flag name of a command-line word, but not in values or user-defined names."""
    names = r"--(data\.(val|test|turns\.roles)(?=\.)|[^=\s]*)"  # sets and roles below these have user-defined names
    return re.sub(f"^{names}", lambda found: f"--{found[0][2:].replace('-', '_')}", word)


def optimizer_path(name: str) -> str:
    """The class path that an optimizer's name without a package means; empty if unknown."""
    return _OPTIMIZERS.get(re.sub(r"_(torch|fused|hf|32bit)|^paged_", "", name.lower()), "")


_OTHER_MEANING = (
    "min_lr fsdp fsdp_version distributed_type strategy sharding_strategy fsdp_sharding_strategy dataset_text_field "
    "dtype torch_dtype _component_"
)
"""Keys whose values mean something else here."""
_STEPS = ("eval_steps", "eval_interval")
"""Keys that count optimizer steps, where ours counts micro-batches."""
_SWITCHES = ("data.packing", "data.streaming", "model.trust_remote_code", f"{_S}.cpu_offload", f"{_S}.compile")
"""Keys that are true or false."""
_LISTS = (f"{_S}.wrap", "slurm.setup", "slurm.extra", "slurm.command", "slurm.container_mounts", "model.freeze")
"""Keys with lists of text."""
_SEVERAL = ("data.train", "data.val", "data.test", "data.predict", "model.lora.target_modules", *_LISTS)
"""Keys that accept a list, which shells and users give as several words."""
_FALSE = ("false", "no", "none", "null", "off", "0")
_LOSSES = ("ipo", "orpo", "simpo")
_ARGUMENTS = ("model.lora.", "model.class_path", "trainer.callbacks.", "trainer.logger.")
"""Beginnings of keys that no parser lists, as they depend on other values."""


def as_flag(error: ConfigError, argv: Sequence[str], known: Collection[str]) -> str:
    """Rewrite the fix ``write KEY: VALUE`` as a flag to paste if ``argv`` gives the field as a flag, else return it.

    A fix without a value keeps the user's, if the field is a key of another trainer or a misspelled one. The keys that
    exist are in ``known``.
    """
    fix, field, is_unknown = error.fix, error.field, error.given == UNKNOWN_KEY
    if error.given == NOT_A_FLAG:
        form = rf"(?:--)?{re.escape(field)}(?:[= ](.+))?"
        for word, after in zip(argv, [*argv, "VALUE"][1:], strict=True):
            if match := re.fullmatch(form, word):
                return f"write --{field} {shlex.quote(match[1] or after)}"
        return fix
    if is_unknown and field in argv and (several := _several(argv, list(argv).index(field))):
        return several
    fix, *others = re.split(r"(?<=[\]}]), or ", fix, maxsplit=1)
    found = re.fullmatch(r"(?:write|set) ([\w.]+)(?:: ([\[{].*|[^\s,;]+))?", fix)
    alternative = "".join(f", or {other}" for other in others)
    words, own_key = [underscored(word) for word in argv], field.rpartition(".")[2].replace("-", "_")
    flags = [index for index, word in enumerate(words) if re.match(rf"--{re.escape(field)}(=|$)", word)]
    if not flags:
        return fix + alternative
    _, equals, own = argv[flags[-1]].partition("=")
    following = list(itertools.takewhile(lambda word: not word.startswith("--"), argv[flags[-1] + 1 :]))
    if not equals:
        own = f"[{','.join(following)}]" if len(following) > 1 else "".join(following)
    if own_key in ELSEWHERE and own.lower() in _FALSE and not fix.startswith("remove it"):
        return "remove it"
    if not found:
        return fix + alternative
    key, value = found[1], (found[2] or "").strip("'\"")
    beside = f"{field.rpartition('.')[0]}.{key}"
    is_sibling = is_unknown and "." in field and key.rpartition(".")[0] == field.rpartition(".")[0]  # of a class
    key = next((one for one in (key, beside) if one in known or one.startswith(_ARGUMENTS) or is_sibling), "")
    if meant := _VALUES.get((own_key, own.lower())):
        key, _, value = meant.partition(": ")
    elif (own_key in ("optim", "optimizer") or (is_unknown and key == "model.optim.optimizer")) and (
        path := optimizer_path(own)
    ):
        key, value = "model.optim.optimizer", path
    elif (
        own.lower() in _FALSE
        and key != field
        and (value or key.startswith("model.lora.use_") or (is_unknown and own.lower() in ("null", "none")))
    ):
        return "remove it"
    if not key or (not value and (not is_unknown or own_key in _OTHER_MEANING.split())):
        return fix + alternative
    if key == "slurm.env" and not value and (pair := re.fullmatch(r"(\w+)=(.*)", own)):
        return f"write --slurm.env.{pair[1]} {shlex.quote(pair[2])}"
    own = f"[{own}]" if key in _LISTS and own and own[:1] != "[" else own
    value = shlex.quote(value or own or ("true" if key in _SWITCHES else "VALUE"))
    if key == "model.class_path":
        return f"write --model {value}" + (f" --model.preference.loss {own.lower()}" if own.lower() in _LOSSES else "")
    counts = " (in micro-batches: multiply by trainer.accumulate_grad_batches)" if own_key in _STEPS else ""
    return f"write --{key} {value}{counts}{alternative}"


def _several(argv: Sequence[str], index: int) -> str:
    """The fix for a word that follows the value of a flag in :data:`_SEVERAL`; empty for other words."""
    start = next((at for at in range(index, -1, -1) if argv[at].startswith("--")), 0)
    flag, _, first = argv[start].partition("=")
    values = [*([first] if first else []), *itertools.takewhile(lambda word: word[:2] != "--", argv[start + 1 :])]
    if underscored(flag)[2:].removesuffix("+") not in _SEVERAL:
        return ""
    whole = shlex.quote(f"[{', '.join(values if len(values) < 4 else [*values[:2], '...'])}]")
    quoted = "quote the pattern, or " if values[0].endswith(ROWS_FILES) else ""
    return f"{quoted}write {flag} {whole}"
