"""From what the recipe names to a config, a folder of weights and a tokenizer."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.added_tokens import with_added_tokens
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.convert import convert_checkpoint, convert_gguf
from lit_fsdp.models.hub import fetch_config, fetch_model
from lit_fsdp.models.miniature import HUB_NAMES_KEY, shipped_config, shrink
from lit_fsdp.models.names import has_safetensors, match_names, stored_tensors
from lit_fsdp.models.quiet import reading
from lit_fsdp.models.source import ModelSource
from lit_fsdp.models.text_part import text_part
from lit_fsdp.models.tokenizers import add_special_tokens, load_tokenizer, miniature_tokenizer, read_tokenizer

_log = logging.getLogger(__name__)
_FIELD = "model.name"
_BAD_CONFIG = (ValueError, TypeError, KeyError, StrictDataclassError)


def resolve_model(config: ModelConfig, seed: int, with_weights: bool = True) -> ModelSource:
    """Find what ``config`` names, converting it once if it cannot be read shard by shard as it is.

    Safe to call in every process: conversions happen in one, the others wait. A miniature never asks the hub and
    reads no weights.

    Args:
        config: A folder, GGUF file, hub name (weights), config .json or mapping (random initialization).
        seed: Of random initialization; only named in the label here.
        with_weights: Else nothing large is fetched or converted, and the result has no weights.

    Raises:
        ConfigError: Nothing usable is there; the error says what is.
        CheckpointError: Files are damaged, lack tensors, or cannot be converted.
    """
    if config.name is None:
        raise ConfigError(_FIELD, None, "a hub name, folder, GGUF file or config", "name a model")
    if config.miniature:
        return _miniature(config, seed)
    name, kind, label = config.name, _kind_of(config.name), _label(config.name)
    if isinstance(name, Mapping) or kind == "config":
        source = ModelSource(_from_values(name), None, config.tokenizer, f"{label}, random init (seed {seed})")
    elif with_weights:
        folder = _folder_of(kind, name, config)
        hf_config = _trainable(_read_config(folder, config.trust_remote_code), name)
        weights = _readable(folder, hf_config, config)
        source = ModelSource(hf_config, weights, config.tokenizer or str(folder), label, base=str(folder.resolve()))
        if kind == "hub":
            source = dataclasses.replace(source, hub_name=name, base=name)
    else:
        source = ModelSource(_architecture(kind, name, config), None, config.tokenizer or name, label)
    return with_added_tokens(source, config)


def resolve_architecture(config: ModelConfig) -> PretrainedConfig:
    """The architecture that ``config`` names; no weights are looked for, let alone read.

    Raises:
        ConfigError: No config is at hand for it; the error says what is.
    """
    try:
        return resolve_model(config, 0, with_weights=False).hf_config
    except ConfigError as error:
        if not config.add_tokens or error.field != "model.tokenizer" or config.tokenizer is not None:
            raise
    _log.warning("model.add_tokens: no tokenizer at hand for %s, so their rows are not counted", _label(config.name))
    return resolve_model(dataclasses.replace(config, add_tokens=None), 0, with_weights=False).hf_config


def resolve_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that training uses, to the last token: no weights are read, fetched or converted.

    Raises:
        ConfigError: No tokenizer or no config is at hand, or they do not fit each other.
    """
    return load_tokenizer(resolve_model(config, 0, with_weights=False), config)


def _kind_of(name: str | Mapping[str, Any]) -> Literal["config", "gguf", "folder", "hub"]:
    """What a model is named by.

    Raises:
        ConfigError: A path to nothing, or to no model.
    """
    if isinstance(name, Mapping):
        return "config"
    path = Path(name).expanduser()
    if path.is_dir():
        return "folder"
    if path.is_file() and path.suffix in (".json", ".gguf"):
        return "config" if path.suffix == ".json" else "gguf"
    # hub names have at most one slash and no file ending of ours
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".json")):
        raise _no_such_path(name)
    return "hub"


def _folder_of(kind: str, name: str, config: ModelConfig) -> Path:
    if kind == "hub":
        return fetch_model(name, config.trust_remote_code)
    path = Path(name).expanduser()
    return convert_gguf(path) if kind == "gguf" else path


def _architecture(kind: str, name: str, config: ModelConfig) -> PretrainedConfig:
    """Of a folder, GGUF file or hub repository, as it is there."""
    path = Path(name).expanduser()
    if kind == "gguf":
        with reading(path):
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    values = shipped_config(name, exact=True) if kind == "hub" else None
    if values is not None:
        return _from_values(values, name)
    folder = fetch_config(name, config.trust_remote_code) if kind == "hub" else path
    return _trainable(_read_config(folder, config.trust_remote_code), name)


def _trainable(hf_config: PretrainedConfig, name: str) -> PretrainedConfig:
    if getattr(hf_config, "quantization_config", None):
        fix = "start from the model's bf16 or fp32 version"
        raise ConfigError(_FIELD, f"{name}, which is quantized", "weights that can be trained", fix)
    return hf_config


def _readable(folder: Path, hf_config: PretrainedConfig, config: ModelConfig) -> Path:
    """``folder``, or what it is converted to."""
    if has_safetensors(folder):
        model = build_on_meta(hf_config, "eager", config.trust_remote_code)
        match = match_names(model, stored_tensors(folder))
        if not match.misshapen and not (match.missing and match.unexpected):
            return folder
    elif not list(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            _FIELD,
            f"{folder}, a folder with config.json but no weights",
            "model.safetensors or its index beside config.json",
            f"for random init name {folder / 'config.json'}",
        )
    return convert_checkpoint(folder, config.trust_remote_code)


def _miniature(config: ModelConfig, seed: int) -> ModelSource:
    assert config.name is not None
    full = _config_at_hand(config.name, config)
    found = Path(config.tokenizer or (config.name if isinstance(config.name, str) else "")).expanduser()
    tokenizer = str(found) if (found / "tokenizer.json").is_file() else None
    loaded = read_tokenizer(tokenizer, config.trust_remote_code) if tokenizer else miniature_tokenizer()
    add_special_tokens(loaded, config.add_tokens or ())
    small, label = shrink(full, loaded, config.trust_remote_code), _label(config.name)
    layers, hidden = (getattr(small, key, "?") for key in ("num_hidden_layers", "hidden_size"))
    sizes = (label, small.model_type, layers, hidden)
    _log.info("miniature: model.name: %s → %s of %s layers, hidden size %s, random init", *sizes)
    if tokenizer is None:
        given = config.tokenizer or "the model's"
        _log.info("miniature: model.tokenizer: %s → %d byte-level tokens made here", given, len(loaded))
    return ModelSource(small, None, tokenizer, f"{label} miniature, random init (seed {seed})")


def _config_at_hand(name: str | Mapping[str, Any], config: ModelConfig) -> PretrainedConfig:
    """Of the model itself, or the one shipped for its name; the hub is not asked."""
    if isinstance(name, Mapping) or name.endswith(".json"):
        return _from_values(name)
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return _read_config(path, config.trust_remote_code)
    values = shipped_config(name)
    if values is not None:
        return _from_values(values, name)
    if path.is_file() and path.suffix == ".gguf":
        return _architecture("gguf", name, config)
    raise ConfigError(
        _FIELD,
        f"{name} with miniature: true",
        "a model whose config is at hand: a folder, a config .json, or one that ships in configs/model",
        "download its config.json and name that file",
    )


def _values_of_file(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    if not path.is_file():
        raise _no_such_path(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except ValueError as error:
        raise ConfigError(
            _FIELD, f"{name}, which is no JSON ({error})", "a Hugging Face config.json", "mend it"
        ) from error
    return values if isinstance(values, dict) else {}


def _special_float(values: dict[str, Any]) -> Any:
    """Transformers writes infinity as ``{"__float__": "Infinity"}``, which JSON has no number for."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _from_values(given: str | Mapping[str, Any], where: str = _FIELD) -> PretrainedConfig:
    """Of an inline config or a config file."""
    if isinstance(given, str):
        return _from_values(_values_of_file(given), given)
    values = {key: value for key, value in given.items() if key != HUB_NAMES_KEY}
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        close = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), n=3, cutoff=0.5)
        raise ConfigError(
            _FIELD,
            f"model_type {model_type!r} in {where}",
            "a model type of transformers",
            f"write model_type: {' or '.join(close) or 'llama'}",
        )
    try:
        return text_part(AutoConfig.for_model(model_type, **values), where)
    except _BAD_CONFIG as error:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(_FIELD, f"{where} ({text})", f"a valid {model_type} config", "correct that key") from error


def _read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            _FIELD,
            f"{folder}, a folder without config.json",
            "a Hugging Face model folder",
            f"name one of what is there: {_listing(folder)}; of a training checkpoint, export it first",
        )
    try:
        found = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        return text_part(found, folder.name)
    except (*_BAD_CONFIG, OSError) as error:
        text = " ".join(str(error).split())[:300]
        if "trust_remote_code" in text:
            fix = "set trust_remote_code: true, after you have read that code"
        else:
            fix = "mend config.json, or use a transformers that knows this model"
        raise ConfigError(
            _FIELD, f"{folder / 'config.json'} ({text})", "a config transformers can read", fix
        ) from error


def _no_such_path(name: str) -> ConfigError:
    path = Path(name).expanduser()
    parent = path.parent
    if path.exists():
        return ConfigError(_FIELD, f"{name}, which is no model", "a folder, GGUF file or config .json", "name one")
    while not parent.is_dir():
        parent = parent.parent
    fix = f"name what exists; in {parent.resolve()}: {_listing(parent, path.name)}"
    return ConfigError(_FIELD, f"{name}, which does not exist", "a folder, GGUF file, config .json or hub name", fix)


def _listing(folder: Path, wanted: str = "") -> str:
    entries = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    close = difflib.get_close_matches(wanted, entries, n=4, cutoff=0.4)
    return ", ".join(close or entries[:8]) or "nothing"


def _label(name: str | Mapping[str, Any] | None) -> str:
    if isinstance(name, Mapping):
        return str(name.get("model_type", "model"))
    path = Path(str(name))
    if path.name == "config.json" and path.parent.name:
        return path.parent.name
    return path.stem if path.suffix in (".gguf", ".json") else path.name
