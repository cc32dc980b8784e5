"""A run: checkpoints, resume, samples, arguments of Lightning's Trainer, and the list of rules between sections.

The rules are checked before any process starts and before torch is imported.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.model import (
    FLASH_ATTENTION,
    GPU_ATTENTION,
    ModelConfig,
    PreferenceModelConfig,
    gpu_attention_on_cpu,
)
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.config.strategy import (
    LIGHTNING_PRECISION,
    PrecisionMode,
    PrecisionWord,
    StrategyConfig,
    check_accumulation,
    check_optimizer,
    check_quantized,
    mesh_shape,
)
from lit_fsdp.config.words import logger_meant
from lit_fsdp.errors import require

FACTORY = "lit_fsdp.fsdp_strategy"
STRATEGY = "trainer.strategy.init_args"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The ``checkpoint`` section: arguments of ``lit_fsdp.Checkpoint``."""

    every_steps: int | None = None
    """Optimizer steps between checkpoints; the run also saves at the end, on a signal and after the best validation."""
    keep_last: int = 2
    """Number of newest checkpoints to keep; -1 keeps all; checkpoints saved only on a signal count as one."""
    keep_best: int = 1
    """Number of checkpoints with the best metric to keep; 0 disables saving and keeping by metric."""
    keep_every: int | None = None
    """Keep the checkpoint of every n-th optimizer step permanently; a multiple of every_steps."""
    monitor: str = "val_loss"
    """Logged metric that selects the best checkpoint."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller (min) or a larger (max) value of the metric is better."""
    async_save: bool | None = None
    """Copy the state to host memory and continue training while it is written; needs host memory for one copy of what
    each rank writes; null: true on CUDA without cpu_offload, false otherwise."""
    export: Literal["last", "best"] | None = None
    """At the end of training, export this checkpoint (or its adapter) as a Hugging Face folder to export/ in the run
    folder."""

    def __post_init__(self) -> None:
        every, kept = self.every_steps, self.keep_every
        require(every is None or every >= 1, "every_steps", every, ">= 1, or null", "write every_steps: 100")
        require(self.keep_last == -1 or self.keep_last >= 1, "keep_last", self.keep_last, ">= 1, or -1 for all")
        require(self.keep_best >= 0, "keep_best", self.keep_best, ">= 0", "write keep_best: 1")
        given = f"{kept} with every_steps {'null' if every is None else every}"
        allowed = "a multiple of every_steps, because only saved checkpoints can be kept; or null"
        fix = f"write keep_every: {10 * every}" if every else "set every_steps: 100 and keep_every: 1000"
        fits = kept is None or (every is not None and kept >= 1 and kept % every == 0)
        require(fits, "keep_every", given, allowed, fix)

    def in_background(self, on_gpu: bool, offloads: bool) -> bool:
        """Resolve ``async_save: null``; with offload, host memory has no room for a copy of the state."""
        return on_gpu and not offloads if self.async_save is None else self.async_save


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """The ``resume`` section: verification of checkpoints, and fallback to older ones."""

    verify: bool = True
    """Compare the hash of every file with the manifest before loading; false compares sizes only."""
    fallback: bool = False
    """If last or best is damaged, log it and resume from the newest (next best) intact one instead of stopping."""


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """The ``samples`` section: arguments of ``lit_fsdp.Samples``."""

    prompts: str | int | None = None
    """Prompts that the model answers during training: the number of first validation rows to use, or a source of rows
    like data.val, with or without answers; null: none."""
    every_validation: bool = True
    """Generate after every validation; false: only once, at the end of training."""
    max_new_tokens: int = 64
    """Maximum answer length in tokens."""

    def __post_init__(self) -> None:
        if isinstance(self.prompts, str) and self.prompts.isdecimal():  # flags arrive as text
            object.__setattr__(self, "prompts", int(self.prompts))
        prompts, most = self.prompts, self.max_new_tokens
        fits = prompts is None or (prompts.strip() if isinstance(prompts, str) else prompts >= 1)
        require(fits, "prompts", repr(prompts), "a number >= 1, a source of rows, or null", "write prompts: 8")
        require(most >= 1, "max_new_tokens", most, ">= 1", "write max_new_tokens: 64")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The Trainer arguments that our rules check; Lightning checks the others."""

    accelerator: str = "auto"
    """cpu, gpu, cuda or auto."""
    devices: int | list[int] | str = "auto"
    """Processes per node, one per GPU or CPU rank; a list of GPUs, or auto for all GPUs."""
    num_nodes: int | None = None
    """Nodes of the run; default: 1."""
    precision: PrecisionWord | str | int | None = None
    """bf16-mixed, bf16-true, 16-mixed, 32-true; with our strategy the same as its own precision."""
    max_steps: int = -1
    """Optimizer steps of the run; -1: max_epochs or max_time ends it."""
    max_epochs: int | None = None
    """Passes over the training rows."""
    max_time: str | dict | None = None
    """Wall-clock limit of the run, DD:HH:MM:SS."""
    accumulate_grad_batches: int | None = None
    """Micro-batches per optimizer step; replaces data.global_batch_size."""
    gradient_clip_val: int | float | None = None
    """Maximum gradient norm (or value); null: no clipping."""
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    """Quantity that gradient_clip_val limits; default: norm."""
    val_check_interval: int | float | str | None = None
    """Micro-batches or share of an epoch between validations."""
    limit_train_batches: int | float | None = None
    """Must be 1.0; use trainer.max_steps to end a run early."""
    overfit_batches: int | float = 0.0
    """Must be 0."""
    fast_dev_run: bool | int = False
    """Run this many batches and save nothing."""
    default_root_dir: str | None = None
    """The run folder; default: runs/NAME with the name of the first recipe file."""

    def __post_init__(self) -> None:
        nodes = self.num_nodes
        require(nodes is None or nodes >= 1, "num_nodes", nodes, "a whole number >= 1")
        clip, folder = self.gradient_clip_val, self.default_root_dir
        require(clip is None or clip >= 0, "gradient_clip_val", clip, "a number above 0; 0 or null: no clipping")
        require(folder is None or folder.strip(), "default_root_dir", repr(folder), "the path of a folder, or null")
        steps = self.accumulate_grad_batches
        require(steps is None or steps >= 1, "accumulate_grad_batches", steps, "a whole number >= 1")


@dataclass(frozen=True)
class RunConfig:
    """The typed sections of a recipe, and the trainer section as a plain mapping."""

    strategy: StrategyConfig
    model: ModelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    resume: ResumeConfig
    slurm: SlurmConfig
    samples: SamplesConfig
    trainer: dict[str, Any]
    verb: str
    foreign: frozenset[str] = frozenset()
    """Which of model, data and trainer.strategy are third-party classes; their sections here are defaults."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the run."""
        nodes: int | None = self.trainer["num_nodes"]
        return nodes or 1

    @property
    def world_size(self) -> int | None:
        """All ranks, or ``None`` while ``devices`` is ``auto``."""
        devices: Any = self.trainer["devices"]
        count = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdecimal() else 0
        return count * self.num_nodes or None

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different rows: all ranks, or with ``context_parallel`` the number of groups."""
        return (self.world_size or 1) // self.strategy.context_config.degree

    def mesh_shape(self) -> tuple[int, int]:
        """Number of copies of the model, and of ranks per copy; see :func:`mesh_shape`."""
        assert self.world_size is not None
        return mesh_shape(self.strategy, self.num_nodes, self.world_size, STRATEGY)

    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; see :func:`accumulation_steps`."""
        return accumulation_steps(self.data, self.data_ranks, self.trainer["accumulate_grad_batches"])


def merged_precision(word: Any, precision: Any) -> Any:
    """Return the strategy's ``precision``; or ``trainer.precision``, with Lightning's names or ours, in its place."""
    if word is None:
        return "mixed" if precision is None else precision
    ours = {**LIGHTNING_PRECISION, "32": "fp32", "16": "fp16_mixed", "bf16": "mixed"}
    mode = ours.get(str(word), str(word))
    allowed = f"{', '.join(LIGHTNING_PRECISION)}, or {', '.join(get_args(PrecisionMode))}"
    require(mode in get_args(PrecisionMode), "trainer.precision", word, allowed)
    given = precision if precision is None or isinstance(precision, str) else precision["mode"]
    same = given is None or ours.get(given, given) == mode
    conflict = f"{word} with {STRATEGY}.precision {given}: conflicting precision settings"
    require(same, "trainer.precision", conflict, "one of them", f"set only one: write --{STRATEGY}.precision {mode}")
    return mode if precision is None else precision


def _logger_is_a_class(run: RunConfig) -> None:
    given = run.trainer.get("logger")
    for one in given if isinstance(given, list) else [given]:
        meant = logger_meant(one) if isinstance(one, str) else ""
        require(not meant, "trainer.logger", one, "a class, or false", f"write {meant}")


def _has_a_model(run: RunConfig) -> None:
    named = "model" in run.foreign or run.model.name
    fix = "name a recipe with --config (lit-fsdp recipes ls lists them), or set model.name"
    require(named, "model.name", "no value", "a hub name, folder, GGUF file or config", fix)


def _has_data(run: RunConfig) -> None:
    split = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}.get(run.verb)
    there = split is None or "data" in run.foreign or run.data.has(split)
    fix = f"""set data.{split}: rows.jsonl; or, with rows of your own, three commands:
           lit-fsdp recipes cp NAME my.yaml       (lit-fsdp recipes ls shows the names)
           lit-fsdp data inspect --config my.yaml --data.{split} rows.jsonl
           lit-fsdp {run.verb} --config my.yaml --data.{split} rows.jsonl"""
    require(there, f"data.{split}", "null", f"a source of rows for {run.verb}", fix)


def _training_ends(run: RunConfig) -> None:
    if run.verb != "fit" or "model" in run.foreign:
        return
    steps, epochs = run.trainer["max_steps"], run.trainer["max_epochs"]
    ends = steps > 0 or (epochs or 0) > 0 or run.trainer["max_time"] or run.trainer["fast_dev_run"]
    require(ends, "trainer.max_steps", steps, "max_steps or max_epochs >= 1", "set trainer.max_steps: 1000")
    warmup = run.model.optim.warmup_steps
    given, fix = f"{warmup} with trainer.max_steps {steps}", f"set model.optim.warmup_steps: {max(0, steps // 10)}"
    require(not 0 < steps < warmup, "model.optim.warmup_steps", given, f"at most max_steps ({steps})", fix)


def _a_stream_ends(run: RunConfig) -> None:
    if run.verb != "fit" or not run.data.streaming or run.trainer["fast_dev_run"]:
        return
    steps, interval = run.trainer["max_steps"], run.trainer["val_check_interval"]
    given = f"{steps} with data.streaming: true"
    allowed = "max_steps >= 1: a stream is endless and its number of rows is unknown, so max_epochs cannot end the run"
    ends = steps > 0 or run.trainer["max_time"]
    require(ends, "trainer.max_steps", given, allowed, "set trainer.max_steps: 1000")
    counted = isinstance(interval, int) and not isinstance(interval, bool)
    given = f"{interval} with data.streaming: true and data.val"
    allowed = "a whole number of micro-batches: a stream has no end of an epoch at which validation could run"
    fix = "set trainer.val_check_interval: 500, or drop data.val"
    require(counted or not run.data.has("val"), "trainer.val_check_interval", given, allowed, fix)


def _mesh_fits(run: RunConfig) -> None:
    if run.world_size is not None and "trainer.strategy" not in run.foreign:
        run.mesh_shape()


def _batches_fit(run: RunConfig) -> None:
    if run.verb != "fit":
        return
    given = run.trainer["accumulate_grad_batches"]
    steps, fix = given or 1, "drop trainer.accumulate_grad_batches"
    if run.world_size is not None and "data" not in run.foreign:
        steps = run.accumulation_steps()
        fix = f"data.micro_batch_size: {steps * run.data.micro_batch_size}"
        fix += " and trainer.accumulate_grad_batches: 1" if given else ""
    if "trainer.strategy" not in run.foreign:
        check_accumulation(run.strategy, steps, STRATEGY, fix)


def _counts_whole_batches(run: RunConfig) -> None:
    if "data" not in run.foreign:
        check_whole_batches(run.trainer["overfit_batches"], run.trainer["limit_train_batches"])


def check_whole_batches(share: float, limit: float | None) -> None:
    """Refuse ``overfit_batches``, and a ``limit_train_batches`` other than all, of a Trainer under our data module."""
    allowed = "0: the order of samples depends on the step, and this option would change it silently"
    fix = "name a small file as data.train and set data.shuffle: false"
    require(not share, "trainer.overfit_batches", share, allowed, fix)
    whole = limit is None or (limit == 1 and isinstance(limit, float))  # 1 is one batch, 1.0 all of them
    allowed = "1.0: it counts micro-batches and could end an epoch inside a global batch"
    require(whole, "trainer.limit_train_batches", limit, allowed, "set trainer.max_steps")


def _attention_has_its_device(run: RunConfig) -> None:
    """Only if the recipe names the device; otherwise the device is known later."""
    attention = run.model.attn_implementation
    if attention in GPU_ATTENTION and run.trainer["accelerator"] == "cpu":
        raise gpu_attention_on_cpu(attention)
    if attention in FLASH_ATTENTION and "trainer.strategy" not in run.foreign and run.verb != "audit":
        precision = run.strategy.precision_config
        given = f"{attention} with {STRATEGY}.precision {precision.mode}"
        fix = f"set {STRATEGY}.precision: mixed, or leave attn_implementation out"
        fits = precision.row.compute != "fp32"
        require(fits, "model.attn_implementation", given, "bf16 or fp16 compute only", fix)


def _fused_loss_has_a_gpu(run: RunConfig) -> None:
    if run.model.loss.backend != "liger" or run.verb != "fit":
        return
    lora = run.model.lora
    targets = (lora and lora.target_modules) or []
    has_head = bool(re.fullmatch(targets, "lm_head")) if isinstance(targets, str) else "lm_head" in targets
    has_head |= "lm_head" in ((lora and lora.modules_to_save) or [])
    problem = (
        "trainer.accelerator cpu" if run.trainer["accelerator"] == "cpu"
        else "adapters on the head" if has_head
        else None
    )  # fmt: skip
    given, fix = f"liger with {problem}", "set model.loss.backend: chunked"
    require(problem is None, "model.loss.backend", given, "a GPU and a plain linear head", fix)


def _optimizer_has_its_engine(run: RunConfig) -> None:
    path, engine = run.model.optim.optimizer, run.strategy.engine
    if run.foreign & {"model", "trainer.strategy"}:
        return
    check_optimizer(path, engine, f"{STRATEGY}.engine")


def _samples_have_prompts(run: RunConfig) -> None:
    prompts, others = run.samples.prompts, " and ".join(sorted(run.foreign))
    given = f"{prompts} with a third-party {others}"
    require(prompts is None or not others, "samples.prompts", given, "our own model, data and strategy", "drop samples")
    needs_rows = isinstance(prompts, int) or (prompts is not None and run.samples.every_validation)
    if run.verb == "fit" and needs_rows:
        fix = "set data.val or data.val_split, or name a file of prompts and set samples.every_validation: false"
        require(run.data.has("val"), "samples.prompts", f"{prompts} without data.val", "validation rows", fix)


def _reference_sees_every_row(run: RunConfig) -> None:
    preference = run.model.preference if isinstance(run.model, PreferenceModelConfig) else None
    computed = preference is not None and preference.has_reference and run.model.lora is None
    allowed = "false: the reference reads all pairs before training starts"
    fix = "train adapters (model.lora), whose base serves as reference, or set streaming: false"
    require(not (computed and run.data.streaming), "data.streaming", "true", allowed, fix)


def _quantized_base_has_its_engine(run: RunConfig) -> None:
    if "model" in run.foreign or run.model.lora is None or run.model.lora.quantize is None:
        return
    ours = "trainer.strategy" not in run.foreign
    given, fix = "another strategy with model.lora.quantize", "drop trainer.strategy, or quantize"
    require(ours, "trainer.strategy", given, "lit_fsdp.fsdp_strategy with fsdp2 | ddp | single", fix)
    check_quantized(run.strategy, STRATEGY)


RULES: list[Callable[[RunConfig], None]] = [
    _logger_is_a_class,
    _has_a_model,
    _has_data,
    _training_ends,
    _a_stream_ends,
    _mesh_fits,
    _batches_fit,
    _counts_whole_batches,
    _attention_has_its_device,
    _fused_loss_has_a_gpu,
    _optimizer_has_its_engine,
    _samples_have_prompts,
    _reference_sees_every_row,
    _quantized_base_has_its_engine,
]
"""Every rule that needs more than one section; each raises ConfigError."""
