"""What must not be written down: secrets of the environment and of the recipe become ``***`` in all we write.

Names decide: ``HF_TOKEN`` and ``WANDB_API_KEY`` in the environment, ``api_key`` and ``password`` in a recipe, and
the user part of a URL. A value shorter than six characters is hidden where its name stands beside it, but not searched
for in running text, which it would make unreadable.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

HIDDEN = "***"
_MIN_CHARS = 6
_ENVIRONMENT = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|PASS|PWD|PAT|CREDENTIAL|CREDENTIALS|APIKEY|KEY)(_|$)"
)
_NO_SECRET = re.compile(r"^PWD$|^OLDPWD$|_(PATH|FILE|DIR|FOLDER|URL|HOST|PORT|TYPE|NAME|LEN|LENGTH|TTL|ID)$")
_KEY = re.compile(
    r"(^|[_\-.])(token|secret|password|passwd|passphrase|api_?key|apikey|access_key|access_key_id|secret_key|private_key"
    r"|credential|credentials|authorization|signature)$"
)
# Names of a tokenizer's special tokens, which end like a secret.
_SPECIAL_TOKEN = re.compile(
    r"(^|[_\-.])(bos|eos|pad|unk|sep|cls|mask|eot|eom|image|audio|video|start|end|begin|stop|boundary|prefix|suffix|tool"
    r"|user|assistant|system|thinking|new|per|last|first)_token$"
)
_URL_USER = re.compile(r"(:/{1,2})[^/\s:@'\"]*:[^/\s@'\"]+@")  # a path has one slash of the two
_URL_QUERY = re.compile(r"(?i)([?&][\w\-]*(?:token|secret|password|api_?key|signature|sig)=)[^&\s'\"]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w\-.~+/]{8,}=*")

_remembered: set[str] = set()


def is_secret_key(name: str) -> bool:
    """Whether a recipe's key (``api_key``, ``hf_token``, ``password``) names a secret."""
    lowered = name.lower()
    return bool(_KEY.search(lowered)) and not _SPECIAL_TOKEN.search(lowered)


def _hides(name: str, value: Any) -> bool:
    """Whether ``value`` is a secret under the key ``name``; a number of tokens is none."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return False
    return is_secret_key(name) and not (isinstance(value, (int, float)) and name.lower().endswith("token"))


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable (``HF_TOKEN``, ``WANDB_API_KEY``, ``AWS_ACCESS_KEY_ID``) names a secret."""
    name = name.upper()
    if name.endswith("ACCESS_KEY_ID"):
        return True
    return bool(_ENVIRONMENT.search(name)) and not _NO_SECRET.search(name)


def remember(values: Any, name: str = "") -> None:
    """Hide from now on, in every text of this process, what a recipe says under keys that name secrets."""

    def note(path: str, key: str, value: Any) -> None:
        if _hides(key, value):
            _remembered.add(str(value))

    _mapped(values, note, name=name)


def redact(text: str) -> str:
    """``text`` with every known secret, and every password in a URL, as ``***``."""
    pattern = _known_secrets()
    if pattern is not None:
        text = pattern.sub(HIDDEN, text)
    text = _URL_USER.sub(rf"\g<1>{HIDDEN}@", text)
    text = _URL_QUERY.sub(rf"\g<1>{HIDDEN}", text)
    return _BEARER.sub(rf"\g<1> {HIDDEN}", text)


def redact_values(values: Any, name: str = "") -> Any:
    """A copy of a recipe or of JSON data with ``***`` in place of secrets; keys and numbers elsewhere stay."""

    def shown(path: str, key: str, value: Any) -> Any:
        if _hides(key, value) and value != "":
            return HIDDEN
        return redact(value) if isinstance(value, str) else value

    return _mapped(values, shown, name=name)


def hidden_keys(values: Any) -> list[str]:
    """Paths of the values in which a secret was replaced when they were written."""
    found: list[str] = []
    _mapped(values, lambda path, _, value: found.append(path) if isinstance(value, str) and HIDDEN in value else None)
    return found


def _mapped(values: Any, act: Callable[[str, str, Any], Any], path: str = "", name: str = "") -> Any:
    """Nested data with ``act`` of the path, the key (or the one above, if that names a secret) and each value."""
    if isinstance(values, Mapping):
        name_of = {key: name if is_secret_key(name) else str(key) for key in values}
        return {k: _mapped(v, act, f"{path}.{k}" if path else str(k), name_of[k]) for k, v in values.items()}
    if isinstance(values, (list, tuple)):
        found = [_mapped(value, act, f"{path}[{index}]", name) for index, value in enumerate(values)]
        return tuple(found) if type(values) is tuple else found
    return act(path, name, values)


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Keep secrets out of standard output and standard error, whoever writes there from Python."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Redacting(stream) for stream in before)  # closed ones are None
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class OutputError(OSError):
    """Standard output or standard error cannot be written, as on a full disk."""


class _Redacting:
    """A text stream that writes to another one what :func:`redact` leaves."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._call(self._stream.write, redact(text))
        return len(text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _call(self, function: Callable[..., Any], *arguments: str) -> None:
        try:
            function(*arguments)
        except BrokenPipeError:  # who reads has enough
            raise
        except OSError as error:
            name = self._stream.name.strip("<>")
            raise OutputError(error.errno, f"{name} cannot be written: {error.strerror}") from error


def _known_secrets() -> re.Pattern[str] | None:
    values = {value for name, value in os.environ.items() if is_secret_variable(name)} | _remembered
    forms: set[str] = set()
    for value in values:
        plain = value.strip()
        if len(plain) >= _MIN_CHARS and HIDDEN not in plain:
            lines = [line.strip() for line in plain.splitlines() if len(line.strip()) >= 2 * _MIN_CHARS]
            forms.update((plain, json.dumps(plain)[1:-1], repr(plain)[1:-1], urllib.parse.quote(plain, safe="")))
            forms.update(lines)  # of a private key
    if not forms:
        return None
    return re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))
