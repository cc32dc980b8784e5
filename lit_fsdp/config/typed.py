"""Plain data (from YAML, JSON or keyword arguments) into frozen dataclasses, with errors in the house form.

jsonargparse parses the command line once lightning is loaded; this builder runs before anything heavy is
imported, so that a wrong value in our own sections is refused at once and with the full path of the key.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from lit_fsdp.errors import ConfigError

T = TypeVar("T")
_MISMATCH = object()


def build(
    cls: type[T], values: Mapping[str, Any] | T | None, path: str, rules: Iterable[Callable[[T], None]] = ()
) -> T:
    """The dataclass ``cls`` from a mapping; unknown keys and wrong types are refused.

    Args:
        cls: A dataclass whose fields may be numbers, strings, literals, lists, unions and other dataclasses.
        values: Keys are field names; an instance of ``cls`` is returned as it is; ``None`` means all defaults.
        path: Where ``values`` stands in the recipe; errors start with it.
        rules: Further checks on the result; their errors name fields of ``cls``.

    Raises:
        ConfigError: A key that ``cls`` does not have, one that it needs and is not given, a value of another type, or
            a rule of ``cls`` itself.
    """
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping) and values is not None:
        raise ConfigError(path, values, "a mapping of keys to values", f"write {path} as key: value lines")
    given = dict(values or {})
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in given:
        if key not in names:
            raise unknown_key(f"{path}.{key}" if path else str(key), given[key], str(key), names)
    _refuse_missing(typing.cast(type, cls), given, path)
    hints = _hints(typing.cast(type, cls))
    kwargs = {key: _convert(hints[key], value, f"{path}.{key}" if path else key) for key, value in given.items()}
    try:
        built = cls(**kwargs)
        for rule in rules:
            rule(built)
        return built
    except ConfigError as error:
        raise ConfigError(_join(path, error.field), error.given, error.allowed, error.fix) from None


def _refuse_missing(cls: type, given: Mapping[str, Any], path: str) -> None:
    missing = dataclasses.MISSING
    for field in dataclasses.fields(cls):
        if field.name not in given and field.default is missing and field.default_factory is missing:
            docs = field_docs(cls).get(field.name, "a value")
            raise ConfigError(f"{path}.{field.name}", "nothing", docs.rstrip("."), f"add {field.name} to {path}")


def accepts(config: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give an ``__init__(self, **options)`` the signature of ``config``, so that each key is declared once.

    ``inspect``, editors and jsonargparse read the signature; defaults and types come from the dataclass.
    """

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        hints = _hints(config)
        parameters = inspect.signature(config).parameters.values()
        fields = [p.replace(annotation=_without_paths(hints[p.name])) for p in parameters]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        init.__signature__ = inspect.Signature([own, *fields])  # type: ignore[attr-defined]
        return init

    return decorate


def _without_paths(hint: Any) -> Any:
    """``hint`` with ``list`` for a list of mappings.

    jsonargparse would take a string for such a value as the path of a file that holds it, and read a whole data file
    as YAML; :func:`build` has checked the value by then.
    """
    options = typing.get_args(hint)
    if typing.get_origin(hint) not in (Union, types.UnionType):
        return hint
    plain = [list if typing.get_origin(o) is list and _holds_dataclass(o) else o for o in options]
    return Union[tuple(plain)]  # noqa: UP007 (built from a tuple)


def _holds_dataclass(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_holds_dataclass(option) for option in typing.get_args(hint))


def unknown_key(path: str, given: Any, key: str, names: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist, with the nearest one that does."""
    names = sorted(names)
    initials = "".join(word[:1] for word in key.split("_"))  # learning_rate is meant by lr
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    close = close or [n for n in names if n.startswith(key)][:1] or [n for n in names if n == initials]
    parent = path.rpartition(".")[0]
    fix = f"write {parent + '.' if parent else ''}{close[0]}" if close else "remove this key"
    shown = f"{_shown(given)} for a key that does not exist"
    return ConfigError(path or repr(key), shown, f"one of {', '.join(names)}", fix)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The sentence under each field of a dataclass, by field name; it becomes the ``--help``."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            docs[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return docs


def is_text(cls: type, key: str) -> bool:
    """Whether a field of a dataclass, or an item of a mapping (``env.NAME``), is text and nothing but text.

    Whole numbers may be allowed beside it, for which text can stand as well.
    """
    name, dot, _ = key.partition(".")
    hint = _hints(cls).get(name)
    options = set(typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,))
    return dict[str, str] in options if dot else str in options and options <= {str, int, type(None)}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _join(path: str, field: str) -> str:
    return field if not path or field.startswith(f"{path}.") else f"{path}.{field}"


def _convert(hint: Any, value: Any, path: str) -> Any:
    """``value`` as ``hint`` wants it, or a ConfigError that lists what is allowed."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, Mapping):
        nested = [o for o in options if dataclasses.is_dataclass(o)]
        if nested:
            return build(typing.cast(type, nested[0]), value, path)
    for option in options:
        converted = _try(option, value, path)
        if converted is not _MISMATCH:
            return converted
    allowed = " | ".join(_describe(o) for o in options)
    words = [_shown(w).strip("'") for o in options if typing.get_origin(o) is Literal for w in typing.get_args(o)]
    contained = [word for word in words if word in str(value).lower()]  # bf16-mixed is mixed and not fp16_mixed
    close = contained or difflib.get_close_matches(str(value).lower(), words, n=1, cutoff=0.6)
    if isinstance(value, str) and value and not close and list[str] in options:
        close = [f"[{value}]"]
    close = close or words
    fix = f"write {path}: {close[0]}" if close else f"give {path} as {allowed}"
    if set(options) <= {str, type(None)} and not isinstance(value, (list, tuple, Mapping, type(None))):
        fix = f"write it in quotes, digit by digit as it is meant: {path}: {_quoted(value)}"  # 007 was read as 7
    raise ConfigError(path, _shown(value), allowed, fix)


def _shown(value: Any) -> str:
    """A value as it is written in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _quoted(value: Any) -> str:
    """What YAML read as something else, as the text that may have been meant."""
    if value is None or isinstance(value, (list, tuple, Mapping)):
        return '"..."'
    return f'"{str(value).lower() if isinstance(value, bool) else value}"'


def _try(hint: Any, value: Any, path: str) -> Any:
    """``value`` converted to the single type ``hint``, or ``_MISMATCH``."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if hint is type(None):
        return value if value is None else _MISMATCH
    if origin is Literal:
        same = [w for w in typing.get_args(hint) if w == value and type(w) is type(value)]
        return same[0] if same else _MISMATCH
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return _MISMATCH
        return [_convert(typing.get_args(hint)[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            return _MISMATCH
        return _texts(value, path) if typing.get_args(hint) == (str, str) else dict(value)
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, typing.cast(type, hint)) else _MISMATCH
    return _scalar(hint, value)


def _texts(given: Mapping[Any, Any], path: str) -> dict[str, str]:
    """Names and texts; a whole number is taken as its text, what else YAML makes of plain words is refused."""
    texts = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise ConfigError(
                path, f"{_shown(key)} as a name", "names that are text", f"write it in quotes: {_quoted(key)}"
            )
        is_number = isinstance(value, int) and not isinstance(value, bool)  # of 12.10 YAML keeps 12.1
        if not is_number and not isinstance(value, str):
            raise ConfigError(f"{path}.{key}", _shown(value), "text", f"write it in quotes: {key}: {_quoted(value)}")
        texts[key] = str(value)
    return texts


def _scalar(hint: Any, value: Any) -> Any:
    if hint is bool or isinstance(value, bool):
        return value if hint is bool and isinstance(value, bool) else _MISMATCH
    if hint is int and isinstance(value, int):
        return value
    if hint in (int, float):
        try:  # YAML 1.1 reads 1e-4 (no dot) as a string
            number = float(value) if isinstance(value, (int, float, str)) else math.nan
        except (ValueError, OverflowError):
            return _MISMATCH
        if math.isnan(number):
            return _MISMATCH
        if hint is float:
            return number
        return int(number) if abs(number) < 2**53 and number.is_integer() else _MISMATCH
    return value if isinstance(value, hint) else _MISMATCH


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(_shown(a).strip("'") for a in args)
    if origin in (list, tuple):
        return f"[{_describe(args[0])}, ...]"
    if origin in (Union, types.UnionType):
        return " | ".join(_describe(option) for option in args)
    if origin is dict or hint is dict:
        return "a mapping"
    if hint is type(None):
        return "null"
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(f.name for f in dataclasses.fields(hint)) + "}"
    return {bool: "true | false", int: "a whole number", float: "a number", str: "text"}.get(hint, str(hint))
