"""LightningCLI for recipes: our sections, callbacks, run folder and checks for any module and data module."""

import os
import re
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonargparse
import lightning
import torch.distributed as dist
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.callbacks.expert_load import ExpertLoad
from lit_fsdp.callbacks.isolation import IsolationProof
from lit_fsdp.callbacks.loggers import RunCSVLogger, check_loggers, resume_loggers, write_to_run_folder
from lit_fsdp.callbacks.monitored import check_monitors
from lit_fsdp.callbacks.progress import RunProgress
from lit_fsdp.callbacks.records import PENDING_RECIPE, PredictionWriter, RunRecord, record_data
from lit_fsdp.callbacks.samples import Samples
from lit_fsdp.callbacks.stop import StopOnSignal, StopRequested
from lit_fsdp.callbacks.summary import summary_of
from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.checkpoint.files import naming
from lit_fsdp.checkpoint.run_folder import Resume, check_run_folder, checkpoints, create_run_folder, find_resume
from lit_fsdp.checkpoint.run_lock import RunLock
from lit_fsdp.config.command_line import OWN_CLASSES, TRUSTED, read_command_line
from lit_fsdp.config.data import STAGES, DataConfig
from lit_fsdp.config.model import ModelConfig
from lit_fsdp.config.parser import SECTIONS, complete, parse
from lit_fsdp.config.parser_errors import not_allowed
from lit_fsdp.config.run import FACTORY, RULES, STRATEGY, CheckpointConfig, RunConfig
from lit_fsdp.config.sections import typed
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.config.yaml_files import use_loader
from lit_fsdp.datamodule import CausalLMDataModule
from lit_fsdp.errors import ConfigError, RefusedByLightning, require
from lit_fsdp.exit_codes import exit_code_of, is_lost, is_out_of_memory
from lit_fsdp.host import follows_first_task, is_launched_by_lightning, is_requeued, resume_collection, wait_for_first
from lit_fsdp.launch.launcher import adopt_step, check_launch, drop_used_port
from lit_fsdp.launch.ranks import LAUNCHED_RANKS
from lit_fsdp.logs import setup_logging
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.models.build import check_attention
from lit_fsdp.models.optimizers import optimizer_class
from lit_fsdp.module import CausalLMModule
from lit_fsdp.parallel.base import EngineStrategy, check_finders
from lit_fsdp.parallel.units import plan_for
from lit_fsdp.plan.memory import compared_memory
from lit_fsdp.plan.search import advice
from lit_fsdp.redaction import redact_values
from lit_fsdp.report.page import report_of
from lit_fsdp.signals import SIGNAL_FLAGS

_TEXTS = {
    "fit": "Train a model with a recipe.",
    "validate": "Compute loss, perplexity and token accuracy on data.val.",
    "test": "Compute loss, perplexity and token accuracy on data.test.",
    "predict": "Score every row of data.predict into predictions.jsonl.",
}
_REFUSALS = (MisconfigurationException, ModuleNotFoundError, ValueError, TypeError)
"""Exceptions that Lightning raises for invalid values."""


class RecipeCLI(LightningCLI):
    """LightningCLI with recipes, run folder, checkpoints, resume and signals; it has the arguments of LightningCLI.

    Without classes, ``model`` and ``data`` of a recipe may name any LightningModule and LightningDataModule by
    ``class_path``; the defaults are our own. In a script, ``RecipeCLI(MyModule, MyDataModule)`` provides the same verbs
    for user-defined classes. Subclasses may add arguments and callbacks in ``add_arguments_to_parser``, link them, and
    define ``before_fit``, ``fit``, ``after_fit`` and so on.

    Raises:
        ConfigError: Invalid key or value. Without ``args``, the process exits instead: with 2 after such an error, with
            75 or 130 after a signal.
    """

    def __init__(
        self, model_class: Any = None, datamodule_class: Any = None, save_config_callback: Any = None, **kwargs: Any
    ) -> None:
        args = kwargs.get("args")
        words = [] if isinstance(args, (dict, Namespace)) else list(sys.argv[1:] if args is None else args)
        self.verb = words.pop(0) if words and words[0] in STAGES else None
        self.exit_code = 0
        self._raised: Exception | None = None  # by the constructor of a class of the recipe
        own_model = model_class is None or (isinstance(model_class, type) and issubclass(model_class, CausalLMModule))
        self._is_foreign_model = not own_model
        setup_logging()
        strict: dict[str, Any] = {"allow_abbrev": False, "exit_on_error": False}
        usage = "--config RECIPE.yaml [--key value ...] [options]"  # instead of three screens of keys
        for verb in self.subcommands() if kwargs.get("run", True) else ():
            strict[verb] = {"allow_abbrev": False, "exit_on_error": False, "usage": f"lit-fsdp {verb} {usage}"}
            strict[verb] |= {"description": _TEXTS[verb]} if verb in _TEXTS else {}  # Lightning's stop in mid-sentence
        self._supports_loading = bool(kwargs.get("load_from_checkpoint_support"))
        kwargs["parser_kwargs"] = {"prog": "lit-fsdp", **strict} | (kwargs.get("parser_kwargs") or {})
        own = {"seed_everything_default": 0, "load_from_checkpoint_support": False}

        def build() -> int:
            self.line = read_command_line(words)
            self._allow_imports(model_class, datamodule_class)
            LightningCLI.__init__(self, model_class, datamodule_class, save_config_callback, **own | kwargs)
            return self.exit_code

        if args is not None:
            build()
            return
        adopt_step(os.environ)
        drop_used_port(os.environ)
        if code := exit_code_of(build, debug="--debug" in words):
            sys.exit(code)

    def _allow_imports(self, *classes: Any) -> None:
        """Allow classes of trusted and allowed packages, and of the packages of classes given in Python."""
        named = [one.__module__.partition(".")[0] for one in (*classes, type(self)) if one is not None]
        self.shows_help = bool({"-h", "--help"} & set(self.line.words))
        reads_docs = self.shows_help or any(word.partition("=")[0].endswith(".help") for word in self.line.words)
        self.allowed = (*TRUSTED, *named, *self.line.allow_imports)
        jsonargparse.set_parsing_settings(
            docstring_parse_attribute_docstrings=reads_docs,  # parsing docstrings takes a second
            import_path_denylist=["*"],
            import_path_allowlist=list(self.allowed),
        )
        if "model" in self.line.foreign:
            self._is_foreign_model = not issubclass(self._named_class("model"), CausalLMModule)
        use_loader(not self._is_foreign_model, lambda values: self.line.in_short(values, self._open, _arguments))

    def _named_class(self, name: str) -> Any:
        """The recipe's class for ``model`` or ``data``, by default ours."""
        path = self.line.foreign.get(name, OWN_CLASSES[name])
        if path.partition(".")[0] not in self.allowed:
            raise not_allowed(name, path)
        try:
            return _imported(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(name, path, f"a class that can be imported ({error})") from error

    # -- the parser

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Lightning's parser; jsonargparse 5 removes ``instantiate_classes``, which lightning 2.6 calls."""
        parser: Any = super().init_parser(**kwargs)
        # with that support, Lightning itself constructs modules and data modules
        base = Callback if self._supports_loading else object
        parser.instantiate_classes = partial(parser.instantiate, instantiators=[(self._construct, base, True)])
        return parser

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The verb that runs, or all verbs; building each parser takes equally long."""
        every = super().subcommands()
        chosen = {self.verb: every[self.verb]} if self.verb else every
        own = {"ckpt_path", "weights_only", "verbose", "return_predictions"}
        return {verb: skipped | own for verb, skipped in chosen.items()}

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the Trainer with our strategy and two of our keys, the module and the data module."""
        skip: set[str | int] = {"accumulate_grad_batches", "precision"}  # they may replace keys of ours
        parser.add_class_arguments(
            self.trainer_class, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip=skip
        )
        parser.add_argument("--trainer.accumulate_grad_batches", type=int | None, default=None)
        parser.add_argument("--trainer.precision", type=str | int | None, default=None)
        defaults = {"strategy": {"class_path": FACTORY}} | self.trainer_defaults
        parser.set_defaults({f"trainer.{name}": value for name, value in defaults.items() if name != "callbacks"})
        if "trainer.strategy" not in self.line.foreign:
            _keep_paths(parser, "trainer.strategy")
        classes: list[tuple[str, Any, bool, Any]] = [
            ("model", self._model_class, self.subclass_mode_model, self.model_class),
            ("data", self._datamodule_class, self.subclass_mode_data, self.datamodule_class),
        ]
        self._open: list[str] = []
        for name, base, in_mode, given in classes:
            is_open = in_mode or given is None
            self._open += [name] if is_open else []
            if not is_open or self.shows_help:  # show the help of the named class, by default ours
                cls = self._named_class(name) if is_open else base
                if _is_ours(cls):
                    parser.add_class_arguments(cls, name, fail_untyped=False)
                else:
                    parser.add_lightning_class_args(cls, name)
                continue
            parser.add_subclass_arguments(base, name, required=False)
            has_default = given is None and (self.model_class is None or not self._is_foreign_model)
            cls = given
            if path := self.line.classes.get(name, OWN_CLASSES[name] if has_default else None):
                cls = self._named_class(name)
                parser.set_defaults({name: {"class_path": path}})
            if cls is None or _is_ours(cls):  # None: only a mapping in Python names it
                _keep_paths(parser, name)

    def _add_arguments(self, parser: LightningArgumentParser) -> None:
        for name, cls in SECTIONS.items():
            parser.add_class_arguments(cls, name)
        text = "checkpoint to resume from or to evaluate: last, best (by checkpoint.monitor), or a path"
        parser.add_argument("--ckpt_path", type=str | None, default=None, help=text)
        if self.shows_help:  # read by read_command_line
            parser.format_help = partial(_without_markup, parser.format_help)  # type: ignore[method-assign]
            text = "allow classes of this package in the recipe; repeatable"
            parser.add_argument("--allow-imports", metavar="PACKAGE", help=text)
            parser.add_argument("--verbose", action="store_true", help="list the replacements of a miniature")
            parser.add_argument("--debug", action="store_true", help="show tracebacks of errors that a user can fix")
        super()._add_arguments(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse files and flags, and fill in derived values; the flag ``--print_config`` exits here."""
        if isinstance(args, (dict, Namespace)):
            super().parse_arguments(parser, args)
        else:
            given = ["--help"] if self.shows_help else self.line.short_words(not self._is_foreign_model, self._open)
            named = {f"--{name}.help": self.line.classes.get(name, path) for name, path in OWN_CLASSES.items()}
            for index in (index for index, word in enumerate(given) if word in named):
                if not given[index + 1 :] or given[index + 1].startswith("-"):
                    given[index] += f"={named[given[index]]}"  # else of the class that both are of
            words = [*([self.verb] if self.verb else []), *given]
            known = self._parser(self.verb)._actions if self.verb else []
            self.config = parse(parser, words, known=[action.dest for action in known])
        self.verb = self.config.get("subcommand")
        parsed = self._section()
        complete(parsed, self.line, *self._own_sections(parsed))
        if self.line.print_config:
            print(self._recipe_text(), end="")
            sys.exit(0)

    def _section(self) -> Namespace:
        return self.config[self.verb] if self.verb else self.config

    def _own_sections(self, parsed: Namespace) -> tuple[Namespace | None, Namespace | None, Namespace | None]:
        """The arguments of module, data module and strategy, each None for a third-party class."""
        found: list[Namespace | None] = []
        for name, given, own in (
            ("model", self.model_class, CausalLMModule),
            ("data", self.datamodule_class, CausalLMDataModule),
        ):
            section: Any = parsed.get(name)
            if isinstance(section, Namespace) and "class_path" in section:
                path, section = section.class_path, section.get("init_args")
                given = _imported(path)
            found.append(section if isinstance(given, type) and issubclass(given, own) else None)
        strategy: Any = parsed.trainer.strategy
        is_ours = isinstance(strategy, Namespace) and strategy.class_path.startswith("lit_fsdp.")
        return found[0], found[1], strategy.init_args if is_ours else None

    # -- what is built

    def _construct(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return cls(*args, **kwargs)
        except Exception as error:
            self._raised = error
            raise

    def _instantiate(self) -> None:
        """Build all classes; an exception of a constructor is not wrapped in one about the types of the argument."""
        self._raised = None
        try:
            super().instantiate_classes()
        except ValueError as error:
            cause: Any = self._raised
            if cause is None or cause is error or not str(error).startswith("Does not validate against"):
                raise
            raise RefusedByLightning(cause) if _is_lightnings(cause) else cause from None

    def instantiate_classes(self) -> None:
        """Build everything; other loggers resume their runs, which does not become part of the recipe."""
        if not self.verb:
            self._instantiate()
            return
        SIGNAL_FLAGS.can_save = SIGNAL_FLAGS.can_save or self.verb == "fit"
        SIGNAL_FLAGS.install()
        SIGNAL_FLAGS.before_exit = lambda: self.end_children(grace_seconds=0)
        original, parsed = self.config, self._section()
        check_launch(vars(parsed.trainer), os.environ)
        check_loggers(parsed.trainer)
        self.resume = self._find_resume()
        self.config, folder = original.clone(), Path(parsed.trainer.default_root_dir)
        write_to_run_folder(self._section().trainer, folder)
        if self.verb == "fit":
            manifest = self.resume.manifest
            step = (manifest.global_step if manifest else 0) if self.resume.path or is_requeued() else None
            resume_loggers(self._section().trainer, folder, step)
        self._instantiate()
        self.config = original
        split, data = STAGES[self.verb][0], self.datamodule
        if self._has_own_data() and not isinstance(self.model, CausalLMModule) and not data.config.has(split):
            self.datamodule = None  # a third-party module may have its own loaders

    def _has_own_data(self) -> bool:
        return isinstance(self.datamodule, CausalLMDataModule)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer with our callbacks and ``metrics.csv``, plus those of the recipe."""
        given = self._get(self.config_init, "trainer")
        callbacks: list[Any] = [StopOnSignal(SIGNAL_FLAGS), RunRecord(), IsolationProof(), Throughput()]
        callbacks += [ExpertLoad(), PredictionWriter()]
        samples = self._get(self.config_init, "samples")
        self.samples = None if samples.prompts is None else Samples(**vars(samples))
        callbacks += [] if self.samples is None else [self.samples]
        theirs = [self._get(self.config_init, key) for key in self._parser(self.subcommand).callback_keys]
        others = (*theirs, *_listed(given.get("callbacks")), *_listed(self.trainer_defaults.get("callbacks")))
        if given.get("enable_progress_bar") is not False and not any(isinstance(one, ProgressBar) for one in others):
            callbacks.append(RunProgress())
        folder, checkpoint = Path(given["default_root_dir"]), self._get(self.config_init, "checkpoint")
        if given.get("enable_checkpointing") is not False:
            is_ours, every = isinstance(given["strategy"], EngineStrategy), checkpoint.every_steps
            lightnings = {"every_n_train_steps": every, "save_top_k": -1, "save_last": True}  # Lightning's files
            callbacks.append(
                Checkpoint(**vars(checkpoint)) if is_ours else ModelCheckpoint(folder / "checkpoints", **lightnings)
            )
        if given.get("logger") is not False:
            own = RunCSVLogger(folder, self.verb or "fit")
            callbacks.append(own)
            kwargs["logger"] = [*_listed(given.get("logger")), own]  # module.logger is the user's
        if isinstance(self.model, CausalLMModule):
            for name, value in (("enable_model_summary", False), ("num_sanity_val_steps", 0)):
                kwargs[name] = value if given.get(name) is None else given[name]  # the audit of FSDP units has more
        if self._has_own_data():
            kwargs["use_distributed_sampler"] = False  # the data module orders samples itself
        kwargs["accumulate_grad_batches"] = given.get("accumulate_grad_batches") or 1
        try:
            return self._instantiate_trainer({**given, **kwargs}, [*theirs, *callbacks])
        except ConfigError:
            raise
        except _REFUSALS as error:
            is_there = "backend found" not in str(error)  # Lightning's message has no details
            wanted = f"{given.get('accelerator')}, which this machine does not have"
            require(is_there, "trainer.accelerator", wanted, "cpu | auto", "add --trainer.accelerator cpu")
            raise RefusedByLightning(error) from error

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Update the optimizer of ``--optimizer``, built before sharding, with the current parameters."""
        optimizer.param_groups[0]["params"][:] = lightning_module.parameters()
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    # -- what runs

    def _run_subcommand(self, subcommand: str) -> None:
        folder = Path(self.trainer.default_root_dir)
        try:
            self._check_run()
            self._prepare()
            started, manifest = time.monotonic(), self.resume.manifest
            super()._run_subcommand(subcommand)
            seconds = time.monotonic() - started
            if dist.is_initialized():  # its threads may abort a process that shuts down
                dist.destroy_process_group()
            if self.trainer.is_global_zero:
                step = (manifest.global_step if manifest else 0) or 0
                print(summary_of(self.trainer, subcommand, seconds, step), file=sys.stderr)
            is_real = subcommand == "fit" and not self._declared.foreign and not self._declared.model.miniature
            if is_real and self.trainer.is_global_zero:
                print(compared_memory(self._declared, folder), file=sys.stderr)
        except StopRequested as stop:
            if self.trainer.is_global_zero:
                print(stop, file=sys.stderr)
            # Lightning's launcher treats any other exit code of a child as a failure and kills the rest; so does
            # srun, which gets the code from the first rank only
            self.exit_code = 0 if is_launched_by_lightning() or follows_first_task() else stop.exit_code
        except BaseException as error:
            killed = self.end_children()
            has_lost = self.trainer.is_global_zero and is_lost(error)
            can_resume = subcommand == "fit" and (killed or has_lost) and checkpoints(folder)
            notes = [killed, "resume with --ckpt_path last" if can_resume else ""]
            if any(notes):
                error.add_note("\n".join(filter(None, notes)))
            if subcommand == "fit" and is_out_of_memory(error) and hasattr(self, "_declared"):
                kind = "gpu" if is_accelerator(self.trainer.strategy.root_device) else "cpu"
                error.add_note(advice(self._declared, folder / "recipe.yaml", kind, self.line.allow_imports))
            is_refusal = isinstance(error, _REFUSALS) and not isinstance(error, ConfigError) and _is_lightnings(error)
            before = (self.resume.manifest.global_step or 0) if self.resume.manifest else 0
            if self.trainer.global_step > before and not isinstance(error, MisconfigurationException):
                is_refusal = False  # the recipe has worked for some steps
            if is_refusal or str(error).startswith("Early stopping conditioned on metric"):
                raise RefusedByLightning(error) from error
            raise
        finally:  # also for a stopped or failed run, after at least one step
            if subcommand == "fit" and self.trainer.is_global_zero and self.trainer.global_step:
                print(report_of(folder), file=sys.stderr)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        options = {"return_predictions": False} if subcommand == "predict" else {}
        return super()._prepare_subcommand_kwargs(subcommand) | {"ckpt_path": self.resume.path, **options}

    def _find_resume(self) -> Resume:
        """Resolve ``ckpt_path`` to a checkpoint; without it, a used run folder is refused."""
        parsed = self._section()
        config = typed(CheckpointConfig, parsed.checkpoint, "checkpoint")
        strategy: Any = parsed.trainer.strategy
        if isinstance(strategy, str) or not strategy.class_path.startswith("lit_fsdp."):
            return Resume(parsed.ckpt_path)  # Lightning resolves its own files and names
        run_folder = Path(parsed.trainer.default_root_dir)
        return find_resume(str(self.verb), parsed.ckpt_path, run_folder, config, parsed.resume.fallback)

    def _check_run(self) -> None:
        """Check rules that need the model or the number of ranks, known only now if ``devices`` is ``auto``."""
        trainer: Any = self.trainer
        strategy, parsed = trainer.strategy, self._section()
        model, data = self.model, self.datamodule
        ours = {
            "model": isinstance(model, CausalLMModule),
            "data": isinstance(data, CausalLMDataModule),
            "trainer.strategy": isinstance(strategy, EngineStrategy),
        }
        sections: dict[str, Any] = {name: typed(cls, parsed[name], name) for name, cls in SECTIONS.items()}
        run = RunConfig(
            strategy=strategy.config if isinstance(strategy, EngineStrategy) else StrategyConfig(),
            model=model.config if isinstance(model, CausalLMModule) else ModelConfig(),
            data=data.config if isinstance(data, CausalLMDataModule) else DataConfig(),
            **sections,
            trainer=vars(parsed.trainer) | {"devices": trainer.num_devices, "num_nodes": trainer.num_nodes},
            verb=str(self.verb),
            foreign=frozenset(name for name, is_ours in ours.items() if not is_ours),
        )
        self._declared = run
        for rule in RULES:
            rule(run)
        if not ours["trainer.strategy"] and trainer.is_global_zero:
            owner = "Lightning's own" if type(strategy).__module__.startswith("lightning.") else "not lit_fsdp's"
            text = f"trainer.strategy: {type(strategy).__name__} is {owner}"
            print(f"{text}: no dtype contract, no verified checkpoints, no elastic resume", file=sys.stderr)
        if ours["data"] and self.verb == "fit":
            self.datamodule.fix_batches(run.data_ranks, parsed.trainer.accumulate_grad_batches)
        if isinstance(strategy, EngineStrategy):
            strategy.in_recipe = True
            strategy.check_environment(trainer, model, str(self.verb))
        elif ours["model"] or ours["data"]:
            check_finders(trainer.callbacks, model)
        if ours["model"] and self.verb == "fit":
            check_monitors(trainer, model, not ours["data"] or run.data.has("val"))
        if ours["model"]:
            check_attention(run.model.attn_implementation, strategy.root_device.type)
            optimizer_class(run.model.optim)
            self.resume.check(run)
            if ours["trainer.strategy"]:
                plan_for(self.model.build(), run.strategy, STRATEGY)
                if self.verb == "fit" and trainer.checkpoint_callbacks and trainer.is_global_zero:
                    self.model.checkpoint_files()

    def _prepare(self) -> None:
        """Prepare the data, lock the run folder and write the recipe, before any process group exists."""
        resume_collection()
        wait_for_first()
        parsed, trainer, verb = self._section(), self.trainer, str(self.verb)
        folder = Path(parsed.trainer.default_root_dir)
        recipe = self._recipe_text(ckpt_path=None).encode() if verb == "fit" else b""  # not for a new run
        writes = bool(trainer.loggers) or verb in ("fit", "predict")
        if writes:
            check_run_folder(folder)
        if self._has_own_data() and isinstance(self.model, CausalLMModule):
            self.datamodule.attach(self.model.tokenizer, parsed.seed_everything or 0, self.model.is_preference)
            self.datamodule.num_embeddings = self.model.num_embeddings
            self.datamodule.prepare(STAGES[verb])
            if self.samples is not None and verb == "fit":
                self.samples.read(self.datamodule)
        if trainer.is_global_zero and writes:
            create_run_folder(folder)
        if trainer.is_global_zero and verb == "fit":
            RunLock(folder)  # until this process ends
            if parsed.ckpt_path:  # another job may have just saved or removed checkpoints
                self.resume = self._find_resume()
            # keep the old recipe until the checkpoint is loaded: a resume may still be refused
            path = folder / (PENDING_RECIPE if self.resume.path else "recipe.yaml")
            with naming(path):
                path.write_bytes(recipe)
        if self._has_own_data() and trainer.is_global_zero:
            record_data(self.datamodule, verb, folder)
        strategy: Any = trainer.strategy
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoint):
                callback.resumes = self.resume.path is not None
        if isinstance(strategy, EngineStrategy):
            strategy.verify_on_load = parsed.resume.verify
            strategy.fallback_checkpoints = tuple(self.resume.others)
            if verb == "fit":
                strategy.checkpoint_files["recipe.yaml"] = recipe
        SIGNAL_FLAGS.has_peers = SIGNAL_FLAGS.has_peers or trainer.world_size > 1
        LAUNCHED_RANKS.release()

    def _recipe_text(self, **instead: Any) -> str:
        """The resolved recipe with all defaults, short forms for our own classes, and secrets as ``***``."""
        return yaml.safe_dump(redact_values(self._values() | instead), sort_keys=False, allow_unicode=True)

    def _values(self) -> dict[str, Any]:
        parser = self._parser(self.verb) if self.verb else self.parser
        parsed = self._section().clone()
        parsed.pop("config", None)
        for name in ("accumulate_grad_batches", "precision"):
            if parsed.trainer[name] is None:  # Lightning itself would not accept them
                parsed.trainer.pop(name)
        values = yaml.safe_load(parser.dump(parsed, skip_unset=False, skip_validation=True, format="yaml"))
        for name, path in OWN_CLASSES.items():
            section = values.get(name)
            if isinstance(section, dict) and section.get("class_path") == path:
                values[name] = section.get("init_args") or {}
        return dict(values)

    def end_children(self, grace_seconds: float = 5.0) -> str:
        """Kill ranks that still wait for a failed rank after ``grace_seconds``; name those that a signal had ended."""
        trainer = getattr(self, "trainer", None)
        procs: list[Any] = getattr(trainer and trainer.strategy.launcher, "procs", [])
        if any(isinstance(process, subprocess.Popen) for process in procs):
            LAUNCHED_RANKS.children.extend(procs)
            procs.clear()  # Lightning's observer of this list would kill this process once a child ends
        return LAUNCHED_RANKS.end(grace_seconds)


class _Reader(RecipeCLI):
    """Only parses; does not seed, build or run anything."""

    def _run_subcommand(self, subcommand: str = "") -> None: ...

    _set_seed = instantiate_classes = _run_subcommand


def resolved_recipe(argv: Sequence[str], verb: str) -> dict[str, Any]:
    """Resolve a recipe for ``verb``, with all classes imported but nothing built; it includes secrets.

    Raises:
        ConfigError: A key, class or value that only Lightning can reject.
    """
    return _Reader(args=[verb, *argv], auto_configure_optimizers=False)._values()


def _without_markup(format_help: Callable[[], str]) -> str:
    """Format the help without the markup of docstrings."""
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", format_help()).replace("``", "")


def _is_ours(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, (CausalLMModule, CausalLMDataModule))


def _keep_paths(parser: LightningArgumentParser, key: str) -> None:
    """Keep a path in an argument of the class at ``key``: jsonargparse would put the content of the file in its place.

    It does so for arguments that also accept a list of dataclasses or a dataclass, whether or not the path is a value.
    """
    next(action for action in parser._actions if action.dest == key).sub_add_kwargs["sub_configs"] = False  # type: ignore[attr-defined]


def _listed(value: Any) -> list[Any]:
    """Convert a Trainer argument of one or several values to a list."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value in (None, True) else [value]


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


def _arguments(path: str) -> list[str]:
    """The argument names of a class, including those passed on through ``**kwargs``."""
    cls = _imported(path)
    added = jsonargparse.ArgumentParser().add_class_arguments(cls, "it", fail_untyped=False, sub_configs=True)
    return [key.split(".")[1] for key in added]


def _is_lightnings(error: BaseException) -> bool:
    """Whether Lightning itself raised the error, neither called by the user's code nor calling other code."""
    if isinstance(error, MisconfigurationException):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    starts = [index for index, frame in enumerate(frames) if frame.name == "_call_and_handle_interrupt"]
    files = [frame.filename for frame in frames[max(starts, default=0) :]]  # a user's fit() may call the Trainer
    folder = Path(lightning.__file__).parent
    if not files or not files[-1].startswith(str(folder)):
        return False
    installed = (str(Path(__file__).parent), str(folder.parent), sysconfig.get_path("stdlib"))
    return all(file.startswith(installed) for file in files)
