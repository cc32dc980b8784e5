"""Values of cells: text, JSON text, and how an error shows one."""

from __future__ import annotations

import json
import re
import reprlib
from typing import Any

from lit_fsdp.errors import DataError

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def text_of(value: Any, place: str) -> str:
    """The value, if it is text that can be encoded.

    Raises:
        DataError: It is none.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: text expected, not {shown(value)}")
    lone = None if value.isascii() else _LONE_SURROGATE.search(value)
    if lone:
        raise DataError(
            f"{place}: half a character at {lone.start()} (\\u{ord(lone[0]):04x}), which is no text\n"
            "  fix:     write both halves of the pair, or remove it"
        )
    return value


def from_json(text: str, what: str) -> Any:
    """What a cell of JSON text holds; ``what`` names it.

    Raises:
        DataError: It is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} are not JSON ({error}): {shown(text)}") from None


def shown(value: Any) -> str:
    """Type and first characters of a value, for errors."""
    text = value if isinstance(value, str) else reprlib.repr(value)  # which stops where it gets deep
    return f"{type(value).__name__} {text[:40]!r}"
