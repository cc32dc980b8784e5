"""Command-line arguments of a verb: files first, later ones win, flags last; the classes that they name."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from lit_fsdp.config.data import DataConfig
from lit_fsdp.config.locations import expanded, shipped_file
from lit_fsdp.config.model import ModelConfig, PreferenceModelConfig
from lit_fsdp.config.run import FACTORY, STRATEGY
from lit_fsdp.config.strategy import Sharding
from lit_fsdp.config.words import section_fix, underscored
from lit_fsdp.config.yaml_files import load_yaml, merged, own_optim, read_yaml
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.host import is_first_process, say_once
from lit_fsdp.redaction import remember

OWN_CLASSES = {"model": "lit_fsdp.CausalLMModule", "data": "lit_fsdp.CausalLMDataModule"}
PREFERENCE = "lit_fsdp.PreferenceModule"
"""Our other class for ``model``; its arguments are parsed as keys of the section."""
TRUSTED = ("lit_fsdp", "lightning", "pytorch_lightning", "torch", "torchao", "torchmetrics")
"""Packages whose classes a recipe may name without ``--allow-imports``."""
_WRITES_TO_FOLDER = ("CSVLogger", "TensorBoardLogger")
"""Lightning's loggers whose ``save_dir`` has no default."""
RUN_FOLDER = "{run folder}"
"""Placeholder for the ``save_dir`` of such a logger, replaced when it is built."""
_MAPPINGS = ("config_overrides", "optim.optimizer_args", "lora.peft_args")
"""Mappings of ``model`` whose keys are those of other packages."""
_ENGINES = ("fsdp2", "fsdp1", "single")
"""Engines whose names are not also strategies of Lightning."""
OWN_SECTIONS = {"model": ModelConfig, "data": DataConfig}


@dataclass
class CommandLine:
    """The arguments after a verb, files first, without switches that are not part of a recipe."""

    words: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    contents: list[dict[str, Any]] = field(default_factory=list)
    allow_imports: list[str] = field(default_factory=list)
    """Packages, in addition to :data:`TRUSTED`, whose classes the recipe may name."""
    verbose: bool = False
    debug: bool = False
    print_config: bool = False
    dropped: list[str] = field(default_factory=list)
    """Full keys that :meth:`in_short` removes from files."""

    @property
    def classes(self) -> dict[str, str]:
        """The class named last for model, data and trainer.strategy; sections without a class are absent."""
        named = [(name, short_form(content.get(name))[0]) for content in self.contents for name in OWN_CLASSES]
        trainers = [content.get("trainer") for content in self.contents]
        named += [("trainer.strategy", short_form(one.get("strategy"))[0]) for one in trainers if isinstance(one, dict)]
        return {str(name): path for name, path in (*named, *(found[:2] for found in self._sections())) if path}

    @property
    def foreign(self) -> dict[str, str]:
        """The entries of :attr:`classes` that differ from the default class of the section."""
        return {name: path for name, path in self.classes.items() if path not in (FACTORY, OWN_CLASSES.get(name))}

    @property
    def kinds(self) -> tuple[frozenset[str], bool]:
        """Sections with foreign classes, and whether the model is :data:`PREFERENCE`."""
        foreign = self.foreign
        is_preference = foreign.get("model") == PREFERENCE
        return frozenset(foreign.keys() - ({"model"} if is_preference else ())), is_preference

    def short_words(self, own_model: bool = True, names: Sequence[str] = tuple(OWN_CLASSES)) -> list[str]:
        """The words with the sections ``names`` in short form, for the classes in :attr:`classes`."""
        found = self._sections(own_model)
        words = [word for name, _, given, short in found for word in (short if name in names else given)]
        words = self._with_save_dirs(words)
        if own_model:
            words = _by_key(words, "--model.optim")
            words = [re.sub(r"^--model\.optim\.class_path\b", "--model.optim.optimizer", word) for word in words]
            words = [re.sub(r"^--model\.optim\.init_args\b", "--model.optim.optimizer_args", word) for word in words]
            words = self._with_whole_mappings(words)
        return words

    def in_short(
        self,
        values: Any,
        names: Iterable[str] = tuple(OWN_CLASSES),
        taken_by: Callable[[str], Iterable[str] | None] = lambda path: None,
    ) -> Any:
        """Convert the sections ``names`` of a file's content to the short form of the class named last.

        Drops and logs arguments of another class (named in this file, or ours) that this class does not accept. Drops a
        strategy of Lightning that ours replaces. The function ``taken_by`` returns the arguments of a foreign class, or
        None if they are unknown.
        """
        for name in names if isinstance(values, dict) else ():
            named, args = short_form(values.get(name))
            path = self.foreign.get(name, OWN_CLASSES[name])
            if isinstance(args, dict) and named != path:
                theirs = args if named else _arguments(OWN_CLASSES[name])
                taken = _arguments(path) or taken_by(path) or args
                extra = [key for key in args if key in theirs and key not in taken]
                args = {key: value for key, value in args.items() if key not in extra}
                if extra and is_first_process():
                    say_once(f"{name}: {path} does not accept {', '.join(extra)}; ignored")
            if isinstance(args, dict) and "dict_kwargs" in args:
                rest = {key: value for key, value in args.items() if key != "dict_kwargs"}
                args = {"class_path": path, "init_args": rest, "dict_kwargs": args["dict_kwargs"]}
            values = {**values, name: args} if name in values else values
        trainer = values.get("trainer") if isinstance(values, dict) else None
        if isinstance(trainer, dict) and "logger" in trainer:
            trainer = {**trainer, "logger": self._with_save_dir(trainer["logger"])}
        if isinstance(trainer, dict) and "trainer.strategy" not in self.foreign:
            is_ours = short_form(trainer.get("strategy"))[0] in (None, FACTORY)  # else replaced by a later one
            trainer = trainer if is_ours else _without(trainer, ["strategy"])
        values = {**values, "trainer": trainer} if isinstance(trainer, dict) else values
        for key in self.dropped:
            values = _without(values, key.split("."))
        return values

    def drop(self, key: str) -> None:
        """Remove a key from the flags, with its values, and from what :meth:`in_short` returns."""
        kept, is_gone = list[str](), False
        for word in self.words:
            is_gone = word.partition("=")[0] == f"--{key}" if word.startswith("--") else is_gone
            kept += [] if is_gone or word == key else [word]
        self.words, self.dropped = kept, [*self.dropped, key]

    @property
    def _saving(self) -> set[str]:
        """Names of the logger classes whose ``save_dir`` a file gives."""
        trainers = [content.get("trainer") for content in self.contents]
        given = [trainer.get("logger") for trainer in trainers if isinstance(trainer, dict)]
        loggers = [logger for one in given for logger in (one if isinstance(one, list) else [one])]
        has = [one for one in loggers if isinstance(one, dict) and "save_dir" in (one.get("init_args") or {})]
        return {_class_name(logger) for logger in has}

    def _with_save_dir(self, given: Any) -> Any:
        """Let loggers in a ``trainer.logger`` value write to the run folder, unless a ``save_dir`` is given."""
        if isinstance(given, list):
            return [self._with_save_dir(logger) for logger in given]
        logger = {"class_path": given} if isinstance(given, str) else given
        name, args = _class_name(logger), (logger.get("init_args") or {}) if isinstance(logger, dict) else None
        if name not in _WRITES_TO_FOLDER or name in self._saving or not isinstance(args, dict):
            return given
        return {**logger, "init_args": {"save_dir": RUN_FOLDER, **args}}

    def _with_save_dirs(self, words: Sequence[str]) -> list[str]:
        """Let loggers in ``words`` write to the run folder, unless a ``save_dir`` is given."""
        found = list[str]()
        for flag, value, given in each_flag(words):
            is_logger = flag.removesuffix("+") in ("--trainer.logger", "--trainer.logger.class_path")
            named = _value_of(value) if is_logger else None
            logger = self._with_save_dir(named)
            if logger == named:
                found += given
            elif flag.endswith("class_path"):
                found += [*given, f"--trainer.logger.init_args.save_dir={RUN_FOLDER}"]
            else:
                found.append(f"{flag}={json.dumps(logger)}")
        return found

    def model_sections(self) -> list[dict[str, Any]]:
        """The values that each file, and then each flag, gives for ``model``, in short form."""
        given: list[Any] = [content.get("model") for content in self.contents]
        for flag, value, _ in each_flag(self.words):
            if flag == "--model" or flag.startswith("--model."):
                given.append(_below(flag.split(".")[1:], _value_of(value)))
        sections = [short_form(one)[1] for one in given]
        return [one for one in sections if isinstance(one, dict)]

    def _with_whole_mappings(self, words: Sequence[str]) -> list[str]:
        """Replace a flag below a mapping of :data:`_MAPPINGS` by one with the whole mapping.

        The flag ``--mapping.key.inner VALUE`` makes jsonargparse 4.53 drop the other keys of ``mapping.key``
        (``findings/a-flag-below-a-mapping-drops-the-keys-beside-it.sh``). Delete this when the minimum version has
        jsonargparse#388 fixed.
        """
        mappings: dict[str, Any] = {}
        for content in self.contents:
            mappings |= _given_mappings(short_form(content.get("model"))[1])
        found = list[str]()
        for flag, text, given in each_flag(words):
            if text is None or not (flag == "--model" or flag.startswith("--model.")):
                found += given
                continue
            read, keys = _value_of(text), flag.split(".")[1:]
            name = next((name for name in _MAPPINGS if f"{flag}.".startswith(f"--model.{name}.")), "")
            inner = keys[name.count(".") + 1 :]
            if name and inner:
                read = text if read is None and text not in ("null", "~") else read  # not YAML
                mappings[name] = _updated(mappings.get(name) or {}, _below(inner, read))
                given = [f"--model.{name}={json.dumps(mappings[name], ensure_ascii=False)}"]
            elif keys[:1] == ["lora"] and len(keys) == 2 and text == "null":  # else jsonargparse 4.53 reads "None"
                given = [f"--model.lora={json.dumps({keys[1]: None})}"]
            else:
                mappings |= _given_mappings(_below(keys, read))
            found += given
        return found

    def _sections(self, own_model: bool = False) -> Iterator[tuple[str, str | None, list[str], list[str]]]:
        """Yield for each flag its section, the class it names, its words, and its words in short form."""
        for flag, value, given in each_flag(self.words):
            found = re.fullmatch(r"--(model|data|trainer\.strategy)(?:\.(class_path|init_args))?(\..+)?", flag)
            section, form, rest = found.groups() if found else ("", None, None)
            if rest or not found:
                is_long = form == "init_args"
                yield section, None, given, [given[0].replace(".init_args", "", 1), *given[1:]] if is_long else given
                continue
            read = _value_of(value)
            path, args = short_form({form: read} if form else read)
            args = own_optim(args) if own_model and section == "model" and isinstance(args, dict) else args
            long = [f"--{section}.class_path={path}"] if path else []
            long += [f"--{section}.init_args={json.dumps(args)}"] if args else []
            if section == "trainer.strategy" and path in (None, FACTORY):
                given = long or given
            short = [f"--{section}={json.dumps(args)}"] if args else []
            yield section, path, given, short if path or args else given


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Split the arguments after a verb; files of ``--config`` come first, later ones win, and flags come last."""
    line, flags = CommandLine(allow_imports=os.environ.get("LIT_FSDP_ALLOW_IMPORTS", "").split(",")), []
    words = _by_key([underscored(word) for word in argv], "--trainer")
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--config", "-c", "--allow_imports"):
            require(equals or words, name, "nothing", f"{name} VALUE")
            value = value if equals else words.pop(0)
            if name == "--allow_imports":
                line.allow_imports.append(value)
                more = words[0] if words and words[0].isidentifier() else ""
                fix = f"write --allow-imports {value} --allow-imports {more}"
                require(not more, "--allow-imports", f"{value} {more}", "one package each time", fix)
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
            raise ConfigError(section, named, "keys of the section, or the import path of a class", fix)
        key = "sharding" if named.lower() in get_args(Sharding) else "engine" if named.lower() in _ENGINES else None
        fix = f"write --{STRATEGY}.{key} {named.lower()}"
        require(key is None, section, named, "a class, or a name that Lightning knows, such as ddp", fix)
    if line.allow_imports and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as python -m does
    return line


def each_flag(words: Sequence[str]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Yield each flag, its value (after ``=``, or the next word; None if it has none), and the words of both.

    A word that belongs to no flag has the flag ``""`` and no value. A switch has the word after it as its value.
    """
    rest = list(words)
    while rest:
        given = [rest.pop(0)]
        flag, equals, value = given[0].partition("=")
        if not flag.startswith("--"):
            yield "", None, given
            continue
        if not equals and rest and not rest[0].startswith("--"):
            given.append(rest.pop(0))
        yield flag, given[1] if given[1:] else value if equals else None, given


def _arguments(path: str) -> list[str]:
    """Argument names of our classes for ``model`` or ``data``; empty for other classes."""
    classes = {PREFERENCE: PreferenceModelConfig} | {OWN_CLASSES[name]: cls for name, cls in OWN_SECTIONS.items()}
    return [field.name for field in dataclasses.fields(classes[path])] if path in classes else []


def short_form(section: Any) -> tuple[str | None, Any]:
    """The class that a section names, or None, and its arguments, next to ``class_path`` or in ``init_args``."""
    if isinstance(section, str):
        return section, {}
    if not isinstance(section, dict):
        return None, section
    path, inner = section.get("class_path", ""), section.get("init_args") or {}
    if not isinstance(path, str) or not isinstance(inner, dict):
        return None, section
    beside = {key: value for key, value in section.items() if key not in ("class_path", "init_args")}
    return path or None, merged(beside, inner, "init_args")


def _without(values: Any, parts: Sequence[str]) -> Any:
    """Return a mapping, or those in a list, without the key at this path."""
    if isinstance(values, list):
        return [_without(one, parts) for one in values]
    if not isinstance(values, dict):
        return values
    first, *rest = parts
    kept = {key: value for key, value in values.items() if key != ".".join(parts) and (key != first or rest)}
    return {key: _without(value, rest) if key == first else value for key, value in kept.items()}


def _by_key(words: Sequence[str], flag: str) -> list[str]:
    """Replace ``flag`` with a mapping by flags for its keys."""
    found = list[str]()
    for name, value, given in each_flag(words):
        read = _value_of(value) if name == flag else None
        if not isinstance(read, dict):
            found += given
            continue
        texts = {key: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for key, one in read.items()}
        found += [f"{flag}.{key}={text}" for key, text in texts.items()]
    return found


def _below(keys: Sequence[str], value: Any) -> Any:
    """Put a value below nested keys."""
    for key in reversed(keys):
        value = {key: value}
    return value


def _given_mappings(section: Any) -> dict[str, Any]:
    """The :data:`_MAPPINGS` that a ``model`` section sets, also to null."""
    found = {}
    section = own_optim(section) if isinstance(section, dict) else {}
    for name in _MAPPINGS:
        parent, _, key = name.rpartition(".")
        inner = section.get(parent) if parent else section
        if isinstance(inner, dict) and key in inner:
            found[name] = inner[key]
    return found


def _updated(values: Any, change: Any) -> Any:
    """Change values of a mapping of any depth; unlike :func:`merged`, later values replace earlier ones."""
    if not isinstance(values, dict) or not isinstance(change, dict):
        return change
    return values | {key: _updated(values.get(key), value) for key, value in change.items()}


def _class_name(logger: Any) -> str:
    """The name of one of Lightning's loggers in a ``trainer.logger`` value; empty for other classes."""
    path = str(logger.get("class_path")) if isinstance(logger, dict) else ""
    package, _, name = path.rpartition(".")
    return name if package.partition(".")[0] in ("", "lightning", "pytorch_lightning") else ""


def _value_of(text: str | None) -> Any:
    """The value of a flag; None if it has none or one that is not YAML."""
    try:
        return load_yaml(text or "")
    except (yaml.YAMLError, ValueError):
        return None
