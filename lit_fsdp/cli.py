"""LightningCLI around a recipe that has been read and checked already."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jsonargparse
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.callbacks.csv_log import RunCSVLogger
from lit_fsdp.callbacks.data_record import DataRecord
from lit_fsdp.callbacks.isolation import IsolationProof
from lit_fsdp.callbacks.logger_runs import LoggerRuns, go_on_logging
from lit_fsdp.callbacks.predictions import PredictionWriter
from lit_fsdp.callbacks.progress import RunProgress
from lit_fsdp.callbacks.run_record import PENDING_RECIPE, RunRecord
from lit_fsdp.callbacks.stop import StopOnSignal, StopRequested
from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.checkpoint.disk import naming
from lit_fsdp.checkpoint.run_lock import RunLock
from lit_fsdp.config.checkpoint import CheckpointConfig
from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.mesh import mesh_shape
from lit_fsdp.config.model import ModelConfig
from lit_fsdp.config.redacted import printed_without_secrets, without_secrets
from lit_fsdp.config.resume import ResumeConfig
from lit_fsdp.config.run import FACTORY, STRATEGY
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.config.typed import field_docs
from lit_fsdp.datamodule import CausalLMDataModule
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import follows_first_task, is_launched_by_lightning, is_requeued
from lit_fsdp.models.attention import check_attention
from lit_fsdp.module import CausalLMModule
from lit_fsdp.parallel.devices import check_device
from lit_fsdp.parallel.prepare import plan_for
from lit_fsdp.parallel.selective import resolve_ops
from lit_fsdp.parallel.sharded import ShardedStrategy
from lit_fsdp.signals import SignalFlags
from lit_fsdp.speak import speak
from lit_fsdp.trainer_keys import TRAINER_ERRORS, check_trainer_keys, refused_by_trainer

# Packages whose classes a recipe may name. A rejected class path is not imported.
TRUSTED = ["lit_fsdp", "lightning", "pytorch_lightning", "torch", "torchmetrics"]
_TRAINER_DEFAULTS = {
    "strategy": {"class_path": FACTORY},
    "enable_model_summary": False,  # the audit of FSDP units says more
    "use_distributed_sampler": False,  # the data module orders samples itself
    "num_sanity_val_steps": 0,
}
# Arguments of Trainer.fit, .validate, ... that are not for a recipe; what is left is ckpt_path.
_FIXED_ARGUMENTS = {
    *("model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders"),
    *("weights_only", "verbose", "return_predictions"),
}
_SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "resume": ResumeConfig,
    "slurm": SlurmConfig,
}
_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


def run_verb(
    verb: str,
    values: dict[str, Any],
    flags: list[str],
    others: Sequence[Path] = (),
    signals: SignalFlags | None = None,
    choose_again: Callable[[], tuple[str, Sequence[Path]]] | None = None,
) -> int:
    """Run ``fit``, ``validate``, ``test`` or ``predict`` and return the exit code.

    Args:
        verb: Which of them.
        values: The merged and checked recipe.
        flags: Further flags for Lightning's parser.
        others: Checkpoints that may take the place of ``ckpt_path`` if it turns out to be damaged, in this order.
        signals: Set by this process's signal handlers; default: none are installed.
        choose_again: Finds ``ckpt_path`` and ``others`` once more, when no other job can write into the run folder.

    Raises:
        ConfigError: A key or value that only Lightning knows to be wrong.
    """
    check_trainer_keys(values, flags)
    signals = signals or SignalFlags()
    speak()
    shows_help = "-h" in flags or "--help" in flags  # only then are docstrings worth the time it takes to parse them
    jsonargparse.set_parsing_settings(
        docstring_parse_attribute_docstrings=shows_help, import_path_denylist=["*"], import_path_allowlist=TRUSTED
    )
    cli: RecipeCLI | None = None
    try:
        cli = RecipeCLI(verb, [verb, "--config", yaml.safe_dump(values, sort_keys=False), *flags], signals)
        signals.before_exit = lambda: cli.end_children(grace_seconds=0) if cli is not None else None
        cli.run_trainer(others, choose_again)
    except argparse.ArgumentError as error:
        raise unreadable(error) from None
    except StopRequested as stop:
        assert cli is not None
        if cli.trainer.is_global_zero:
            print(stop, file=sys.stderr)
        # Lightning's launcher takes any other exit code of a child for a failure and kills the rest; so does srun,
        # which is told so by the first rank alone.
        return 0 if is_launched_by_lightning() or follows_first_task() else stop.exit_code
    except BaseException:
        if cli is not None:
            cli.end_children()
        raise
    return 0


def unreadable(error: argparse.ArgumentError) -> ConfigError:
    """The error of Lightning's parser in the house form."""
    return ConfigError("recipe", str(error), "see lit-fsdp fit --help", "mend the key named above")


class RecipeCLI(LightningCLI):
    """One verb of LightningCLI with our module, data module, callbacks and run folder.

    Args:
        verb: The only subcommand.
        args: For the parser.
        signals: Set by this process's signal handlers.
    """

    def __init__(self, verb: str, args: list[str], signals: SignalFlags) -> None:
        self.verb, self.signals = verb, signals
        strict = {"allow_abbrev": False, "exit_on_error": False}
        super().__init__(
            CausalLMModule,
            CausalLMDataModule,
            save_config_callback=None,
            seed_everything_default=0,
            parser_kwargs={**strict, "prog": "lit-fsdp", verb: dict(strict)},
            args=args,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the verb that runs: building the other parsers would cost as much again."""
        return {self.verb: _FIXED_ARGUMENTS}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Model, data and Lightning's Trainer without what the batch sizes and the ranks decide."""
        skip: set[str | int] = {"accumulate_grad_batches"}
        parser.add_class_arguments(
            Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip=skip
        )
        parser.set_defaults({f"trainer.{name}": value for name, value in _TRAINER_DEFAULTS.items()})
        parser.add_lightning_class_args(CausalLMModule, "model")
        parser.add_lightning_class_args(CausalLMDataModule, "data")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The ``checkpoint``, ``resume`` and ``slurm`` sections, and the sentence of each field as its help."""
        parser.add_class_arguments(CheckpointConfig, "checkpoint")
        parser.add_class_arguments(ResumeConfig, "resume")
        parser.add_class_arguments(SlurmConfig, "slurm")
        for action in parser._actions:
            section, _, field = action.dest.partition(".")
            if section in _SECTIONS and field in field_docs(_SECTIONS[section]):
                action.help = field_docs(_SECTIONS[section])[field]

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for action in parser._actions:
            if action.dest == "ckpt_path":
                action.help = "last or best checkpoint of the run folder, or the path of one"
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse what :func:`run_verb` made of the command line."""
        with printed_without_secrets(args):
            self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Nothing: hyper-parameters come from the recipe, never out of a checkpoint."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing yet: :meth:`run_trainer` runs it."""

    def instantiate_classes(self) -> None:
        """Build everything; other loggers go on in the runs they had, without that becoming part of the recipe."""
        asked = self.config
        ckpt_path = self._get(asked, "ckpt_path")
        if self.verb == "fit" and (ckpt_path or is_requeued()):
            self.config = asked.clone()
            trainer = self.config[self.verb]["trainer"]
            go_on_logging(trainer, Path(trainer["default_root_dir"]), ckpt_path)
        super().instantiate_classes()
        self.config = asked

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with our callbacks and ``metrics.csv`` beside whatever the recipe adds."""
        given = self._get(self.config_init, "trainer")
        checkpoint = self._get(self.config_init, "checkpoint")
        self.data_record = DataRecord()
        first = (StopOnSignal(self.signals), RunRecord(), self.data_record, IsolationProof())
        callbacks: list[Any] = [*first, LoggerRuns(), Throughput(), PredictionWriter()]
        if given.get("enable_progress_bar") is not False:
            callbacks.append(RunProgress())
        if given.get("enable_checkpointing") is not False:
            callbacks.append(Checkpoint(**vars(checkpoint)))
        logger = given.get("logger")
        if logger is not False:
            own = RunCSVLogger(given["default_root_dir"], self.verb)
            others = [] if logger in (None, True) else list(logger) if isinstance(logger, (list, tuple)) else [logger]
            kwargs["logger"] = [own, *others]
        try:
            return self._instantiate_trainer({**given, **kwargs}, callbacks)
        except ConfigError:
            raise
        except TRAINER_ERRORS as error:
            raise refused_by_trainer(error) from error

    def run_trainer(
        self, others: Sequence[Path] = (), choose_again: Callable[[], tuple[str, Sequence[Path]]] | None = None
    ) -> None:
        """Prepare the data before any process group exists, then run the verb."""
        ckpt_path = self._get(self.config_init, "ckpt_path")
        folder = Path(self._get(self.config_init, "trainer")["default_root_dir"])
        self._check_ranks_and_units()
        longest = getattr(self.model.source.hf_config, "max_position_embeddings", None)
        self.datamodule.attach(self.model.tokenizer, self._get(self.config, "seed_everything"), longest)
        self.datamodule.prepare(_STAGES[self.verb])
        if self.trainer.is_global_zero and self.verb == "fit":
            RunLock(folder)  # until this process ends
            if choose_again is not None:  # a job that has just ended there may have saved, and removed, in the meantime
                ckpt_path, others = choose_again()
            # beside the one of before, until the checkpoint is loaded: a resume may yet be refused
            self._write_recipe(folder / (PENDING_RECIPE if ckpt_path else "recipe.yaml"))
        self.data_record.show(self.datamodule, self.verb, folder, self.trainer.is_global_zero)
        strategy: Any = self.trainer.strategy
        strategy.in_recipe = True
        strategy.verify_on_load = self._get(self.config_init, "resume").verify
        strategy.fallback_checkpoints = tuple(others)
        self.signals.has_peers = self.signals.has_peers or self.trainer.world_size > 1
        if self.verb == "fit":
            strategy.checkpoint_files["recipe.yaml"] = folder / "recipe.yaml"
            self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=ckpt_path)
        elif self.verb == "predict":
            self.trainer.predict(self.model, self.datamodule, return_predictions=False, ckpt_path=ckpt_path)
        else:
            getattr(self.trainer, self.verb)(self.model, datamodule=self.datamodule, ckpt_path=ckpt_path)

    def _check_ranks_and_units(self) -> None:
        """What needs the model or the number of ranks, which is known only now if ``devices`` is ``auto``."""
        trainer, strategy = self.trainer, cast("ShardedStrategy", self.trainer.strategy)
        ranks = trainer.num_devices * trainer.num_nodes
        mesh_shape(strategy.config, trainer.num_nodes, ranks, STRATEGY)
        check_device(strategy.config, strategy.root_device.type, STRATEGY)
        check_attention(self.model.config.attn_implementation, strategy.root_device.type)
        plan_for(self.model.build(), strategy.config, STRATEGY)
        resolve_ops(strategy.config.activation_config.ops, f"{STRATEGY}.activation_checkpointing.ops")
        if self.verb == "fit":
            accumulation_steps(self.datamodule.config.global_batch_size, self.datamodule.config.micro_batch_size, ranks)

    def _write_recipe(self, path: Path) -> None:
        """The resolved recipe, every default spelled out, secrets as ``***``."""
        parser = self._parser(self.subcommand)
        config = self.config[self.verb].clone()
        text = without_secrets(parser.dump(config, skip_none=False, skip_validation=True, format="yaml"))
        with naming(path):
            path.write_text(text)

    def end_children(self, grace_seconds: float = 5.0) -> None:
        """Do not leave ranks waiting for one that failed: kill those that have not noticed it after a while."""
        launcher = getattr(self, "trainer", None) and self.trainer.strategy.launcher
        if not isinstance(launcher, _SubprocessScriptLauncher):
            return
        children = list(launcher.procs)
        launcher.procs.clear()  # Lightning's observer of this list would kill this process as soon as one has ended
        deadline = time.monotonic() + grace_seconds
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in children:
            if child.poll() is None:
                child.kill()
