"""The rules between sections: one list, checked before any process starts and before torch is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lit_fsdp.config.checkpoint import CheckpointConfig
from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.engines import strategy_config
from lit_fsdp.config.lightning_values import check_counts, check_run_folder, check_seed
from lit_fsdp.config.mesh import mesh_shape
from lit_fsdp.config.model import FLASH_ATTENTION, GPU_ATTENTION, ModelConfig, gpu_attention_on_cpu
from lit_fsdp.config.resume import ResumeConfig
from lit_fsdp.config.sharding import StrategyConfig
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.config.typed import build, unknown_key
from lit_fsdp.errors import ConfigError

FACTORY = "lit_fsdp.fsdp_strategy"
STRATEGY = "trainer.strategy.init_args"
_TOP = ("seed_everything", "trainer", "model", "data", "checkpoint", "resume", "slurm", "ckpt_path")


@dataclass(frozen=True)
class RunConfig:
    """The typed sections of a recipe, and Lightning's as it stands."""

    strategy: StrategyConfig
    model: ModelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    resume: ResumeConfig
    slurm: SlurmConfig
    trainer: dict[str, Any]
    verb: str

    @property
    def num_nodes(self) -> int:
        """Nodes of the run."""
        given = self.trainer.get("num_nodes")
        return 1 if given is None else int(given)

    @property
    def world_size(self) -> int | None:
        """All ranks, or ``None`` while ``devices`` is ``auto``."""
        devices = self.trainer.get("devices")
        if isinstance(devices, list):
            devices = len(devices)
        return devices * self.num_nodes if isinstance(devices, int) and devices > 0 else None


def check_recipe(values: dict[str, Any], verb: str) -> RunConfig:
    """The typed sections of a recipe whose every own value and cross-field rule holds.

    Args:
        values: The merged recipe; in place, a missing or short ``trainer.strategy`` is completed and numbers that
            stand for text become text, as Lightning's parser wants it.
        verb: ``fit``, ``validate``, ``test`` or ``predict``; ``audit`` leaves out what only a run needs.

    Raises:
        ConfigError: The first thing that is wrong.
    """
    for key in values:
        if key not in _TOP:
            raise unknown_key(str(key), values[key], str(key), _TOP)
    trainer = {} if values.get("trainer") is None else values["trainer"]
    if not isinstance(trainer, dict):
        raise ConfigError("trainer", trainer, "a mapping of Lightning's Trainer arguments", "write trainer: {...}")
    values["trainer"] = trainer
    run = RunConfig(
        strategy=strategy_config(_complete_strategy(trainer), STRATEGY),
        model=build(ModelConfig, values.get("model"), "model"),
        data=build(DataConfig, values.get("data"), "data"),
        checkpoint=build(CheckpointConfig, values.get("checkpoint"), "checkpoint"),
        resume=build(ResumeConfig, values.get("resume"), "resume"),
        slurm=build(SlurmConfig, values.get("slurm"), "slurm"),
        trainer=trainer,
        verb=verb,
    )
    check_seed(values.get("seed_everything"))
    for rule in RULES:
        rule(run)
    for section, key, texts in (("slurm", "env", run.slurm.env), ("data", "columns", run.data.columns)):
        if texts and isinstance(values[section], dict):
            values[section] = {**values[section], key: texts}
    trainer.pop("accumulate_grad_batches", None)  # agrees, and follows from the ranks at hand
    return run


def _complete_strategy(trainer: dict[str, Any]) -> dict[str, Any]:
    given = trainer.get("strategy")
    if given is None or given == FACTORY:
        given = {"class_path": FACTORY}
    if not isinstance(given, dict):
        raise ConfigError("trainer.strategy", repr(given), FACTORY, f"write strategy: {{class_path: {FACTORY}}}")
    for key in given:
        if key not in ("class_path", "init_args"):
            raise unknown_key(f"trainer.strategy.{key}", given[key], str(key), ("class_path", "init_args"))
    if given.setdefault("class_path", FACTORY) != FACTORY:
        raise ConfigError("trainer.strategy.class_path", given["class_path"], FACTORY, f"write class_path: {FACTORY}")
    if given.get("init_args") is None:
        given["init_args"] = {}
    trainer["strategy"] = given
    return given["init_args"]


def _precision_is_the_strategys(run: RunConfig) -> None:
    if run.trainer.get("precision") is not None:
        raise ConfigError(
            "trainer.precision",
            run.trainer["precision"],
            f"nothing: precision is {STRATEGY}.precision (mixed, low_precision, fp32)",
            f"drop trainer.precision and set {STRATEGY}.precision: mixed",
        )


def _mesh_fits(run: RunConfig) -> None:
    if run.world_size is not None:
        mesh_shape(run.strategy, run.num_nodes, run.world_size, STRATEGY)


def _batches_fit(run: RunConfig) -> None:
    if run.world_size is None or run.verb != "fit":
        return
    steps = accumulation_steps(run.data.global_batch_size, run.data.micro_batch_size, run.world_size)
    given = run.trainer.get("accumulate_grad_batches")
    if given is not None and given != steps:
        raise ConfigError(
            "trainer.accumulate_grad_batches",
            f"{given} with global_batch_size {run.data.global_batch_size}, micro_batch_size "
            f"{run.data.micro_batch_size} on {run.world_size} ranks",
            f"{steps}, which follows from them",
            "drop accumulate_grad_batches, or change data.global_batch_size",
        )


def _training_ends(run: RunConfig) -> None:
    if run.verb != "fit":
        return
    steps, epochs = run.trainer.get("max_steps"), run.trainer.get("max_epochs")
    has_end = (isinstance(steps, int) and steps > 0) or (isinstance(epochs, int) and epochs > 0)
    if not has_end and not run.trainer.get("max_time") and not run.trainer.get("fast_dev_run"):
        raise ConfigError("trainer.max_steps", steps, "max_steps or max_epochs >= 1", "set trainer.max_steps: 1000")
    warmup = run.model.optim.warmup_steps
    if isinstance(steps, int) and 0 < steps < warmup:
        raise ConfigError(
            "model.optim.warmup_steps",
            f"{warmup} with trainer.max_steps {steps}",
            f"at most max_steps ({steps})",
            f"set warmup_steps: {max(0, steps // 10)}",
        )


def _a_stream_ends(run: RunConfig) -> None:
    if run.verb != "fit" or not run.data.streaming:
        return
    steps, interval = run.trainer.get("max_steps"), run.trainer.get("val_check_interval")
    if run.trainer.get("fast_dev_run"):
        return
    if not (isinstance(steps, int) and steps > 0) and not run.trainer.get("max_time"):
        raise ConfigError(
            "trainer.max_steps",
            f"{steps} with data.streaming: true",
            "max_steps >= 1: a stream goes on without end, and nobody has counted its rows, so max_epochs ends nothing",
            "set trainer.max_steps: 1000",
        )
    if run.data.has("val") and (not isinstance(interval, int) or isinstance(interval, bool)):
        raise ConfigError(
            "trainer.val_check_interval",
            f"{interval} with data.streaming: true and data.val",
            "a whole number of micro-batches: a stream has no epoch that ends, after which validation would run",
            "set trainer.val_check_interval: 500, or drop data.val",
        )


def _has_a_model(run: RunConfig) -> None:
    if run.model.name is None:
        raise ConfigError("model.name", "null", "a hub name, folder, GGUF file or config", "name the model")


def _has_data(run: RunConfig) -> None:
    split = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}.get(run.verb)
    if split and not run.data.has(split):
        raise ConfigError(f"data.{split}", "null", f"a source of rows for {run.verb}", f"set data.{split}: rows.jsonl")


def _not_overfitting_batches(run: RunConfig) -> None:
    if run.trainer.get("overfit_batches"):
        raise ConfigError(
            "trainer.overfit_batches",
            run.trainer["overfit_batches"],
            "0: the order of samples is a function of the step, which this would change in silence",
            "name a small file as data.train and set data.shuffle: false",
        )


def _limits_whole_batches(run: RunConfig) -> None:
    limit = run.trainer.get("limit_train_batches")
    if limit is not None and (limit != 1 or isinstance(limit, int)):  # 1 is one batch, 1.0 all of them
        raise ConfigError(
            "trainer.limit_train_batches",
            limit,
            "1.0: it counts micro-batches, and could end an epoch inside a global batch",
            "set trainer.max_steps",
        )


def _attention_has_its_device(run: RunConfig) -> None:
    """Where the recipe names the device; elsewhere it is known later."""
    if run.trainer.get("accelerator") == "cpu" and run.model.attn_implementation in GPU_ATTENTION:
        raise gpu_attention_on_cpu(run.model.attn_implementation)


def _flash_attention_has_few_bits(run: RunConfig) -> None:
    compute = run.strategy.precision_config.row.compute
    if run.model.attn_implementation in FLASH_ATTENTION and compute == "fp32" and run.verb != "audit":
        raise ConfigError(
            "model.attn_implementation",
            f"{run.model.attn_implementation} with {STRATEGY}.precision {run.strategy.precision_config.mode}",
            "bf16 or fp16 compute; it has no other",
            f"set {STRATEGY}.precision: mixed, or leave attn_implementation out",
        )


def _fused_loss_has_a_gpu(run: RunConfig) -> None:
    backend = run.model.loss.backend
    if backend not in ("liger", "cce") or run.verb != "fit":
        return
    problem = None
    if run.trainer.get("accelerator") == "cpu":
        problem = "trainer.accelerator cpu"
    elif backend == "cce" and run.strategy.precision_config.row.compute == "fp32":
        problem = f"precision {run.strategy.precision_config.mode}"
    elif run.model.lora is not None and "lm_head" in [
        *_names(run.model.lora.target_modules),
        *_names(run.model.lora.modules_to_save),
    ]:
        problem = "adapters on the head"
    if problem:
        raise ConfigError(
            "model.loss.backend",
            f"{backend} with {problem}",
            "a GPU, and for cce bf16 or fp16 compute; a plain linear head",
            "set model.loss.backend: chunked",
        )


def _names(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else []


RULES: list[Callable[[RunConfig], None]] = [
    lambda run: check_counts(run.trainer),
    lambda run: check_run_folder(run.trainer),
    _has_a_model,
    _has_data,
    _training_ends,
    _a_stream_ends,
    _precision_is_the_strategys,
    _mesh_fits,
    _batches_fit,
    _not_overfitting_batches,
    _limits_whole_batches,
    _attention_has_its_device,
    _flash_attention_has_few_bits,
    _fused_loss_has_a_gpu,
]
"""Every rule that needs more than one section; each raises ConfigError."""
