"""Which chat template is used: the tokenizer's own, a file, or one of ours by name, with the tokens that it needs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lit_fsdp.data.text import added_tokens
from lit_fsdp.errors import ConfigError

NAMES = ("chatml", "llama3", "mistral", "gemma", "zephyr", "plain")
_NEEDS, _TOOLS = re.compile(r"needs: ([^\n]*?)\s*(?:-#}|\n)"), re.compile(r"tools: ([^\n]*?)\s*(?:-#}|\n)")
_FIELD = "data.chat_template"


@dataclass(frozen=True)
class FoundTemplate:
    """A chat template, and what is known of it."""

    default: str
    """Jinja text."""
    tool_use: str | None = None
    """Jinja text for rows with tools, if it is another one."""
    name: str | None = None
    """Of ours."""
    missing_for_tools: tuple[str, ...] = ()
    """Special tokens that rows with tools need and the tokenizer has not."""


def find_template(choice: str | None, tokenizer: Any) -> FoundTemplate | None:
    """The template of ``data.chat_template``; ``None`` if it is null and the tokenizer has none of its own.

    Args:
        choice: One of :data:`NAMES`, or a file with a Jinja template; ``None`` for the tokenizer's own.
        tokenizer: A fast tokenizer of transformers.

    Raises:
        ConfigError: No such file, or the tokenizer lacks special tokens that a named template needs.
    """
    if choice in NAMES:
        return _named(choice, tokenizer)
    if choice is not None:
        return FoundTemplate(_read(Path(choice).expanduser()))
    own = tokenizer.chat_template
    if not isinstance(own, Mapping):
        return FoundTemplate(str(own)) if own else None
    if not own:
        return None
    if "default" not in own:
        raise ConfigError(
            _FIELD,
            f"null, and the tokenizer has the chat templates {', '.join(sorted(own))}, none of them its default",
            f"{', '.join(NAMES)}, or a file with a Jinja template",
            "save the one you want to a file and name it",
        )
    return FoundTemplate(str(own["default"]), str(own["tool_use"]) if own.get("tool_use") else None)


def no_template(given: str, tokenizer: Any) -> ConfigError:
    """What to write where conversations come without a chat template.

    Args:
        given: What needs a template.
        tokenizer: Whose tokens decide which templates need none added.
    """
    fits, lacks = [], {}
    for name in NAMES:
        source = _source(name)
        missing = _missing(_tokens(_NEEDS, source), tokenizer)
        if missing:
            lacks[name] = missing
        elif tokenizer.eos_token is not None or "eos_token" not in source:
            fits.append(name)
    or_add = f"chatml with model.add_tokens: {list(lacks['chatml'])}" if "chatml" in lacks else ""
    with_tokens = ", ".join(f"{name} ({' '.join(missing)})" for name, missing in lacks.items())
    return ConfigError(
        _FIELD,
        f"null with {given}, and the tokenizer has no chat template of its own, as that of a base model",
        ", ".join([*fits, "a file with a Jinja template"]) + (f"; with tokens added: {with_tokens}" if lacks else ""),
        f"set data.chat_template: {', or '.join(filter(None, (next(iter(fits), ''), or_add)))}",
    )


def _named(name: str, tokenizer: Any) -> FoundTemplate:
    source = _source(name)
    missing = _missing(_tokens(_NEEDS, source), tokenizer)
    if missing:
        raise ConfigError(
            _FIELD,
            f"{name}, and the tokenizer lacks {', '.join(missing)}",
            "a template whose special tokens the tokenizer has; zephyr and plain need EOS alone",
            f"write model.add_tokens: {list(missing)}, or set data.chat_template: plain",
        )
    if tokenizer.eos_token is None and "eos_token" in source:
        raise ConfigError(
            _FIELD,
            f"{name}, and the tokenizer has no EOS",
            "a tokenizer with eos_token",
            "set data.chat_template: chatml",
        )
    if tokenizer.convert_ids_to_tokens(added_tokens(tokenizer)[0]) == [tokenizer.bos_token]:
        source = "{{- bos_token }}" + source
    if not _joins_blanks(tokenizer):
        source = source.replace("{%- set gap = ' ' %}", "{%- set gap = '' %}")
    return FoundTemplate(source, None, name, _missing(_tokens(_TOOLS, source), tokenizer))


def _source(name: str) -> str:
    return resources.files("lit_fsdp.data").joinpath("named_templates", f"{name}.jinja").read_text(encoding="utf-8")


def _tokens(pattern: re.Pattern[str], source: str) -> tuple[str, ...]:
    found = pattern.search(source.partition("#}")[0] + "#}")
    return tuple(found[1].split()) if found else ()


def _missing(needed: tuple[str, ...], tokenizer: Any) -> tuple[str, ...]:
    return tuple(token for token in needed if token not in tokenizer.added_tokens_encoder)


def _joins_blanks(tokenizer: Any) -> bool:
    """Whether words begin with their blank even after a special token, as SentencePiece has it."""
    return "▁a" in tokenizer.get_vocab() and "Ġa" not in tokenizer.get_vocab()


def _read(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(
            _FIELD,
            str(path),
            f"{', '.join(NAMES)}, or an existing file with a Jinja template",
            "check the name or path",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(_FIELD, f"{path} ({error})", "a readable file in UTF-8", "save the file as UTF-8") from error
    if not text.strip():
        raise ConfigError(_FIELD, f"{path}, which is empty", "a Jinja template", "check the path")
    return text
