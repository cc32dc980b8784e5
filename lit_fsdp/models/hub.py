"""Models and tokenizers by name from the Hugging Face hub; every failure says what to do instead."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import errors, snapshot_download

from lit_fsdp.errors import ConfigError

_TOKENIZER = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_WEIGHTS = "*.safetensors"
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors"]


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
        ConfigError: The name is unknown, not granted, or cannot be reached.
    """
    wanted = _TOKENIZER + ["*.py"] * trust_remote_code
    folder = _fetch(name, "model.name", [*wanted, _WEIGHTS])
    if not list(folder.glob(_WEIGHTS)):
        folder = _fetch(name, "model.name", [*wanted, "*.bin"])
    return folder


def _fetch(name: str, field: str, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_OTHER_FORMATS))
    except errors.GatedRepoError as error:
        fix = f"accept the terms at {huggingface_hub.constants.ENDPOINT}/{name}, then run hf auth login or set HF_TOKEN"
        raise ConfigError(field, f"{name}, which is gated", "a model that you have access to", fix) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        fix = f"check the spelling; for a private one run hf auth login or set HF_TOKEN; for a folder write ./{name}"
        allowed = "the name of a repository on the hub, or a path that exists"
        raise ConfigError(field, f"{name}, which the hub does not know", allowed, fix) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        fix = (
            f"download it where there is a network (hf download {name} --local-dir {Path(name).name}) and name that"
            f" folder; if {name} is meant to be a folder, it does not exist here"
        )
        reason = " ".join(str(error).split())[:160]
        allowed = "a repository that can be reached or is in the local hub cache"
        raise ConfigError(field, f"{name}, which could not be fetched ({reason})", allowed, fix) from error
