"""Convert errors of jsonargparse to ours: full path, given value, allowed values, nearest key."""

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Callable, Iterable
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lit_fsdp.config.command_line import PREFERENCE, TRUSTED
from lit_fsdp.config.locations import shipped_file
from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.words import (
    ELSEWHERE,
    MEANINGS,
    NOT_A_FLAG,
    OTHER_SCHEDULES,
    ROWS_FILES,
    TYPO,
    UNKNOWN_KEY,
    fix_of_typo,
    here,
    logger_meant,
    section_fix,
)
from lit_fsdp.errors import ConfigError

_LISTS = ("trainer.callbacks.", "trainer.logger.", "trainer.plugins.")
"""Keys below these prefixes are arguments of foreign classes."""


def translated(parser: ArgumentParser, read: Callable[[], Namespace], known: Iterable[str] = ()) -> Namespace:
    """Call ``read``; convert parser errors to ConfigError, with the nearest of the parser's keys and ``known``."""
    try:
        return read()
    except ConfigError:
        raise
    except (ArgumentError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise parser_error(str(error), [*(action.dest for action in parser._actions), *known]) from None


def parser_error(message: str, known: Iterable[str]) -> ConfigError:
    """Convert an error message of jsonargparse to ours, with the full path and the nearest key or value."""
    dests = [dest.replace("-", "_") for dest in known if not dest.endswith("help")]
    every = {".".join(dest.split(".")[: i + 1]) for dest in dests for i in range(dest.count(".") + 1)}
    lone = re.search(r"argument --([\w.]+)(?:/--[\w.]+\+)?: expected one argument", message)
    if lone:
        has_keys = any(dest.startswith(f"{lone[1]}.") for dest in dests)
        fix = section_fix(lone[1]) if has_keys else f"--{lone[1]} VALUE"
        return ConfigError(lone[1], "no value", "a value", f"write {fix}")
    denied = re.search(r"Importing '([\w.]+)' is not allowed", message)
    keys = re.findall(r'Parser key "([^"]+)"', message) or ["recipe"]
    inner = next((one for one in keys[1:] if not one.startswith(keys[0])), None)  # of a nested section
    key = f"{keys[0]}.{inner}" if inner else keys[0]
    if denied and denied[1].endswith((".yaml", ".yml", ".json")):
        fix = f"write its keys below {key} in a file given with --config"
        return ConfigError(key, denied[1], "its keys and values, not a file", fix)
    if denied:
        return not_allowed(key, denied[1])
    unknown = re.search(r"(?:unrecognized arguments: -*|Option '|Group '(\w+)' .* option ')([^\s'=]+)", message)
    if unknown and unknown[2] != inner:  # else a value of that argument is wrong
        return _unknown_key(f"{unknown[1]}.{unknown[2]}" if unknown[1] else unknown[2], key, message, every)
    whole = re.search(r"Unable to load config '(.*?)'\n|thus '?(.*?)'? is not accepted as class_path", message)
    if whole:
        names = ", ".join(one.rpartition(".")[2] for one in sorted(every) if one.rpartition(".")[0] == key)
        return ConfigError(key, whole[1] or whole[2], f"a mapping with {names}", f"write {section_fix(key)}")
    rule = re.search(r"- (\w+): got (.*)\n\s*allowed: (.*)(?:\n\s*fix: *(.*))?", message)
    if rule:  # of a section that also accepts a single word
        return ConfigError(f"{key}.{rule[1]}", rule[2], rule[3], rule[4] or "")
    why = r"(module .* has no attribute .*|No module named .*|does not correspond .*)"
    lost = re.search(rf"(?:class_path '|Import path )([\w.]+)(?:':\s+| ){why}", message)
    if lost:
        module, _, name = lost[1].rpartition(".")
        likely = _nearest(name, [one for one in dir(sys.modules.get(module)) if one[:1].isupper()], least=0.6)
        fix = f"write {module}.{likely}" if likely and likely != name else ""
        return ConfigError(key, f"{lost[1]} ({lost[2]})", "an importable class of this type", fix)
    if key.startswith("trainer.logger") and "save_dir=None" in message:
        return ConfigError(f"{key}.save_dir", "no value", "a folder", f"add --{key}.save_dir FOLDER")
    if inner and (name := re.search(r"Expected a dot import path string: (\S+)", message)):
        fix = f"write {inner}: MODULE.NAME, and add --allow-imports MODULE"
        return ConfigError(key, name[1], "the import path of a function or class", fix)
    if lacks := re.search(r"given class_path '([\w.]+)':\s+the following arguments are required: ([\w, ]+)", message):
        name = lacks[2].partition(",")[0]
        fix = f"add --{key}.{name} VALUE, or {name} in its init_args"
        return ConfigError(key, f"{lacks[1]} without {lacks[2]}", "its arguments without a default", fix)
    return _wrong_value(key, message)


def _unknown_key(name: str, key: str, message: str, every: set[str]) -> ConfigError:
    """The error about the key ``name``, within ``key`` or of its class, with the nearest of the keys that exist."""
    inside = re.search(r"class_path 'lit_fsdp\.config\.(\w+)\.(\w+)'", message)
    if inside:
        cls = getattr(importlib.import_module(f"lit_fsdp.config.{inside[1]}"), inside[2])
        every = every | {f"{key}.{field.name}" for field in dataclasses.fields(cls)}
    full = name if key == "recipe" or name.startswith(f"{key}.") else f"{key}.{name}"
    if full in every and "unrecognized arguments: " in message:
        return ConfigError(full, NOT_A_FLAG, "a flag and its value", f"write --{full} VALUE")
    parent = full.rpartition(".")[0]
    while parent and parent not in every:
        parent = parent.rpartition(".")[0]
    beside = sorted(one for one in every if one.rpartition(".")[0] == parent)
    if not beside:
        return _unknown_argument(full, message)
    wanted_key = full.removesuffix("+")
    meant = here(wanted_key)
    is_known = "model.optim" in every if meant.startswith(("model.lora.", "model.class_path")) else False
    is_known |= meant.partition(":")[0] in every and not full.startswith(_LISTS)
    near = meant if is_known else _nearest(wanted_key, beside, every)
    near = {"model": "model.name", "data": "data.train"}.get(near or "", near)
    if parent == "model" and name.rpartition(".")[2] in {field.name for field in dataclasses.fields(LoraConfig)}:
        near = f"model.lora.{name.rpartition('.')[2]}"  # unknown to the parser if lora is null
    if parent == "model" and f"model.optim.{name.rpartition('.')[2]}" in every:
        near = f"model.optim.{name.rpartition('.')[2]}"
    typo = "" if near or full.startswith(_LISTS) else fix_of_typo(wanted_key)
    if "write model." in typo and "model.name" not in every:  # of somebody else's module
        is_built = full.partition(".")[0] in ("optimizer", "lr_scheduler")  # by LightningCLI
        typo = "set it in configure_optimizers of the module, or in a script with RecipeCLI(...)" if is_built else ""
    fix = f"write {near}" if near else typo or "remove it"
    fix = ELSEWHERE.get(wanted_key.rpartition(".")[2].replace("-", "_"), fix) if not is_known else fix
    fix = OTHER_SCHEDULES if full.startswith("lr_scheduler.") else fix  # as LightningCLI names it
    is_word = f": {name}" in message  # not a flag
    ships, alike = shipped_file(name, ".yaml") if is_word else (None, [])
    alike = [one for one in alike if one.lower().startswith(name.lower())]
    if Path(name).suffix in (".yaml", ".yml") or ships or alike:
        fix = f"write --config {name if ships or not alike or Path(name).is_file() else alike[0]}"
    elif is_word and (name.endswith(ROWS_FILES) or "/" in name):
        fix = f"write {section_fix('data' if name.endswith(ROWS_FILES) else 'model', name)}"
    if full.startswith("model.preference") and "model.preference" not in every:
        fix = f"set model.class_path: {PREFERENCE}"
    plural = f"{wanted_key}s"
    if plural in beside and "." not in plural and not any(one.startswith(f"{plural}.") for one in every):
        fix = f"write --{plural} NUMBER"  # a flag of the verb, such as --ranks
    names = ", ".join(one.rpartition(".")[2] for one in beside)
    return ConfigError(full, UNKNOWN_KEY, f"one of {names}", fix)


def _unknown_argument(full: str, message: str) -> ConfigError:
    """The error about the key ``full``, an argument of a foreign class."""
    owner = re.search(r"given class_path '([\w.]+)\.(\w+)'", message)
    if not owner:
        return ConfigError(full, UNKNOWN_KEY, "an argument of that class", "remove it")
    cls = getattr(importlib.import_module(owner[1]), owner[2])
    known = [one for one in inspect.signature(cls).parameters if one not in ("args", "kwargs")]
    near = _nearest(full.rpartition(".")[2], known, least=0.6)
    fix = f"write {full.rpartition('.')[0]}.{near}" if near else "remove it"
    return ConfigError(full, UNKNOWN_KEY, f"an argument of {owner[2]}: {', '.join(known)}", fix)


def _wrong_value(key: str, message: str) -> ConfigError:
    """The error about a value of a wrong type, or of none of the words, with the likely value."""
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    wanted = re.findall(r"Expected (?:an? )?(.*?)(?:\. Got value.*)?$", message, re.MULTILINE)
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
    mixed = f"{value[1].lower().removeprefix('fp')}-mixed"  # as bf16 and fp16 mean in other trainers
    same = MEANINGS.get(key, {}).get(value[1].lower())
    close = same or (mixed if mixed in words else _nearest(value[1].lower(), words, least=0.6))
    allowed = " | ".join(dict.fromkeys(shown))
    given, fix = _as_yaml(value[1]), f"write {key}: {close}" if close else ""
    if key == "model.optim.schedule" and not close and re.search(r"[A-Z]|\.[a-z]", given):  # a class
        fix = OTHER_SCHEDULES
    if given == "null" and "null" in shown and key != "data.columns":  # text
        given, fix = "None", f"write {key}: null"
    elif "a whole number" in shown and given.strip("'").isdecimal():
        given, fix = f"the text '{given}'", f"write {key}: {given}"
    is_item = given[:1] == "{" or ("," in given and given[:1] != "[") or ({*shown} <= {"a list", "null"} and not close)
    if key == "trainer.logger" and (meant := logger_meant(given)):
        fix = f"write {meant}"
    lines = _lines_of(message)
    if "a list" in shown and len(lines) > 1:
        fix = f"write {key}: [{', '.join(lines)}]"
    elif key == "model.lora" and given.strip("'").isdecimal():
        fix = f"write model.lora.r: {given}"
    elif key == "model.lora" or ("a list" in shown and is_item):
        fix = f"write {section_fix(key) if key == 'model.lora' else f'{key}: [{given}]'}"
    elif key == "data.columns" and given == "null":  # YAML reads {prompt:question} as a key without a value
        fix = "put a space after each colon: {KEY: COLUMN}"
    elif key == "data.columns" and ":" not in given:
        fix = "write data.columns: {prompt: COLUMN, completion: COLUMN}"
    elif "a mapping" in shown and (pair := re.fullmatch(r"(\w+):(\S+)", given)):
        fix = f"write {key}: {{{pair[1]}: {pair[2]}}}"
    return ConfigError(key, given, allowed, fix)


def _lines_of(message: str) -> list[str]:
    """The lines of a text that is given in place of another value."""
    found = re.search(r"Given value type: <class 'str'>\s+Given value: (.*)\Z", message, re.DOTALL)
    return [line.strip() for line in found[1].splitlines() if line.strip()] if found else []


def _as_yaml(text: str) -> str:
    """Format a value that jsonargparse prints as YAML, without the names of its classes."""
    text = re.sub(r"NestedArg\(key='\w+', val='?(.*?)'?\)", r"\1", text)
    for _ in range(text.count("Namespace(")):  # innermost first
        text = re.sub(r"Namespace\(([^()]*)\)", lambda found: f"{{{found[1].replace('=', ': ')}}}", text)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


def not_allowed(key: str, path: str) -> ConfigError:
    """Build the error for a class of a package that is not allowed, and thus not imported."""
    package = path.partition(".")[0]
    fix = f"add --allow-imports {package}, or set LIT_FSDP_ALLOW_IMPORTS={package}"
    return ConfigError(key, path, f"classes of {', '.join(TRUSTED)}, and of allowed packages", fix)


def _nearest(name: str, *groups: Iterable[str], least: float = TYPO) -> str | None:
    """The key whose last part is the same, else the nearest by spelling; earlier groups take precedence.

    Only a typo is near: other keys with similar words, such as ``print_config`` for ``fsdp_config``, mean other things.
    """
    last, words = name.rpartition(".")[2], name.replace(".", "_").replace("-", "_")
    ends = last not in ("name", "path", "type")  # keys of several sections

    def likeness(one: str) -> tuple[float, float]:
        end = one.rpartition(".")[2]
        whole, part = (difflib.SequenceMatcher(None, *both).ratio() for both in ((one, name), (end, last)))
        if (ends and end in (last, *name.split("-"))) or one.replace(".", "_") == words:
            return 1.0, whole
        shorter, longer = sorted((end, last), key=len)
        is_part = len(shorter) >= max(4, len(longer) / 2) and shorter in longer
        if is_part and one.rpartition(".")[0] == name.rpartition(".")[0]:  # default_root_dir for root_dir
            return max(whole, part, TYPO), whole
        return (max(whole, part) if part >= 0.6 else 0.0), whole

    for names in groups:
        (score, _), near = max(((likeness(one), one) for one in names), default=((0.0, 0.0), ""))
        if near and score >= least:
            return near
    return None
