"""Models and tokenizers by name from the Hugging Face hub; every failure says what to do instead."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors, snapshot_download

from lit_fsdp.errors import ConfigError
from lit_fsdp.redaction import HIDDEN, redact

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""What files of a folder are a tokenizer, as patterns."""
_TOKENIZER = ["*.json", "*.jinja", "merges.txt", *TOKENIZER_FILES]
_WEIGHTS = "*.safetensors"
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors"]
_NETWORK_ERROR: Any = errors.HfHubHTTPError.__bases__[0]  # of the library that huggingface_hub talks through
_AHEAD = "lit-fsdp model prepare --name {name}"


def fetch_tokenizer(name: str, trust_remote_code: bool) -> Path:
    """The local folder with the tokenizer of hub repository ``name``.

    Raises:
        ConfigError: The name is unknown, not granted, or cannot be reached.
    """
    return _fetch(name, "model.tokenizer", _TOKENIZER + ["*.py"] * trust_remote_code)


def fetch_config(name: str, trust_remote_code: bool) -> Path:
    """The local folder with the config of hub repository ``name``, without weights and tokenizer.

    Raises:
        ConfigError: The name is unknown, not granted, or cannot be reached.
    """
    return _fetch(name, "model.name", ["config.json"] + ["*.py"] * trust_remote_code)


def fetch_model(name: str, trust_remote_code: bool) -> Path:
    """The local folder with config, tokenizer and weights of hub repository ``name``; ``.bin`` files only if need be.

    Raises:
        ConfigError: The name is unknown, not granted, or cannot be reached, or its cached copy is not whole.
    """
    wanted = _TOKENIZER + ["*.py"] * trust_remote_code
    folder = _fetch(name, "model.name", [*wanted, _WEIGHTS])
    if not list(folder.glob(_WEIGHTS)):
        folder = _fetch(name, "model.name", [*wanted, "*.bin"])
    absent = _absent_files(folder)
    if absent:
        raise ConfigError(
            "model.name",
            f"{name}, whose copy in the hub cache ({folder}) lacks {', '.join(absent[:3])}",
            "a model that was downloaded whole",
            f"where there is a network, and with this cache, run {_AHEAD.format(name=name)}",
        )
    return folder


def _absent_files(folder: Path) -> list[str]:
    """Weight files that should be there: those of the index; without an index any will do."""
    for index in [*folder.glob("model.safetensors.index.json"), *folder.glob("pytorch_model.bin.index.json")]:
        named = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        absent = sorted(name for name in named if not (folder / name).is_file())
        if len(absent) < len(named):  # some are there, so this is the format in use
            return absent
    return [] if [*folder.glob(_WEIGHTS), *folder.glob("*.bin")] else ["its weights"]


def _fetch(name: str, field: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_OTHER_FORMATS))
    except (_NETWORK_ERROR, errors.HFValidationError, OSError) as error:
        raise _refusal(name, field, error) from error


def _refusal(name: str, field: str, error: Exception) -> ConfigError:
    """What the hub said, and what to do. No token is ever part of it."""
    chain: list[Any] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    token = huggingface_hub.get_token()
    said = redact(" ".join(str(error).split()))
    given = f"{name}, which could not be fetched ({(said.replace(token, HIDDEN) if token else said)[:200]})"
    allowed = "a repository that can be reached or is in the local hub cache"
    codes = [getattr(getattr(one, "response", None), "status_code", None) for one in chain]
    status = next((code for code in codes if code), None)
    log_in = "run hf auth login or set HF_TOKEN" + ("" if token else " (no token is set here)")
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        fix = "mend that place, or set HF_HOME (the hub's cache) to another"
        return ConfigError(field, given, "a cache with room", fix)
    if status == 429:
        fix = f"wait some minutes, {log_in} for a higher limit, and fetch it once ahead: {_AHEAD.format(name=name)}"
    elif status in (401, 403, 404) or isinstance(error, errors.HFValidationError):
        page = redact(f"{huggingface_hub.constants.ENDPOINT}/{name}")
        fix = f"check the spelling (for a folder write ./{name}); accept the terms at {page} if it is gated; {log_in}"
    else:
        fix = (
            f"run {_AHEAD.format(name=name)} where there is a network (a login node), with the same HF_HOME, then set"
            f" HF_HUB_OFFLINE=1 here; if {name} is meant to be a folder, it does not exist here"
        )
    return ConfigError(field, given, allowed, fix)
