"""A recipe as it may be shown and written down."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence

import yaml

from lit_fsdp.redaction import redact_values


def without_secrets(text: str) -> str:
    """A recipe as YAML text with ``***`` in place of secrets; the same text where there are none."""
    values = yaml.safe_load(text)
    shown = redact_values(values)
    return text if shown == values else yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


@contextlib.contextmanager
def printed_without_secrets(words: Sequence[str]) -> Iterator[None]:
    """Inside, a parser that prints the recipe because of ``--print_config`` among ``words`` prints no secrets."""
    if not any(word.partition("=")[0] == "--print_config" for word in words):
        yield
        return
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        print(without_secrets(printed.getvalue()), end="")
