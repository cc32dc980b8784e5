"""Download models and tokenizers from the Hugging Face hub, upload exported models; errors include a fix."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, errors, snapshot_download
from safetensors import SafetensorError

from lit_fsdp.errors import ConfigError, require
from lit_fsdp.exit_codes import is_out_of_memory
from lit_fsdp.redaction import redact

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of tokenizer files in a folder."""
_TOKENIZER = ("*.json", "*.jinja", "merges.txt", *TOKENIZER_FILES)
_FILES = {"config": ("config.json",), "tokenizer": _TOKENIZER, "model": (*_TOKENIZER, "*.safetensors")}
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors"]
_UNREADABLE = (
    *(ImportError, OSError, ValueError, LookupError, TypeError, RuntimeError),
    *(errors.StrictDataclassError, pickle.UnpicklingError, SafetensorError),
)
_NETWORK_ERROR: Any = errors.HfHubHTTPError.__bases__[0]  # of the HTTP library that huggingface_hub uses


def fetch(
    name: str, what: Literal["config", "tokenizer", "model"], trust_remote_code: bool, revision: str | None = None
) -> Path:
    """Download the config, the tokenizer or all of the model of hub repository ``name``; returns its local folder.

    Files named ``.bin`` are downloaded only if the repository has no safetensors files.

    Raises:
        ConfigError: The repository is unknown, access is denied, or it cannot be reached.
    """
    wanted = [*_FILES[what], *["*.py"] * trust_remote_code]
    try:
        options: dict[str, Any] = {"revision": revision, "ignore_patterns": _OTHER_FORMATS}
        folder = Path(snapshot_download(name, allow_patterns=wanted, **options))
        if what == "model" and not list(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=[*wanted, "*.bin"], **options)
        return folder
    except (_NETWORK_ERROR, errors.HFValidationError, OSError) as error:
        field = "model.tokenizer" if what == "tokenizer" else "model.name"
        if isinstance(error, errors.HFValidationError):  # not the name of a repository, so a path was meant
            allowed = "a folder, GGUF file or config .json that exists, or a repository as owner/name"
            is_there = Path(name).expanduser().exists()
            given = f"{name}, which {'is neither a GGUF file nor a config .json' if is_there else 'does not exist'}"
            fix = f"check the path, which is relative to {Path.cwd()}, or the name"
            raise ConfigError(field, given, allowed, "name its folder" if is_there else fix) from None
        reason = redact(" ".join(str(error).split()))[:300]
        raise ConfigError(
            field,
            f"{name}, which is no folder in {Path.cwd()} and could not be fetched ({reason})",
            "a folder, GGUF file or config .json that exists, or a repository that can be reached or is in the cache",
            "for a gated model, accept its terms on the hub, then run hf auth login; without a network, run"
            f" lit-fsdp model prepare --name {name} on a machine with network and the same HF_HOME, or set model.name"
            " to a folder or GGUF file, such as that of make quickstart in runs/quickstart-data",
        ) from error


def push(folder: Path, name: str, private: bool) -> str:
    """Upload a folder to a hub repository, created if necessary; returns its URL.

    Raises:
        ConfigError: The hub refuses it or cannot be reached, the repository is public despite ``private``, or it has
            files of another model, such as a chat template, that would be read with those of the folder.
    """
    api, fix = HfApi(), f"the folder is kept; after fixing this, run hf upload {name} {folder}"
    try:
        made = api.create_repo(name, private=private or None, exist_ok=True)
        is_public = private and not api.repo_info(made.repo_id).private  # existing ones keep their visibility
        given = f"{name} with --private, but it is public"
        require(not is_public, "--push-to-hub", given, "a private repository", fix)
        stale = [name for name in api.list_repo_files(made.repo_id) if _is_read(name) and not (folder / name).exists()]
        given = f"{name} with {', '.join(stale[:5])}, which {folder} lacks and which would be loaded with its files"
        allowed, so = "a repository without them", f"hf repos delete-files {made.repo_id} {' '.join(stale)}; {fix}"
        require(not stale, "--push-to-hub", given, allowed, so)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Export by lit_fsdp")
    except (_NETWORK_ERROR, errors.HFValidationError, OSError) as error:
        given = f"{name}, which could not be pushed ({redact(' '.join(str(error).split()))[:300]})"
        allowed = "a repository that can be reached, and a token that may write to it"
        raise ConfigError("--push-to-hub", given, allowed, fix) from error
    return str(made)


def _is_read(name: str) -> bool:
    """Whether transformers or peft reads a file of a repository as part of a model."""
    patterns = (*_TOKENIZER, "*.safetensors", "*.bin")
    return name.startswith("additional_chat_templates/") or (
        "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)
    )


@contextmanager
def reading(
    source: Path | str,
    field: str = "model.name",
    fix: str = "check that the files are complete",
    allowed: str = "files that transformers can read and save",
) -> Iterator[None]:
    """Convert errors that transformers raises about a model or its files to a ConfigError that names the source."""
    try:
        yield
    except _UNREADABLE as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, ImportError):  # transformers describes the missing package, Python sets its name
            missing = "'lit-fsdp[gguf]'" if "gguf" in str(error).lower() else error.name
            fix = f"pip install {missing}" if missing else "install the package named in the error"
        given = f"{source} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        raise ConfigError(field, given, allowed, fix) from error
