"""Chat templates to text, as transformers renders them, with the places of what stands between generation marks.

An environment of our own, as a template is rendered for every row: it is compiled once, what it sees is not copied, and
the place of a mark costs nothing. Today's date is a fixed day, so that the same rows give the same tokens tomorrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lit_fsdp.data.formats import Message
from lit_fsdp.data.masks import Span
from lit_fsdp.errors import ConfigError, DataError

TODAY = datetime(2024, 7, 26)
"""What a template takes for today; the day that Llama 3.1 names where no clock is at hand."""

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_JSON_SCALARS = (str, int, float, bool, type(None))


class Renderer:
    """One Jinja chat template with the variables that it sees besides the conversation.

    Args:
        source: Jinja text.
        variables: Names of special tokens and their text.

    Attributes:
        variables: As given.
        has_marks: Whether it has generation marks.

    Raises:
        ConfigError: It is not Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        try:
            _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                "data.chat_template",
                f"a template that is not Jinja (line {error.lineno}: {error.message})",
                "a Jinja template",
                "mend that line, or name another template",
            ) from None
        self.source, self.variables = source, dict(variables)
        self.has_marks = bool(_MARK.search(source))

    def render(
        self, messages: Sequence[Message], tools: Any, place: str, generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and the half-open ranges between generation marks.

        Raises:
            DataError: The template refuses the conversation or is broken; ``place`` is named.
        """
        try:
            template, written = _compiled(self.source)
            blocks = template.generate(
                messages=[_plain_message(message) for message in messages],
                tools=None if tools is None else _plain(tools),
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.variables,
            )
            return written.collect(blocks)
        except Exception as error:  # Jinja's errors, and whatever a template raises
            raise DataError(
                f"{place}: the chat template refuses it ({' '.join(str(error).split())})\n"
                "  fix:     leave such rows out, or set another data.chat_template"
            ) from error


class _Written:
    """What has been written so far, for the generation marks to know where they are.

    Where a mark is inside a macro or a block that is set, its text comes later and the place is wrong.
    """

    def __init__(self) -> None:
        self._length, self._spans = 0, list[Span]()

    def collect(self, blocks: Any) -> tuple[str, list[Span]]:
        self._length, self._spans = 0, []
        found = []
        for block in blocks:
            found.append(block)
            self._length += len(block)
        return "".join(found), self._spans

    def mark(self, text: str) -> None:
        self._spans.append((self._length, self._length + len(text)))


class _GenerationMarks(Extension):
    tags = {"generation"}  # noqa: RUF012 (the name and kind that Jinja asks for)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.environment.written.mark(text)  # type: ignore[attr-defined]
        return text


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[jinja2.Template, _Written]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, loopcontrols]
    )
    written = _Written()
    environment.extend(written=written)
    environment.filters["tojson"] = _to_json
    environment.globals.update(dict=_new_dict, raise_exception=_refuse, strftime_now=_today)
    return environment.from_string(source), written


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*args: Any, **items: Any) -> dict[str, Any]:
    """In place of the class, whose methods could change what a template is not to change."""
    return dict(*args, **items)


def _today(form: str) -> str:
    return TODAY.strftime(form)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _plain_message(message: Message) -> Message:
    """Only plain values, whose methods a template may call, with thoughts under each of their names."""
    plain = message if len(message) == 2 else {key: _plain(value) for key, value in message.items()}
    thoughts = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
    return plain if thoughts is None else {"thinking": thoughts, **plain, "reasoning_content": thoughts}


def _plain(value: Any) -> Any:
    if type(value) in _JSON_SCALARS:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
