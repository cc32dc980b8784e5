"""Chat templates: which one is used, and conversations as the text that transformers renders with it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Span, added_tokens
from lit_fsdp.errors import ConfigError, DataError

TODAY = datetime(2024, 7, 26)
"""What a template takes for today, so that the same rows give the same tokens tomorrow; a day that Llama 3.1 names."""
_NEEDS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "zephyr": (),
    "plain": (),
}
"""Special tokens that a named template writes besides BOS and EOS."""
_MISTRAL_TOOLS = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
NAMES = tuple(_NEEDS)
_FIELD = "data.chat_template"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A Jinja chat template with the variables that it sees besides the conversation.

    Args:
        source: Jinja text.
        variables: Names of special tokens and their text, and whatever else each conversation is rendered with.
        tool_use: Jinja text for rows with tools, if it is another one.
        missing_for_tools: Special tokens that rows with tools need and the tokenizer has not.

    Attributes:
        source: As given.
        text: All the Jinja text and variables that ids depend on.

    Raises:
        ConfigError: It is not Jinja.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        tool_use: str | None = None,
        missing_for_tools: tuple[str, ...] = (),
    ) -> None:
        self.source, self._variables, self._tool_use = source, dict(variables), tool_use or source
        self._missing_for_tools = missing_for_tools
        self.text = repr((source, tool_use, sorted(self._variables.items())))
        for text in (source, self._tool_use):
            try:
                _compile(text)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    _FIELD,
                    f"a template that is not Jinja (line {error.lineno}: {error.message})",
                    "a Jinja template",
                    "mend that line, or name another template",
                ) from None

    def render(
        self, conversation: Conversation, location: str, *, generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the text of a conversation, and the characters between ``{% generation %}`` marks if it has such.

        Raises:
            DataError: The template refuses the conversation or is broken; ``location`` is named.
            ConfigError: A row has tools, and the tokenizer lacks what the named template needs for them.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # whose annotations are of another result
        source = self._tool_use if conversation.tools else self.source
        if self._missing_for_tools:
            self._check_tools(conversation, location)
        marked = bool(_MARK.search(source))
        _compile(source)
        try:
            (text,), marks = render(
                [conversation.messages],
                conversation.tools,
                chat_template=source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=generation_prompt,
                **{**self._variables, **conversation.template_kwargs},
            )
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

    def _check_tools(self, conversation: Conversation, location: str) -> None:
        if conversation.tools or any(
            message.get("tool_calls") or message["role"] == "tool" for message in conversation.messages
        ):
            raise ConfigError(
                _FIELD,
                f"mistral for rows with tools ({location}), and the tokenizer lacks "
                f"{', '.join(self._missing_for_tools)}",
                "a template whose special tokens the tokenizer has",
                f"write model.add_tokens: {list(self._missing_for_tools)}, or set another data.chat_template",
            )


def _compile(source: str) -> None:
    """Compile a template once, with a day of its own: transformers takes no clock, only the environment has one."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled = _compile_jinja_template(source)
    if "strftime_now" in source:
        compiled.environment.globals["strftime_now"] = TODAY.strftime


def find_template(choice: str | None, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> ChatTemplate | None:
    """Return the template of ``data.chat_template``; ``None`` if it is null and the tokenizer has none of its own.

    Args:
        choice: One of :data:`NAMES`, or a file with a Jinja template; ``None`` for the tokenizer's own.
        tokenizer: A fast tokenizer of transformers.
        kwargs: ``data.chat_template_kwargs``, which a row's own go before.

    Raises:
        ConfigError: No such file, or the tokenizer lacks special tokens that a named template needs.
    """
    variables = {**tokenizer.special_tokens_map, **(kwargs or {})}
    if choice in _NEEDS:
        source = _named(choice, tokenizer)
        return ChatTemplate(source, variables, None, _missing(_MISTRAL_TOOLS, tokenizer) if choice == "mistral" else ())
    if choice is not None:
        return ChatTemplate(_read(Path(choice).expanduser()), variables)
    own = tokenizer.chat_template or {}
    if isinstance(own, str):
        return ChatTemplate(own, variables)
    if own and "default" not in own:
        raise ConfigError(
            _FIELD,
            f"null, and the tokenizer has the chat templates {', '.join(sorted(own))}, none of them its default",
            f"{', '.join(NAMES)}, or a file with a Jinja template",
            "save the one you want to a file and name it",
        )
    return ChatTemplate(own["default"], variables, own.get("tool_use")) if own else None


def no_template(given: str, tokenizer: Any) -> ConfigError:
    """Say what to write where conversations come without a chat template; ``given`` needs one."""
    lacks = _missing(_NEEDS["chatml"], tokenizer)
    return ConfigError(
        _FIELD,
        f"null with {given}, and the tokenizer has no chat template of its own, as that of a base model",
        f"{', '.join(NAMES)}, or a file with a Jinja template",
        f"set {_FIELD}: chatml" + (f" with model.add_tokens: {list(lacks)}, or {_FIELD}: zephyr" if lacks else ""),
    )


def _named(name: str, tokenizer: Any) -> str:
    source = resources.files("lit_fsdp.data").joinpath("named_templates", f"{name}.jinja").read_text(encoding="utf-8")
    missing = _missing(_NEEDS[name], tokenizer)
    if missing:
        raise ConfigError(
            _FIELD,
            f"{name}, and the tokenizer lacks {', '.join(missing)}",
            "a template whose special tokens the tokenizer has; zephyr and plain need EOS alone",
            f"write model.add_tokens: {list(missing)}, or set data.chat_template: plain",
        )
    if tokenizer.eos_token is None and "eos_token" in source:
        raise ConfigError(
            _FIELD, f"{name}, and the tokenizer has no EOS", "a tokenizer with eos_token", f"set {_FIELD}: chatml"
        )
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = f"{', '.join(NAMES)}, or an existing file with a Jinja template in UTF-8"
        raise ConfigError(_FIELD, f"{path} ({error})", allowed, "check the name or path") from error
    if not text.strip():
        raise ConfigError(_FIELD, f"{path}, which is empty", "a Jinja template", "check the path")
    return text
