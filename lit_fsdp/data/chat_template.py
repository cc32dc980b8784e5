"""Chat templates: which one is used, and conversations as the text that transformers renders with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from lit_fsdp.data.formats import Conversation, Message
from lit_fsdp.data.masks import Span, added_tokens
from lit_fsdp.errors import ConfigError, DataError, require

TODAY = datetime(2024, 7, 26)
"""What a template takes for today, so that the same rows give the same tokens tomorrow; a day that Llama 3.1 names."""
_NEEDS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (
        *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "zephyr": (),
    "plain": (),
}
"""Special tokens that a named template writes besides BOS and EOS."""
NAMES = tuple(_NEEDS)
_FIELD = "data.chat_template"
_ALLOWED = f"{', '.join(NAMES)}, or a file with a Jinja template"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A Jinja chat template with the variables that it sees besides the conversation.

    Args:
        source: Jinja text.
        variables: Names of special tokens and their text, and whatever else each conversation is rendered with.
        tool_use: Jinja text for rows with tools, if it is another one.

    Attributes:
        text: All the Jinja text and variables that ids depend on.

    Raises:
        ConfigError: It is not Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], tool_use: str | None = None) -> None:
        self.source, self._variables, self._tool_use = source, dict(variables), tool_use or source
        self.text = repr((source, tool_use, sorted(self._variables.items())))
        for text in (source, self._tool_use):
            try:
                _compile(text)
            except jinja2.TemplateSyntaxError as error:
                given = f"a template that is not Jinja (line {error.lineno}: {error.message})"
                raise ConfigError(_FIELD, given, "a Jinja template") from None

    def render(
        self, conversation: Conversation, location: str, *, generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """The text of a conversation, and the characters between ``{% generation %}`` marks if it has such.

        Raises:
            DataError: The template refuses the conversation or is broken; ``location`` is named.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # whose annotations are of another result
        source = self._tool_use if conversation.tools else self.source
        marked = bool(_MARK.search(source))
        _compile(source)
        options: dict[str, Any] = {
            "tools": conversation.tools,
            "chat_template": source,
            "return_assistant_tokens_mask": marked,
            "add_generation_prompt": generation_prompt,
            **self._variables,
            **conversation.template_kwargs,
        }
        try:
            try:
                (text,), marks = render([conversation.messages], **options)
            except TypeError:  # DeepSeek V3 adds the arguments of calls to other text, so they have to be text
                (text,), marks = render([[_with_text(message) for message in conversation.messages]], **options)
        except Exception as error:  # Jinja's errors, and whatever a template raises
            raise DataError(
                f"{location}: the chat template refuses it ({' '.join(str(error).split())})\n"
                "  fix:     leave such rows out, or set another data.chat_template"
            ) from error
        return text, marks[0] if marked else None

    def text_of(
        self, conversation: Conversation, messages: list[Any], *, generation_prompt: bool = False
    ) -> str | None:
        """Return the text of other messages; ``None`` if refused, as half a conversation is by some templates."""
        try:
            return self.render(replace(conversation, messages=messages), "", generation_prompt=generation_prompt)[0]
        except DataError:
            return None


def _with_text(message: Message) -> Message:
    """The message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        function = {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else message


def _compile(source: str) -> None:
    """Compile a template once, with a day of its own: transformers takes no clock, only the environment has one."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(source)
    if "strftime_now" in source:
        compiled.environment.globals["strftime_now"] = TODAY.strftime


def find_template(choice: str | None, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> ChatTemplate | None:
    """The template of ``data.chat_template``; ``None`` if it is null and the tokenizer has none of its own.

    Args:
        choice: One of :data:`NAMES`, or a file with a Jinja template; ``None`` for the tokenizer's own.
        tokenizer: A fast tokenizer of transformers.
        kwargs: ``data.chat_template_kwargs``, which a row's own go before.

    Raises:
        ConfigError: No such file, or the tokenizer lacks special tokens that a named template needs.
    """
    variables = {**tokenizer.special_tokens_map, **(kwargs or {})}
    if choice in _NEEDS:
        return ChatTemplate(_named(choice, tokenizer), variables)
    if choice is not None:
        return ChatTemplate(_read(Path(choice).expanduser()), variables)
    own = tokenizer.chat_template or {}
    if isinstance(own, str):
        return ChatTemplate(own, variables)
    given = f"null, and the tokenizer has the chat templates {', '.join(sorted(own))}, none of them its default"
    require(not own or "default" in own, _FIELD, given, _ALLOWED, "save the one you want to a file and name it")
    return ChatTemplate(own["default"], variables, own.get("tool_use")) if own else None


def no_template(given: str, tokenizer: Any) -> ConfigError:
    """Say what to write where conversations come without a chat template; ``given`` needs one."""
    lacks = _missing(_NEEDS["chatml"], tokenizer)
    given = f"null with {given}, and the tokenizer has no chat template of its own, as that of a base model"
    fix = f"set {_FIELD}: chatml" + (f" with model.add_tokens: {list(lacks)}, or {_FIELD}: zephyr" if lacks else "")
    return ConfigError(_FIELD, given, _ALLOWED, fix)


def _named(name: str, tokenizer: Any) -> str:
    source = resources.files("lit_fsdp.data").joinpath("named_templates", f"{name}.jinja").read_text(encoding="utf-8")
    missing = _missing(_NEEDS[name], tokenizer)
    given = f"{name}, and the tokenizer lacks {', '.join(missing)}"
    allowed = "a template whose special tokens the tokenizer has; zephyr and plain need EOS alone"
    require(not missing, _FIELD, given, allowed, f"write model.add_tokens: {list(missing)}, or set {_FIELD}: plain")
    fits = tokenizer.eos_token is not None or "eos_token" not in source
    require(fits, _FIELD, f"{name}, and the tokenizer has no EOS", "one with eos_token", f"set {_FIELD}: chatml")
    if tokenizer.convert_ids_to_tokens(added_tokens(tokenizer)[0]) == [tokenizer.bos_token]:
        source = "{{- bos_token }}" + source
    if "▁a" not in tokenizer.get_vocab() or "Ġa" in tokenizer.get_vocab():
        # in SentencePiece words begin with their blank even after a special token
        source = source.replace("{%- set gap = ' ' %}", "{%- set gap = '' %}")
    return source


def _missing(needed: tuple[str, ...], tokenizer: Any) -> tuple[str, ...]:
    return tuple(token for token in needed if token not in tokenizer.added_tokens_encoder)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_FIELD, f"{path} ({error})", _ALLOWED, "check the name or path") from error
