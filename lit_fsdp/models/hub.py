"""Models and tokenizers by name from the Hugging Face hub; every failure says what to do instead.

All processes of a node may ask at once: one of them talks to the hub, and the others take what it has found.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors, snapshot_download

from lit_fsdp.errors import ConfigError
from lit_fsdp.host import cache_root, is_launched_by_lightning, locked
from lit_fsdp.redaction import HIDDEN, redact

TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
"""What files of a folder are a tokenizer, as patterns."""
_TOKENIZER = ["*.json", "*.jinja", "merges.txt", *TOKENIZER_FILES]
_WEIGHTS = "*.safetensors"
_OTHER_FORMATS = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors"]
_STARTED = time.time()  # of this process, near enough: what another one has found since then is fresh
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
    """The folder with the files of a repository; of processes that ask for it at the same time one asks the hub."""
    key = hashlib.blake2b(repr((name, patterns)).encode(), digest_size=6).hexdigest()
    place = cache_root() / "hub" / f"{name.replace('/', '--')[-80:]}-{key}.json"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_suffix(".lock"), f"fetching {name}"):
            found = _just_found(place)
            if found is None:
                found = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_OTHER_FORMATS))
                place.write_text(json.dumps({"folder": str(found), "time": time.time()}), encoding="utf-8")
            return found
    except (_NETWORK_ERROR, errors.HFValidationError, OSError) as error:
        raise _refusal(name, field, error) from error


def _just_found(place: Path) -> Path | None:
    """What another process of this run noted, if it is on this machine too: since this one started, or before.

    Lightning starts further ranks when the first has found everything; others are started together.
    """
    try:
        noted = json.loads(place.read_text(encoding="utf-8"))
        folder = Path(noted["folder"])
        is_fresh = noted["time"] > _STARTED or is_launched_by_lightning()
        return folder if is_fresh and folder.is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):  # nothing noted, or another process was stopped while writing
        return None


def _refusal(name: str, field: str, error: Exception) -> ConfigError:
    """What the hub said, in words to act on. No token is ever part of them."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    allowed = "a repository that can be reached or is in the local hub cache"
    for kind, given, fix in _reasons(name):
        if any(kind(one) for one in chain):
            return ConfigError(field, f"{name}, {given}", allowed, fix)
    token = huggingface_hub.get_token()
    text = redact(" ".join(str(error).split()))
    reason = (text.replace(token, HIDDEN) if token else text)[:160]
    if isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC):
        fix = "mend that place, or set HF_HOME (the hub's cache) and LIT_FSDP_CACHE to others"
        return ConfigError(field, f"{name}, which could not be written ({reason})", "a cache with room", fix)
    fix = (
        f"run {_AHEAD.format(name=name)} where there is a network (a login node), with the same HF_HOME, then set"
        f" HF_HUB_OFFLINE=1 here; if {name} is meant to be a folder, it does not exist here"
    )
    return ConfigError(field, f"{name}, which could not be fetched ({reason})", allowed, fix)


def _reasons(name: str) -> list[tuple[Any, str, str]]:
    """Which error it is, what is wrong, and what to do, the most telling first."""
    hub, ahead = huggingface_hub.constants.ENDPOINT, _AHEAD.format(name=name)
    has_token = huggingface_hub.get_token() is not None
    who = "the account of the token at hand" if has_token else "an account (no token is set here)"
    log_in = "run hf auth login or set HF_TOKEN"
    page = redact(f"{hub}/{name}")
    return [
        (
            lambda e: isinstance(e, errors.GatedRepoError),
            f"which is gated and not open to {who}",
            f"accept the terms at {page}, then {log_in}; on a node without a network run {ahead} outside first",
        ),
        (
            lambda e: _status(e) == 401 and has_token and not isinstance(e, errors.RepositoryNotFoundError),
            "for which the hub does not accept the token at hand",
            f"make a new one at {redact(hub)}/settings/tokens, and {log_in}",
        ),
        (
            lambda e: isinstance(e, (errors.RepositoryNotFoundError, errors.HFValidationError)),
            "which the hub does not know" + (" or does not show to this token's account" if has_token else ""),
            f"check the spelling; for a private one {log_in}; for a folder write ./{name}",
        ),
        (
            lambda e: _status(e) == 403,
            f"which the hub refuses to {who} (403)",
            f"use a token that may read it (a fine-grained one: public gated repositories ticked), and {log_in}",
        ),
        (
            lambda e: _status(e) == 429,
            "which the hub has been asked for too often (429)",
            f"wait some minutes, {log_in} for a higher limit, and fetch it once ahead: {ahead}",
        ),
        (
            lambda e: (
                isinstance(e, errors.OfflineModeIsEnabled)
                or (huggingface_hub.constants.HF_HUB_OFFLINE and isinstance(e, errors.LocalEntryNotFoundError))
            ),
            "which is not (whole) in the local hub cache, and HF_HUB_OFFLINE=1 forbids to fetch it",
            f"run {ahead} where there is a network (a login node), with the same HF_HOME; or unset HF_HUB_OFFLINE; if"
            f" {name} is meant to be a folder, it does not exist here",
        ),
    ]


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
