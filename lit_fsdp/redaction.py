"""Redaction: secrets of the environment and of the recipe become ``***`` in all output.

Secrets are detected by name: ``HF_TOKEN`` and ``WANDB_API_KEY`` in the environment, ``api_key`` and ``password`` in a
recipe, and the user part of a URL. A value shorter than six characters is hidden next to its name, but not in running
text, which it would make unreadable.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote

HIDDEN = "***"
_MIN_CHARS = 6
_NAME = re.compile(
    r"(?i)(^|[_.\-])(token|secrets?|passwd|password|passphrase|credentials?|authorization|signature"
    r"|(api|access|secret|private)_?key(_id)?)$"
)
_VARIABLE = re.compile(_NAME.pattern.removesuffix("$") + r"$|_(key|pass|pat|pwd)$")
_URL = re.compile(
    r"(?i)(:/{1,2})[^/\s:@'\"]*:[^/\s@'\"]+(?=@)|([?&][\w\-]*(?:token|secret|password|api_?key|sig)=)[^&\s'\"]+"
)

_remembered: set[str] = set()


def remember(values: Any, name: str = "") -> None:
    """Hide the values of a recipe's secret keys from now on, in all output of this process."""

    def note(path: str, key: str, value: Any) -> None:
        if _hides(key, value):
            _remembered.add(str(value))

    _mapped(values, note, name=name)


def redact(text: str) -> str:
    """Replace every known secret, and every password in a URL, by ``***``."""
    known = {value for name, value in os.environ.items() if _VARIABLE.search(name)} | _remembered
    parts = {part.strip() for value in known for part in (value, *value.splitlines())}  # private keys span lines
    parts = {part for part in parts if len(part) >= _MIN_CHARS and HIDDEN not in part}
    forms = {form for part in parts for form in (part, json.dumps(part)[1:-1], repr(part)[1:-1], quote(part, safe=""))}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return _URL.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text)


def redact_values(values: Any) -> Any:
    """Copy a recipe or JSON data with secrets replaced by ``***``; other keys and numbers are unchanged."""

    def shown(path: str, key: str, value: Any) -> Any:
        if _hides(key, value):
            return HIDDEN
        return redact(value) if isinstance(value, str) else value

    return _mapped(values, shown)


def hidden_keys(values: Any) -> list[str]:
    """Paths of the values that contain a redacted secret."""
    found: list[str] = []
    _mapped(values, lambda path, _, value: found.append(path) if isinstance(value, str) and HIDDEN in value else None)
    return found


def _hides(key: str, value: Any) -> bool:
    """Whether ``value`` under ``key`` is a secret; numbers of tokens, ``<eos>`` and ``[PAD]`` are not."""
    if not _NAME.search(key) or isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
        return False
    return not (key.lower().endswith("token") and (not isinstance(value, str) or value[0] in "<["))


def _mapped(values: Any, act: Callable[[str, str, Any], Any], path: str = "", name: str = "") -> Any:
    """Apply ``act`` to the path, key (or parent key, if that names a secret) and value of all nested values."""
    if isinstance(values, Mapping):
        name_of = {key: name if _NAME.search(name) else str(key) for key in values}
        return {k: _mapped(v, act, f"{path}.{k}" if path else str(k), name_of[k]) for k, v in values.items()}
    if isinstance(values, (list, tuple)):
        found = [_mapped(value, act, f"{path}[{index}]", name) for index, value in enumerate(values)]
        return tuple(found) if type(values) is tuple else found
    return act(path, name, values)


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Redact secrets in everything that Python writes to standard output and standard error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Redacting(stream) for stream in before)  # closed streams are None
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Redacting:
    """A text stream that writes redacted text to another stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "write":  # W&B replaces it to record the output
            super().__setattr__(name, lambda text: value(redact(text)))
        else:
            super().__setattr__(name, value)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
