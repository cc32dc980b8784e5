"""Select the chat template, and render conversations with it through transformers."""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lit_fsdp.data.formats import Conversation
from lit_fsdp.data.masks import Span, added_tokens
from lit_fsdp.errors import ConfigError, DataError, require

_TODAY = datetime(2024, 7, 26)
"""Fixed current date for templates, so that the same rows always give the same tokens; Llama 3.1 uses this date."""
_NEEDS = {
    "chatml": "<|im_start|> <|im_end|>",
    "llama3": "<|start_header_id|> <|end_header_id|> <|eot_id|>",
    "mistral": "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
    "gemma": "<start_of_turn> <end_of_turn>",
    "zephyr": "",
    "plain": "",
}
"""Special tokens, besides BOS and EOS, that each named template writes."""
NAMES = tuple(_NEEDS)
_FIELD = "data.chat_template"
_ALLOWED = f"{', '.join(NAMES)}, or a file with a Jinja template"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TESTS_NONE = re.compile(r"content['\"]?\]?\s*(is\s+(not\s+)?|==\s*|!=\s*)none", re.IGNORECASE)


class ChatTemplate:
    """A Jinja chat template with its variables besides the conversation, such as special tokens.

    Rows with tools may use another template, ``tool_use``. Token ids depend on nothing but ``text``.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], tool_use: str | None = None) -> None:
        self.source, self._variables, self._tool_use = source, dict(variables), tool_use or source
        self._has = {text: (bool(_MARK.search(text)), "strftime_now" in text) for text in (source, self._tool_use)}
        renderers = [version(package) for package in ("transformers", "jinja2")]
        self.text = repr((source, tool_use, sorted(self._variables.items()), renderers))

    def render(
        self, conversation: Conversation, location: str, *, generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Return the text of a conversation, and the character spans of its ``{% generation %}`` blocks, if any.

        Raises:
            DataError: The template rejects the conversation or is broken; the message starts with ``location``.
        """
        from jinja2 import TemplateSyntaxError, UndefinedError
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        render: Any = render_jinja_template  # its return annotation is wrong
        source = self._tool_use if conversation.tools else self.source
        marked, has_clock = self._has[source]
        options: dict[str, Any] = {
            "tools": conversation.tools,
            "chat_template": source,
            "return_assistant_tokens_mask": marked,
            "add_generation_prompt": generation_prompt,
            **self._variables,
            **conversation.template_kwargs,
        }
        messages = conversation.messages
        # DeepSeek V3 concatenates call arguments with text, so they must be text
        forms = [messages, [_with_text(message) for message in messages]]
        if _TESTS_NONE.search(source) and any(m.get("tool_calls") and not m["content"] for m in messages):
            # DeepSeek R1 writes calls only if the content is null, as in OpenAI's rows; others may not support it
            forms = [[_with_null(message) for message in form] for form in forms] + forms
        try:
            if has_clock:  # transformers has no option for the date
                _compile_jinja_template(source).environment.globals["strftime_now"] = _TODAY.strftime
            for form in forms:
                try:
                    (text,), marks = render([form], **options)
                    break
                except (TypeError, UndefinedError):
                    if form is forms[-1]:
                        raise
        except TemplateSyntaxError as error:
            given = f"a template with a syntax error in line {error.lineno}: {error.message}"
            raise ConfigError("data.chat_template", given, "a valid Jinja template", "fix that line") from None
        except Exception as error:  # Jinja's errors, and whatever a template raises
            raise DataError(
                f"{location}: the chat template rejects this conversation ({' '.join(str(error).split())})\n"
                "  fix:     remove such rows, or set another data.chat_template"
            ) from error
        return text, marks[0] if marked else None

    def text_of(
        self, conversation: Conversation, messages: list[Any], *, generation_prompt: bool = False
    ) -> str | None:
        """Return the text of other messages; ``None`` if the template rejects them, such as a partial conversation."""
        try:
            return self.render(replace(conversation, messages=messages), "", generation_prompt=generation_prompt)[0]
        except DataError:
            return None


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _with_null(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with null as content, if it has calls and no text."""
    return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message


def find_template(choice: str | None, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> ChatTemplate | None:
    """Return the template of ``data.chat_template``; ``None`` if it is null and the tokenizer has no template.

    The ``choice`` is one of :data:`NAMES`, or a file; the values ``kwargs`` are ``data.chat_template_kwargs``, which
    those of a row override.

    Raises:
        ConfigError: The file does not exist, or the tokenizer lacks special tokens that a named template needs.
    """
    variables = {**tokenizer.special_tokens_map, **(kwargs or {})}
    if choice in _NEEDS:
        return ChatTemplate(_named(choice, tokenizer), variables)
    if choice is not None:
        try:
            return ChatTemplate(Path(choice).expanduser().read_text(encoding="utf-8"), variables)
        except (OSError, UnicodeDecodeError) as error:
            near = difflib.get_close_matches(choice, _NEEDS, n=1)
            fix = f"write {_FIELD}: {near[0]}" if near else "check the name or path"
            raise ConfigError(_FIELD, f"{choice} ({error})", _ALLOWED, fix) from error
    if not tokenizer.chat_template:
        return None
    return ChatTemplate(tokenizer.get_chat_template(), variables, tokenizer.get_chat_template(tools=[]))


def no_template(given: str) -> ConfigError:
    """Build the error for data (``given``) that needs a chat template where none is set."""
    given = f"null with {given}, and the tokenizer has no chat template (typical of a base model)"
    return ConfigError(_FIELD, given, _ALLOWED, f"set {_FIELD}: chatml")


def _named(name: str, tokenizer: Any) -> str:
    source = resources.files("lit_fsdp.data").joinpath("named_templates", f"{name}.jinja").read_text(encoding="utf-8")
    missing = [token for token in _NEEDS[name].split() if token not in tokenizer.added_tokens_encoder]
    given = f"{name}, and the tokenizer lacks {', '.join(missing)}"
    allowed = "a template whose special tokens the tokenizer has; zephyr and plain need only EOS"
    require(not missing, _FIELD, given, allowed, f"set model.add_tokens: {json.dumps(missing)}, or set {_FIELD}: plain")
    fits = tokenizer.eos_token is not None or "eos_token" not in source
    require(fits, _FIELD, f"{name}, and the tokenizer has no EOS", "one with eos_token", f"set {_FIELD}: chatml")
    if tokenizer.convert_ids_to_tokens(added_tokens(tokenizer)[0]) == [tokenizer.bos_token]:
        source = "{{- bos_token }}" + source
    if "▁a" not in tokenizer.get_vocab() or "Ġa" in tokenizer.get_vocab():
        # SentencePiece words start with their space even after a special token
        source = source.replace("{%- set gap = ' ' %}", "{%- set gap = '' %}")
    return source
