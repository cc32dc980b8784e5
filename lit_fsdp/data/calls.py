"""Tools of a conversation and the calls of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_fsdp.data.cells import from_json, shown
from lit_fsdp.errors import DataError


def read_tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    """The ``tools`` column: a list of schemas, or JSON text of one, as Parquet files often have it.

    Raises:
        DataError: It is neither.
    """
    if isinstance(value, str):
        value = from_json(value.strip() or "null", f"{place}: tools")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{place}: tools are a list of JSON schemas, not {shown(value)}")
    return value


def read_calls(value: Any, place: str) -> list[dict[str, Any]]:
    """The calls of one message, each ``{function: {name, arguments}}`` or ``{name, arguments}``.

    Arguments that are JSON text, as OpenAI's interface gives them, become the object that templates expect.

    Args:
        value: A list of calls, one call, JSON text of either, or nothing.
        place: Where the message stands, for errors.

    Raises:
        DataError: A call has no name, or its arguments are no object.
    """
    if isinstance(value, str):
        value = from_json(value.strip() or "null", f"{place}: tool_calls")
    calls = [value] if isinstance(value, Mapping) else value or []
    if not isinstance(calls, (list, tuple)):
        raise DataError(f"{place}: tool_calls are a list of calls with a function name, not {shown(value)}")
    return [_call(call, place) for call in calls]


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{place}: tool_calls are a list of calls with a function name, not {shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = from_json(arguments.strip() or "{}", f"{place}: arguments of {function['name'][:40]!r}")
    if arguments is None:
        arguments = {}
    if isinstance(arguments, (list, tuple)) and all(_is_pair(entry) for entry in arguments):
        arguments = dict(arguments)  # a map of a Parquet or Arrow file
    if not isinstance(arguments, Mapping):
        raise DataError(f"{place}: arguments of {function['name'][:40]!r} are an object, not {shown(arguments)}")
    made = {**function, "arguments": dict(arguments)}
    return {**call, "function": made} if "function" in call else made


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
