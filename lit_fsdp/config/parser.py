"""One parser: jsonargparse over the dataclasses of this folder reads files and flags, without torch.

Ours on top are the nearest key, the full path on errors of a section's own rules, and the rules between sections.
:class:`lit_fsdp.cli.RecipeCLI` builds Lightning's parser from the same dataclasses and shares :func:`complete`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union

import jsonargparse
import yaml
from jsonargparse import ArgumentParser, Namespace

from lit_fsdp.config.data import DataConfig
from lit_fsdp.config.locations import expanded, shipped_file
from lit_fsdp.config.miniature import adapt_to_miniature
from lit_fsdp.config.model import LoraConfig, ModelConfig, PreferenceModelConfig
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
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.config.words import ROWS_FILES, here, section_fix, underscored
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.host import is_first_process
from lit_fsdp.redaction import HIDDEN, hidden_keys, remember

T = TypeVar("T")
OWN_CLASSES = {"model": "lit_fsdp.CausalLMModule", "data": "lit_fsdp.CausalLMDataModule"}
PREFERENCE = "lit_fsdp.PreferenceModule"
"""Our other class for ``model``; its arguments are read as the section itself."""
TRUSTED = ("lit_fsdp", "lightning", "pytorch_lightning", "torch", "torchao", "torchmetrics")
"""Packages whose classes a recipe may name without being asked."""
SECTIONS = {"checkpoint": CheckpointConfig, "resume": ResumeConfig, "samples": SamplesConfig, "slurm": SlurmConfig}
_OWN = {"model": ModelConfig, "data": DataConfig}
_ANYTHING = list | dict | bool | int | float | str | None
"""What is not looked at here; Any would import the classes that it names."""
PATHS = {
    "model": ("name", "tokenizer"),
    "data": ("train", "val", "test", "predict", "chat_template", "cache_dir"),
    "samples": ("prompts",),
    "slurm": ("container", "container_mounts", "env_file"),
}
"""By section, the keys whose text names files; under ``trainer`` any may."""
_LISTS = ("trainer.callbacks.", "trainer.logger.", "trainer.plugins.")
"""What is below are arguments of somebody's classes."""


# -- YAML


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which 12:00:00 and 2024-01-01 are text, and 1e-4 is a number."""


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, one) for tag, one in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(r"[-+]?((\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+|\d[\d_]*\.\d*|\.\d+|\.(inf|Inf|INF))$|\.nan$")
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_yaml(text: str) -> Any:
    """YAML as data."""
    values = yaml.load(text, _RecipeLoader)  # noqa: S506 (a SafeLoader)
    trainer: Any = values.get("trainer") if isinstance(values, dict) else None
    if isinstance(trainer, dict) and trainer.get("strategy") == FACTORY:
        trainer["strategy"] = {"class_path": FACTORY}
    return values


def use_loader(own_model: bool = True, change: Callable[[Any], Any] = lambda values: values) -> None:
    """Make jsonargparse read YAML with :func:`load_yaml`, and ``change`` what it has read.

    Of an ``own_model``, ``class_path`` and ``init_args`` of ``model.optim`` name the optimizer.
    """

    def load(text: str) -> Any:
        values = change(load_yaml(text))
        model = values.get("model") if own_model and isinstance(values, dict) else None
        return {**values, "model": _own_optim(model)} if isinstance(model, dict) else values

    jsonargparse.set_loader("yaml", load, exceptions=(yaml.YAMLError, ValueError))


def _arguments(path: str) -> list[str]:
    """The names of what a class of ours for ``model`` or ``data`` takes, none for another."""
    classes = {PREFERENCE: PreferenceModelConfig} | {OWN_CLASSES[name]: cls for name, cls in _OWN.items()}
    return [field.name for field in dataclasses.fields(classes[path])] if path in classes else []


def _own_optim(model: dict[str, Any]) -> dict[str, Any]:
    optim, words = model.get("optim"), {"class_path": "optimizer", "init_args": "optimizer_args"}
    return model | {"optim": {words.get(k, k): v for k, v in optim.items()}} if isinstance(optim, dict) else model


def _short(section: Any) -> tuple[str | None, Any]:
    """The class that a section names, if it does, and its arguments: beside ``class_path`` or in ``init_args``."""
    if isinstance(section, str):
        return section, {}
    if not isinstance(section, dict):
        return None, section
    path, inner = section.get("class_path", ""), section.get("init_args") or {}
    if not isinstance(path, str) or not isinstance(inner, dict):
        return None, section
    beside = {key: value for key, value in section.items() if key not in ("class_path", "init_args")}
    return path or None, beside | inner


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a recipe file as a mapping and remember its secrets, so that no message shows them.

    Raises:
        ConfigError: The file is missing (near names are given), is no YAML, or holds no mapping.
    """
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = difflib.get_close_matches(path.name, [p.name for p in folder.glob("*.y*ml")], n=3, cutoff=0.3)
        there = ", ".join(str(folder / name) for name in near) or f"no such YAML file in {folder.resolve().name}/"
        _, ships = shipped_file(str(path), ".yaml")
        allowed = f"an existing YAML file: {there}; or a name that lit-fsdp recipes ls prints"
        fix = f"write --config {ships[0]}" if ships else "check the path"
        raise ConfigError("--config", path, f"{allowed}: {', '.join(ships)}" if ships else allowed, fix)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        content = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # its text quotes the line, which may hold a secret
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", type(error).__name__)
        why = f"{why} in line {mark.line + 1}" if mark else why
        raise ConfigError("--config", f"{path}, which is no YAML ({why})", "YAML", "mend that line") from None
    require(isinstance(content, dict), "--config", f"{path} with {type(content).__name__}", "a mapping of sections")
    remember(content)
    return typing.cast(dict[str, Any], content)


# -- words


@dataclass
class CommandLine:
    """The words behind a verb, files first, without the switches that are not part of a recipe."""

    words: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    contents: list[dict[str, Any]] = field(default_factory=list)
    allow_imports: list[str] = field(default_factory=list)
    """Packages, beside :data:`TRUSTED`, whose classes the recipe may name."""
    verbose: bool = False
    debug: bool = False
    print_config: bool = False

    @property
    def classes(self) -> dict[str, str]:
        """Those of model, data and trainer.strategy for which a class is named, and the one that is named last."""
        named = [(name, _short(content.get(name))[0]) for content in self.contents for name in OWN_CLASSES]
        trainers = [content.get("trainer") for content in self.contents]
        named += [("trainer.strategy", _short(one.get("strategy"))[0]) for one in trainers if isinstance(one, dict)]
        return {str(name): path for name, path in (*named, *(found[:2] for found in self._sections())) if path}

    @property
    def foreign(self) -> dict[str, str]:
        """Of :attr:`classes` those that are not what the short form stands for."""
        return {name: path for name, path in self.classes.items() if path not in (FACTORY, OWN_CLASSES.get(name))}

    @property
    def kinds(self) -> tuple[frozenset[str], bool]:
        """Sections that are somebody else's, and whether the model is :data:`PREFERENCE`."""
        foreign = self.foreign
        is_preference = foreign.get("model") == PREFERENCE
        return frozenset(foreign.keys() - ({"model"} if is_preference else ())), is_preference

    def short_words(self, own_model: bool = True, names: Sequence[str] = tuple(OWN_CLASSES)) -> list[str]:
        """The words with the sections ``names`` as short forms, whose classes are those of :attr:`classes`."""
        found = self._sections(own_model)
        words = [word for name, _, given, short in found for word in (short if name in names else given)]
        if own_model:
            words = [re.sub(r"^--model\.optim\.class_path\b", "--model.optim.optimizer", word) for word in words]
            words = [re.sub(r"^--model\.optim\.init_args\b", "--model.optim.optimizer_args", word) for word in words]
        return words

    def in_short(
        self,
        values: Any,
        names: Iterable[str] = tuple(OWN_CLASSES),
        taken_by: Callable[[str], Iterable[str] | None] = lambda path: None,
    ) -> Any:
        """The content of a file with the sections ``names`` as short forms of the class that is named last.

        What is of another class, one that this file names or ours, and not taken by that one, is left out and said.
        ``taken_by`` gives the arguments of a class that is not ours, where they can be known.
        """
        for name in names if isinstance(values, dict) else ():
            named, args = _short(values.get(name))
            path = self.foreign.get(name, OWN_CLASSES[name])
            if isinstance(args, dict) and named != path:
                theirs = args if named else _arguments(OWN_CLASSES[name])
                taken = _arguments(path) or taken_by(path) or args
                extra = [key for key in args if key in theirs and key not in taken]
                args = {key: value for key, value in args.items() if key not in extra}
                if extra and is_first_process():
                    say_once(f"{name}: {path} takes no {', '.join(extra)}; left out")
            if isinstance(args, dict) and "dict_kwargs" in args:
                rest = {key: value for key, value in args.items() if key != "dict_kwargs"}
                args = {"class_path": path, "init_args": rest, "dict_kwargs": args["dict_kwargs"]}
            values = {**values, name: args} if name in values else values
        return values

    def _sections(self, own_model: bool = False) -> Iterator[tuple[str, str | None, list[str], list[str]]]:
        """Flag by flag: the section it is about, the class it names, its words, and those in the short form."""
        words = list(self.words)
        while words:
            given = [words.pop(0)]
            flag, equals, value = given[0].partition("=")
            found = re.fullmatch(r"--(model|data|trainer\.strategy)(?:\.(class_path|init_args))?(\..+)?", flag)
            section, form, rest = found.groups() if found else ("", None, None)
            if rest or not found:
                yield section, None, given, [f"--{section}{rest}{equals}{value}"] if form == "init_args" else given
                continue
            if not equals and words:
                given.append(words.pop(0))
            try:
                read = load_yaml(given[-1] if given[1:] else value)
            except (yaml.YAMLError, ValueError):
                read = None  # which the parser refuses
            path, args = _short({form: read} if form else read)
            args = _own_optim(args) if own_model and section == "model" and isinstance(args, dict) else args
            long = [f"--{section}.class_path={path}"] if path else []
            long += [f"--{section}.init_args={json.dumps(args)}"] if args else []
            if section == "trainer.strategy" and path in (None, FACTORY):
                given = long or given
            short = [f"--{section}={json.dumps(args)}"] if args else []
            yield section, path, given, short if path or args else given


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Split the words behind a verb; ``--config`` files come first, later ones win, and flags are last."""
    line, flags = CommandLine(allow_imports=os.environ.get("LIT_FSDP_ALLOW_IMPORTS", "").split(",")), []
    words = [underscored(word) for word in argv]
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--config", "-c", "--allow_imports"):
            require(equals or words, name, "nothing", f"{name} VALUE")
            value = value if equals else words.pop(0)
            if name == "--allow_imports":
                line.allow_imports.append(value)
                continue
            path = Path(expanded(value, name))
            path = path if path.is_file() else shipped_file(str(path), ".yaml")[0] or path
            line.files.append(path)
            line.contents.append(read_yaml(path))
        elif word in ("--verbose", "--debug", "--print_config"):
            setattr(line, word.removeprefix("--"), True)
        else:
            flags.append(word)
            if word.startswith("--"):
                remember(value if equals else words[0] if words else None, name)
    line.words = [f"--config={path}" for path in line.files] + flags
    line.allow_imports = [package for package in line.allow_imports if package]
    for section, named in line.foreign.items():
        package, _, last = named.rpartition(".")
        is_class = last[:1].isupper() or package.partition(".")[0] in (*TRUSTED, *line.allow_imports)
        if section in OWN_CLASSES and not (is_class and re.fullmatch(r"\w+(\.\w+)+", named)):
            fix = f"write {section_fix(section, named)}"
            raise ConfigError(section, named, "its keys, or the path of a class", fix)
    if line.allow_imports and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m has it
    return line


# -- the parser


def lightning_keys() -> list[str]:
    """Names of the Trainer's arguments, read from its source, as importing it takes seconds."""
    folders = importlib.util.find_spec("lightning").submodule_search_locations or [""]  # type: ignore[union-attr]
    text = Path(folders[0], "pytorch", "trainer", "trainer.py").read_text(encoding="utf-8")
    signature = text.partition("def __init__(")[2].partition(") -> None:")[0]
    return re.findall(r"^ +(\w+):", signature, re.MULTILINE)


def recipe_parser(foreign: Iterable[str] = (), is_preference: bool = False) -> ArgumentParser:
    """Build the parser of a recipe; sections in ``foreign`` may hold anything, ``model`` those of preferences."""
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
    for name, cls in (_OWN | model | SECTIONS).items():
        if name in foreign:
            parser.add_argument(f"--{name}", type=dict | _ANYTHING, default={})
        else:
            parser.add_class_arguments(cls, name)
    return parser


def parse(parser: ArgumentParser, words: Sequence[str], known: Iterable[str] = (), defaults: bool = True) -> Namespace:
    """Parse ``words``; the parser's errors become ours, with the nearest of its keys and those ``known``."""
    return _translated(parser, lambda: parser.parse_args(list(words), defaults=defaults), known)


def _translated(parser: ArgumentParser, read: Callable[[], Namespace], known: Iterable[str] = ()) -> Namespace:
    try:
        return read()
    except ConfigError:
        raise
    except (ArgumentError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise parser_error(str(error), [*(action.dest for action in parser._actions), *known]) from None


def parser_error(message: str, known: Iterable[str]) -> ConfigError:
    """Turn an error of jsonargparse into ours: what it says, the full path, and the nearest key or word."""
    dests = [dest.replace("-", "_") for dest in known if not dest.endswith("help")]
    every = {".".join(dest.split(".")[: i + 1]) for dest in dests for i in range(dest.count(".") + 1)}
    denied = re.search(r"Importing '([\w.]+)' is not allowed", message)
    keys = re.findall(r'Parser key "([^"]+)"', message) or ["recipe"]
    inner = next((one for one in keys[1:] if not one.startswith(keys[0])), None)  # of a section inside of another
    key = f"{keys[0]}.{inner}" if inner else keys[0]
    if denied:
        return not_allowed(key, denied[1])
    unknown = re.search(r"(?:unrecognized arguments: -*|Option '|Group '(\w+)' .* option ')([^\s'=]+)", message)
    if unknown:
        name = f"{unknown[1]}.{unknown[2]}" if unknown[1] else unknown[2]
        inside = re.search(r"class_path 'lit_fsdp\.config\.(\w+)\.(\w+)'", message)
        if inside:
            cls = getattr(importlib.import_module(f"lit_fsdp.config.{inside[1]}"), inside[2])
            every |= {f"{key}.{field.name}" for field in dataclasses.fields(cls)}
        full = name if key == "recipe" or name.startswith(f"{key}.") else f"{key}.{name}"
        parent = full.rpartition(".")[0]
        while parent and parent not in every:
            parent = parent.rpartition(".")[0]
        beside = sorted(one for one in every if one.rpartition(".")[0] == parent)
        wanted_key = full.removesuffix("+")
        meant = here(wanted_key)
        is_known = "model.optim" in every if meant.startswith(("model.lora.", "model.class_path")) else False
        is_known |= meant.partition(":")[0] in every and not full.startswith(_LISTS)
        near = meant if is_known else _nearest(wanted_key, beside, every)
        if parent == "model" and name.rpartition(".")[2] in {field.name for field in dataclasses.fields(LoraConfig)}:
            near = f"model.lora.{name.rpartition('.')[2]}"  # of adapters, and not known where lora is null
        fix = f"write {near}" if near else "remove it"
        if Path(name).suffix in (".yaml", ".yml"):
            fix = f"write --config {name}"
        elif f": {name}" in message and (name.endswith(ROWS_FILES) or "/" in name):  # not behind dashes
            fix = f"write {section_fix('data' if name.endswith(ROWS_FILES) else 'model', name)}"
        if full.startswith("model.preference") and "model.preference" not in every:
            fix = f"set model.class_path: {PREFERENCE}"
        names = ", ".join(one.rpartition(".")[2] for one in beside)
        if not names:  # of a class that is not ours
            return ConfigError(full, "a key that does not exist", "an argument of that class", "remove it")
        return ConfigError(full, "a key that does not exist", f"one of {names}", fix)
    whole = re.search(r"Unable to load config '(.*?)'\n|thus '?(.*?)'? is not accepted as class_path", message)
    if whole:
        names = ", ".join(one.rpartition(".")[2] for one in sorted(every) if one.rpartition(".")[0] == key)
        return ConfigError(key, whole[1] or whole[2], f"a mapping with {names}", f"write {section_fix(key)}")
    rule = re.search(r"- (\w+): got (.*)\n\s*allowed: (.*)(?:\n\s*fix: *(.*))?", message)
    if rule:  # of a section that stands for a word
        return ConfigError(f"{key}.{rule[1]}", rule[2], rule[3], rule[4] or "")
    why = r"(module .* has no attribute .*|No module named .*|does not correspond .*)"
    lost = re.search(rf"(?:class_path '|Import path )([\w.]+)(?:':\s+| ){why}", message)
    if lost:
        return ConfigError(key, f"{lost[1]} ({lost[2]})", "a class of this kind that can be imported")
    if key.startswith("trainer.logger") and "save_dir=None" in message:
        field = f"{key}.init_args.save_dir"
        return ConfigError(field, "nothing", "a folder, such as the run folder", f"add --{field} runs/my")
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    wanted = re.findall(r"Expected an? (.*?)(?:\. Got value.*)?$", message, re.MULTILINE)
    if not value or not wanted:
        return ConfigError(key, _as_yaml(" ".join(message.split())), "see lit-fsdp fit --help")
    plain = [re.sub(r"<class '([\w.]+)'>|typing\.", lambda m: m[1] or "", one) for one in wanted]
    kinds = {"NoneType": "null", "str": "text", "bool": "true | false", "float": "a number", "int": "a whole number"}
    kinds |= {"dict": "a mapping", "list": "a list", "collections.abc.Iterable": "a list"}
    shown = [
        re.sub(r"^Literal\[|\]$|'", "", one).replace(", ", " | ") if one.startswith("Literal") else kinds.get(one, one)
        for one in plain
        if "import path" not in one and not one.startswith("path but")
    ]
    is_section = re.search(r"Subtypes: \[.*lit_fsdp\.config", message)
    if is_section or "import path" in message or "valid subclass" in message:
        shown.append("a mapping" if is_section else "a class, as {class_path: NAME, init_args: {...}}")
    words = [word for one in plain if one.startswith("Literal") for word in re.findall(r"'([^']+)'", one)]
    near, allowed = _nearest(value[1].lower(), words), " | ".join(dict.fromkeys(shown))
    given, fix = _as_yaml(value[1]), f"write {key}: {near}" if near else ""
    if key == "model.lora" or ("a list" in shown and "," in given and given[:1] not in "[{"):
        fix = f"write {section_fix(key) if key == 'model.lora' else f'{key}: [{given}]'}"
    return ConfigError(key, given, allowed, fix)


def _as_yaml(text: str) -> str:
    """What jsonargparse prints of a value, without names of its own classes."""
    text = re.sub(r"NestedArg\(key='\w+', val='?(.*?)'?\)", r"\1", text)
    for _ in range(text.count("Namespace(")):  # from the inside out
        text = re.sub(r"Namespace\(([^()]*)\)", lambda found: f"{{{found[1].replace('=', ': ')}}}", text)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


def not_allowed(key: str, path: str) -> ConfigError:
    """Build the error about a class of a package that is not allowed, which has not been imported."""
    package = path.partition(".")[0]
    fix = f"add --allow-imports {package}, or set LIT_FSDP_ALLOW_IMPORTS={package}"
    return ConfigError(key, path, f"classes of {', '.join(TRUSTED)}, and of packages that are allowed", fix)


def _nearest(name: str, *groups: Iterable[str]) -> str | None:
    """The nearest by meaning, else by letters; of several groups the first that has one.

    By meaning: the same last word, or its initials, as learning_rate is meant by lr.
    """
    last = name.rpartition(".")[2]
    meant = ("".join(part[:1] for part in last.split("_")), last, *name.split("-"))
    found = [one for names in groups for one in sorted(names) if one.rpartition(".")[2] in meant]
    found += [one for names in groups for one in difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.6)]
    return found[0] if found else None


# -- typed sections


def build(cls: type[T], values: Mapping[str, Any], path: str) -> T:
    """Build the dataclass ``cls`` from a mapping as a recipe or a Python caller gives it.

    Raises:
        ConfigError: A key or value that does not exist, or a rule of ``cls``; names the path from ``path`` on.
    """
    use_loader()
    parser = _section_parser(typing.cast(Any, cls), path)
    nested = functools.reduce(lambda inner, name: {name: inner}, reversed(path.split(".")), _plain(values))
    return typed(cls, _translated(parser, lambda: parser.parse_object(nested))[path], path)


@functools.cache  # building takes longer than parsing, and a search builds a strategy for each candidate
def _section_parser(cls: type[Any], path: str) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, path)
    return parser


def typed(cls: type[T], values: Any, path: str) -> T:
    """Build the dataclass ``cls`` from a namespace that the parser has checked; its rules name the full path."""
    hints = typing.get_type_hints(cls)
    items = vars(values) if isinstance(values, Namespace) else values
    built = {name: _typed_value(hints[name], value, f"{path}.{name}") for name, value in items.items()}
    try:
        return cls(**built)
    except ConfigError as error:
        within = error.field.startswith(path) or error.field.split(".")[0] in _OWN
        name = error.field if within else f"{path}.{error.field}"
        raise ConfigError(name, error.given, error.allowed, error.fix) from None
    except TypeError:  # of a rule about a number that is null, which jsonargparse lets pass inside of a Union
        null = next((name for name, value in built.items() if value is None and hints[name] in (int, float)), None)
        require(null is None, f"{path}.{null}", "null", "a number", f"drop {null}")
        raise


def _typed_value(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, (Namespace, dict)):
        nested = next((option for option in options if dataclasses.is_dataclass(option)), None)
        return typed(nested, value, path) if nested else _plain(value)  # type: ignore[arg-type]
    if isinstance(value, list):
        items = next((typing.get_args(option)[0] for option in options if typing.get_origin(option) is list), Any)
        return [_typed_value(items, item, f"{path}[{i}]") for i, item in enumerate(value)]
    return value


def _plain(value: Any) -> Any:
    """Mappings and lists in place of namespaces and dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (Namespace, Mapping)):
        items = vars(value) if isinstance(value, Namespace) else value
        return {name: _plain(item) for name, item in items.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


# -- recipes


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe: typed sections, the values they come from, and the files."""

    run: RunConfig
    values: dict[str, Any]
    files: list[Path]


def load_recipe(argv: Sequence[str], verb: str, also: Sequence[str] = ()) -> LoadedRecipe:
    """Read ``--config`` files and ``--key value`` flags, later wins, and check every rule; torch is not imported.

    Args:
        argv: Words of the command line, without those that belong to the verb itself.
        verb: What the recipe is for; rules that concern only a training run look at it.
        also: Flags of the verb itself, to be named in the error about a flag that does not exist.
    """
    line = read_command_line(argv)
    require(not line.print_config, "--print_config", "with this verb", "fit", "lit-fsdp fit ... --print_config")
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
        trainer=_plain(given) | _plain(vars(typed(TrainerConfig, own, "trainer"))),
        verb=verb,
        foreign=foreign,
    )
    for rule in RULES:
        rule(run)
    values = _plain(parsed)
    for name, path in line.foreign.items():
        if name in OWN_CLASSES:
            values[name] = {"class_path": path, "init_args": values[name]}
    values["trainer"] = {key: value for key, value in values["trainer"].items() if value is not None}
    return LoadedRecipe(run, values, line.files)


def values_of_flags(line: CommandLine, also: Sequence[str] = ()) -> dict[str, Any]:
    """The values that the flags of a command line give, by full key, however they are written."""
    flags = dataclasses.replace(line, words=line.words[len(line.files) :])
    return dict(leaves(_plain(_parsed(flags, also, defaults=False))))


def _parsed(line: CommandLine, also: Sequence[str], defaults: bool = True) -> Namespace:
    foreign, is_preference = line.kinds
    parser = recipe_parser(foreign, is_preference)
    use_loader("model" not in foreign, line.in_short)
    return parse(parser, line.short_words("model" not in foreign), also, defaults)


def complete(
    parsed: Namespace, line: CommandLine, model: Namespace | None, data: Namespace | None, strategy: Namespace | None
) -> None:
    """Fill in, in place, what follows from other values: paths, the run folder, Lightning's words, the miniature.

    ``model``, ``data`` and ``strategy`` are the arguments of our own, None for somebody else's.

    Raises:
        ConfigError: A variable in a path is not set, a secret was not written down, or two words for precision differ.
    """
    flags = {word.removeprefix("--").partition("=")[0] for word in line.words}
    for key in (key for key in hidden_keys(_plain(parsed)) if key not in flags):
        given = f"{HIDDEN}, which stands for a secret that was not written down"
        raise ConfigError(key, given, "the value itself", f"give it again: --{key} VALUE, or one more --config file")
    ours = {"model": model, "data": data, "samples": parsed.samples, "slurm": parsed.slurm}
    for name, section in ((name, section) for name, section in ours.items() if section is not None):
        for key in PATHS[name]:
            section[key] = _expanded(section[key], f"{name}.{key}")
    for key, value in vars(parsed.trainer).items():
        setattr(parsed.trainer, key, _expanded(value, f"trainer.{key}"))
    parsed.ckpt_path = _expanded(parsed.ckpt_path, "ckpt_path")
    trainer = parsed.trainer
    if trainer.default_root_dir is None:
        trainer.default_root_dir = f"runs/{line.files[0].stem if line.files else 'run'}"
    if data is not None:
        data.val_split = data.val_split or None
        _keep_later(data, line, "val", "val_split")
        if model is not None and "preference" in model and data.format == "auto":
            data.format = "preference"
    if strategy is not None:
        strategy.precision = merged_precision(trainer.precision, strategy.precision)
        trainer.precision = None
    if model is not None and model.optim.optimizer.partition(".")[0] not in (*TRUSTED, *line.allow_imports):
        raise not_allowed("model.optim.optimizer", model.optim.optimizer)
    if model is not None and model.miniature:
        replaced = adapt_to_miniature(trainer, strategy, model, data)
        if is_first_process() and not line.print_config:
            lines = replaced if line.verbose else [f"{len(replaced)} values are replaced (--verbose lists them)"]
            say_once("\n".join(f"miniature: {text}" for text in lines))


def _keep_later(data: Namespace, line: CommandLine, *names: str) -> None:
    """Of options of ``data`` that stand for each other the one given later holds, a flag over a file."""
    given = [set(_short(content.get("data"))[1] or ()) for content in line.contents]
    given += [{word.removeprefix("--data.").partition("=")[0]} for word in line.short_words() if word[:7] == "--data."]
    last: set[str] = next((found for keys in reversed(given) if (found := keys.intersection(names))), set())
    for name in set(names) - last if len(last) == 1 and all(data[name] is not None for name in names) else ():
        data[name] = None


@functools.cache
def say_once(text: str) -> None:
    """Print to standard error what is worth saying once per process."""
    print(text, file=sys.stderr)


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line per value, with its full key, that differs between two recipes; a key that is not there is null."""
    old, new = dict(leaves(before)), dict(leaves(after))
    return [f"{key}: {old.get(key)!r} → {new.get(key)!r}" for key in {**old, **new} if old.get(key) != new.get(key)]


def leaves(values: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    """Full key and value of everything in nested mappings."""
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        yield from leaves(value, where) if isinstance(value, Mapping) and value else [(where, value)]


def _expanded(value: Any, key: str) -> Any:
    change: Callable[[Any], Any] = lambda item: _expanded(item, key)  # noqa: E731
    if isinstance(value, Namespace):
        for name, item in vars(value).items():
            setattr(value, name, change(item))
        return value
    if isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    if isinstance(value, list):
        return [change(item) for item in value]
    return expanded(value, key) if isinstance(value, str) else value
