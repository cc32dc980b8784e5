"""The recipe parser: jsonargparse reads files and flags into the dataclasses of this folder, without torch.

:class:`lit_fsdp.cli.RecipeCLI` builds Lightning's parser from the same dataclasses and shares :func:`complete`.
"""

import dataclasses
import functools
import importlib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lit_fsdp.config.command_line import (
    OWN_CLASSES,
    OWN_SECTIONS,
    TRUSTED,
    CommandLine,
    read_command_line,
)
from lit_fsdp.config.data import DataConfig
from lit_fsdp.config.locations import expand_paths
from lit_fsdp.config.miniature import adapt_to_miniature
from lit_fsdp.config.model import ModelConfig, PreferenceModelConfig
from lit_fsdp.config.parser_errors import not_allowed, translated
from lit_fsdp.config.precedence import check_words, keep_later, keep_later_rate
from lit_fsdp.config.run import (
    FACTORY,
    RULES,
    STRATEGY,
    CheckpointConfig,
    ResumeConfig,
    RunConfig,
    SamplesConfig,
    TrainerConfig,
    merged_precision,
)
from lit_fsdp.config.sections import leaves, plain, typed
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.config.words import UNKNOWN_KEY, optimizer_path
from lit_fsdp.config.yaml_files import use_loader
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.host import is_first_process, say_once
from lit_fsdp.redaction import HIDDEN, hidden_keys

SECTIONS = {"checkpoint": CheckpointConfig, "resume": ResumeConfig, "samples": SamplesConfig, "slurm": SlurmConfig}
_ANYTHING = list | dict | bool | int | float | str | None
"""Type of values that are not checked here; the type ``Any`` would import the classes that they name."""


def lightning_keys() -> list[str]:
    """Names of the Trainer's arguments, read from its source, as importing it takes seconds."""
    folders = importlib.util.find_spec("lightning").submodule_search_locations or [""]  # type: ignore[union-attr]
    text = Path(folders[0], "pytorch", "trainer", "trainer.py").read_text(encoding="utf-8")
    signature = text.partition("def __init__(")[2].partition(") -> None:")[0]
    return re.findall(r"^ +(\w+):", signature, re.MULTILINE)


def recipe_parser(foreign: Iterable[str] = (), is_preference: bool = False) -> ArgumentParser:
    """Build the recipe parser; sections in ``foreign`` accept anything, ``model`` may be that of preferences."""
    use_loader("model" not in foreign)
    return _recipe_parser(frozenset(foreign), is_preference)


@functools.cache  # building takes as long as parsing, and some verbs read a recipe twice
def _recipe_parser(foreign: frozenset[str], is_preference: bool) -> ArgumentParser:
    parser = ArgumentParser(prog="lit-fsdp", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_argument("--seed_everything", type=int | bool | None, default=0)
    parser.add_argument("--ckpt_path", type=str | None)
    parser.add_class_arguments(TrainerConfig, "trainer")
    own = {f.name for f in dataclasses.fields(TrainerConfig)}
    for key in lightning_keys():
        if key in ("callbacks", "logger", "plugins"):
            parser.add_argument(f"--trainer.{key}", type=dict | list[dict | str] | _ANYTHING)
        elif key not in own and key != "strategy":
            parser.add_argument(f"--trainer.{key}", type=_ANYTHING)
    if "trainer.strategy" in foreign:
        parser.add_argument("--trainer.strategy", type=_ANYTHING)
    else:
        parser.add_argument("--trainer.strategy.class_path", type=str, default=FACTORY)
        parser.add_class_arguments(StrategyConfig, STRATEGY)
    model = {"model": PreferenceModelConfig} if is_preference else {}
    for name, cls in (OWN_SECTIONS | model | SECTIONS).items():
        if name in foreign:
            parser.add_argument(f"--{name}", type=dict | _ANYTHING, default={})
        else:
            parser.add_class_arguments(cls, name)
    return parser


def parse(parser: ArgumentParser, words: Sequence[str], known: Iterable[str] = (), defaults: bool = True) -> Namespace:
    """Parse ``words``; convert parser errors to ours, with the nearest of the parser's keys and ``known``."""
    return translated(parser, lambda: parser.parse_args(list(words), defaults=defaults), known)


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe: typed sections, the values they come from, and the files."""

    run: RunConfig
    values: dict[str, Any]
    files: list[Path]


def load_recipe(argv: Sequence[str], verb: str, also: Sequence[str] = ()) -> LoadedRecipe:
    """Read ``--config`` files and ``--key value`` flags (later ones win) and check every rule, without torch.

    Args:
        argv: Command-line arguments without the verb's own flags.
        verb: The verb that uses the recipe; some rules apply only to training.
        also: The verb's own flags, for suggestions in the error about an unknown flag.
    """
    line = read_command_line(argv)
    verbs = "fit | validate | test | predict"
    require(not line.print_config, "--print_config", f"with {verb}", verbs, "write lit-fsdp fit ... --print_config")
    parsed, foreign, is_preference = _parsed(line, also), *line.kinds
    parsed.pop("config", None)
    model, data = (None if name in foreign else parsed[name] for name in OWN_CLASSES)
    strategy = None if "trainer.strategy" in foreign else parsed[STRATEGY]
    complete(parsed, line, model, data, strategy)
    given = {key: value for key, value in vars(parsed.trainer).items() if key != "strategy"}
    own = {f.name: given[f.name] for f in dataclasses.fields(TrainerConfig)}
    run = RunConfig(
        strategy=typed(StrategyConfig, strategy or {}, STRATEGY),
        model=typed(PreferenceModelConfig if is_preference else ModelConfig, model or {}, "model"),
        data=typed(DataConfig, data or {}, "data"),
        **{name: typed(cls, parsed[name], name) for name, cls in SECTIONS.items()},
        trainer=plain(given) | plain(vars(typed(TrainerConfig, own, "trainer"))),
        verb=verb,
        foreign=foreign,
    )
    for rule in RULES:
        rule(run)
    values = plain(parsed)
    for name, path in line.foreign.items():
        if name in OWN_CLASSES:
            values[name] = {"class_path": path, "init_args": values[name]}
    values["trainer"] = {key: value for key, value in values["trainer"].items() if value is not None}
    return LoadedRecipe(run, values, line.files)


def recipe_keys() -> set[str]:
    """The keys of a recipe with our own classes."""
    return {action.dest for action in _recipe_parser(frozenset(), False)._actions}


def check_keys(argv: Sequence[str]) -> None:
    """Reject keys that do not exist, and values of a wrong type, without the rules between them."""
    _parsed(read_command_line(argv), ())


def values_of_flags(line: CommandLine, also: Sequence[str]) -> dict[str, Any]:
    """The values that the flags of a command line set, by full key, in short or long form."""
    flags = dataclasses.replace(line, words=line.words[len(line.files) :])
    try:
        return dict(leaves(plain(_parsed(flags, also, defaults=False))))
    except ConfigError:
        _parsed(line, also)  # its error has the unknown keys of files, too
        raise


def _parsed(line: CommandLine, also: Sequence[str], defaults: bool = True) -> Namespace:
    """Parse a command line; the error about a key that does not exist has those about further ones in ``others``."""
    foreign, is_preference = line.kinds
    parser, line, unknown = recipe_parser(foreign, is_preference), dataclasses.replace(line), list[ConfigError]()
    while True:
        use_loader("model" not in foreign, line.in_short)
        try:
            parsed = parse(parser, line.short_words("model" not in foreign), also, defaults)
        except ConfigError as error:
            if error.given == UNKNOWN_KEY and error.field not in line.dropped:
                unknown.append(error)
                line.drop(error.field)
                continue
            if not unknown:
                raise
        if unknown:
            unknown[0].others = unknown[1:]
            raise unknown[0]
        return parsed


def complete(
    parsed: Namespace, line: CommandLine, model: Namespace | None, data: Namespace | None, strategy: Namespace | None
) -> None:
    """Fill in derived values in place: paths, the run folder, precision, the miniature.

    The namespaces ``model``, ``data`` and ``strategy`` are the arguments of our classes, None for foreign classes.

    Raises:
        ConfigError: A variable in a path is not set, a secret was not saved, or two precision settings differ.
    """
    flags = {word.removeprefix("--").partition("=")[0] for word in line.words}
    for key in (key for key in hidden_keys(plain(parsed)) if key not in flags):
        given = f"{HIDDEN}, a placeholder for a secret that was not saved"
        raise ConfigError(key, given, "the actual value", f"pass it again: --{key} VALUE, or another --config file")
    expand_paths(parsed, {"model": model, "data": data, "samples": parsed.samples, "slurm": parsed.slurm})
    trainer = parsed.trainer
    if trainer.default_root_dir is None:
        trainer.default_root_dir = f"runs/{line.files[0].stem if line.files else 'run'}"
    if data is not None:
        data.val_split = data.val_split or None
        keep_later(data, line, "val", "val_split")
        if model is not None and "preference" in model and data.format == "auto":
            data.format = "preference"
    if strategy is not None:
        check_words(line)
        strategy.precision = merged_precision(trainer.precision, strategy.precision)
        trainer.precision = None
    if model is not None:
        name, field = model.optim.optimizer, "model.optim.optimizer"
        path = optimizer_path(name)
        fix = f"write {field}: {path}" if path else "write its path, such as torch.optim.AdamW"
        require("." in name, field, name, "the path of a class", fix)
        if name.partition(".")[0] not in (*TRUSTED, *line.allow_imports):
            raise not_allowed(field, name)
        for rate in ("lr", "weight_decay"):
            keep_later_rate(model.optim, line, rate)
    if model is not None and model.miniature:
        replaced = adapt_to_miniature(trainer, strategy, model, data)
        if replaced and is_first_process() and not line.print_config:
            lines = replaced if line.verbose else [f"values replaced: {len(replaced)} (--verbose lists them)"]
            say_once("\n".join(f"miniature: {text}" for text in lines))
