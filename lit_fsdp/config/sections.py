"""Convert mappings to typed sections, and sections to mappings."""

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, Union

from jsonargparse import ArgumentParser, Namespace

from lit_fsdp.config.command_line import OWN_CLASSES
from lit_fsdp.config.parser_errors import translated
from lit_fsdp.config.yaml_files import use_loader
from lit_fsdp.errors import ConfigError, require

_INSTEAD = {
    "datasets": "write the rows to a file, as data_set.to_json('rows.jsonl') does, and name that file",
    "peft": "write lora={'r': 8, 'alpha': 16}",
    "transformers": "name the folder or the hub repository of the model",
}
"""By package of an object, what to write instead of it."""
_DATA = ("data.train", "data.val", "data.test", "data.predict")
_COLUMNS = {"messages", "conversations", "prompt", "instruction", "text", "chosen"}
"""Columns that rows have and sources of rows do not."""
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def build(cls: type[T], values: Mapping[str, Any], path: str) -> T:
    """Build the dataclass ``cls`` from a mapping that a recipe or a Python caller gives.

    Raises:
        ConfigError: An unknown key, an invalid value, or a violated rule of ``cls``; the path starts with ``path``.
    """
    use_loader()
    values = {name: _as_recipe(value, f"{path}.{name}") for name, value in values.items()}
    parser = _section_parser(typing.cast(Any, cls), path)
    nested = functools.reduce(lambda inner, name: {name: inner}, reversed(path.split(".")), plain(values))
    return typed(cls, translated(parser, lambda: parser.parse_object(nested))[path], path)


def _as_recipe(value: Any, path: str) -> Any:
    """Paths as text, also in lists and mappings; objects for which recipes have other words are refused."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    package = type(value).__module__.partition(".")[0]
    given, fix = f"an object of {type(value).__name__}", _INSTEAD.get(package, "")
    if isinstance(value, (list, tuple)) and path in _DATA and any(_is_row(one) for one in value):
        given, fix = "rows", _INSTEAD["datasets"]
    is_word = isinstance(value, str)  # such as datasets.Split
    require(not fix or is_word, path, given, "text, numbers, lists and mappings, as in a recipe", fix)
    if isinstance(value, (list, tuple)):
        return [_as_recipe(one, path) for one in value]
    return {key: _as_recipe(one, f"{path}.{key}") for key, one in value.items()} if isinstance(value, dict) else value


def _is_row(value: Any) -> bool:
    return isinstance(value, Mapping) and not _COLUMNS.isdisjoint(value)


@functools.cache  # building takes longer than parsing, and a search builds a strategy for each candidate
def _section_parser(cls: type[Any], path: str) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, path)
    return parser


def takes_fields(section: type[Any], returns: Any = None) -> Callable[[F], F]:
    """Decorate a function that passes its keyword arguments to the dataclass ``section``.

    The function ``help()``, completion and parsers then show the fields: names, types, defaults and docstrings.
    """

    def describe(function: F) -> F:
        own = [p for p in inspect.signature(function).parameters.values() if p.name == "self"]
        fields, types = inspect.signature(section).parameters.values(), typing.get_type_hints(section)
        parameters = [*own, *(field.replace(annotation=types[field.name]) for field in fields)]
        if own:  # else Lightning's load_from_checkpoint would drop a misspelled argument
            parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD, annotation=Any))
        function.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
        args = [textwrap.indent(f"{name}: {text}", "    ") for name, text in _texts_of(section).items()]
        head, _, rest = inspect.cleandoc(function.__doc__ or "").partition("Args:\n    **kwargs:")
        parts = (head.strip(), "Args:\n" + "\n".join(args), rest.partition("\n")[2].strip())
        # inspect ignores the first line's indentation
        function.__doc__ = ("" if head else "\n") + "\n\n".join(part for part in parts if part)
        return function

    return describe


def refuse_positional(name: str, section: type[Any], given: tuple[Any, ...]) -> None:
    """Raise :class:`ConfigError` for positional arguments of a function that passes its arguments to ``section``."""
    hints = typing.get_type_hints(section)
    fields = [field.name for field in dataclasses.fields(section)]
    takers = [field for field in fields if given and given[0] in _choices(hints[field])]
    fix = f"write {name}({[*takers, *fields][0]}={given[0]!r})" if given else ""
    require(not given, name, ", ".join(map(repr, given)), "arguments by name", fix)


def _choices(hint: Any) -> list[Any]:
    """The values of all literals in a type."""
    options = typing.get_args(hint)
    return (
        [*options] if typing.get_origin(hint) is typing.Literal else [one for part in options for one in _choices(part)]
    )


def _texts_of(section: type[Any]) -> dict[str, str]:
    """The docstrings of a dataclass's fields, read from the source because Python does not keep them."""
    found: dict[str, str] = {}
    for cls in reversed([cls for cls in section.__mro__ if dataclasses.is_dataclass(cls)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for node, after in itertools.pairwise(body):
            text = after.value if isinstance(after, ast.Expr) else None
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, ast.Constant):
                found[node.target.id] = inspect.cleandoc(str(text.value)).replace("\n", "\n    ")
    return found


def typed(cls: type[T], values: Any, path: str) -> T:
    """Build the dataclass ``cls`` from a namespace that the parser has checked; errors have the full path."""
    hints = typing.get_type_hints(cls)
    items = vars(values) if isinstance(values, Namespace) else values
    built = {name: _typed_value(hints[name], value, f"{path}.{name}") for name, value in items.items()}
    try:
        return cls(**built)
    except ConfigError as error:
        within = error.field.startswith(path) or error.field.split(".")[0] in OWN_CLASSES
        name = error.field if within else f"{path}.{error.field}"
        raise ConfigError(name, error.given, error.allowed, error.fix) from None
    except TypeError:  # of a rule that compares a number that is null, which jsonargparse accepts in a Union
        null = next((name for name, value in built.items() if value is None and hints[name] in (int, float)), None)
        require(null is None, f"{path}.{null}", "null", "a number", f"remove {null}")
        raise


def _typed_value(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    has_null = value is not None or Any in options or type(None) in options
    require(has_null, path, "null", "a value", f"remove {path.rpartition('.')[2]}")
    if isinstance(value, (Namespace, dict)):
        nested = next((option for option in options if dataclasses.is_dataclass(option)), None)
        return typed(nested, value, path) if nested else plain(value)  # type: ignore[arg-type]
    if isinstance(value, list):
        items = next((typing.get_args(option)[0] for option in options if typing.get_origin(option) is list), Any)
        return [_typed_value(items, item, f"{path}[{i}]") for i, item in enumerate(value)]
    return value


def plain(value: Any) -> Any:
    """Convert namespaces and dataclasses to mappings and lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (Namespace, Mapping)):
        items = vars(value) if isinstance(value, Namespace) else value
        return {name: plain(item) for name, item in items.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line, with the full key, per value that differs between two recipes; a missing key is None."""
    old, new = dict(leaves(before)), dict(leaves(after))
    changed = [key for key in {**old, **new} if str(old.get(key)) != str(new.get(key))]  # a flag may give text
    return [f"{key}: {old.get(key)!r} → {new.get(key)!r}" for key in changed]


def leaves(values: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the full key and the value of each leaf of nested mappings."""
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        yield from leaves(value, where) if isinstance(value, Mapping) and value else [(where, value)]
