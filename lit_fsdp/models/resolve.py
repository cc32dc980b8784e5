"""From what the recipe names to a config, a folder of weights and a tokenizer."""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.added_tokens import with_added_tokens
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.convert import convert_checkpoint, convert_gguf
from lit_fsdp.models.hub import fetch_config, fetch_model
from lit_fsdp.models.miniature import HUB_NAMES_KEY, shipped_config, shrink
from lit_fsdp.models.names import has_safetensors, match_names, stored_tensors
from lit_fsdp.models.source import ModelSource
from lit_fsdp.models.text_part import text_part
from lit_fsdp.models.tokenizers import add_special_tokens, miniature_tokenizer, read_tokenizer

__all__ = ["ModelSource", "resolve_architecture", "resolve_model"]

_log = logging.getLogger(__name__)
_FIELD = "model.name"
_BAD_CONFIG = (ValueError, TypeError, KeyError, StrictDataclassError)


def resolve_model(config: ModelConfig, seed: int) -> ModelSource:
    """Find what ``config`` names, converting it once if it cannot be read shard by shard as it is.

    Safe to call in every process: downloads and conversions happen in one, the others wait. A miniature never asks
    the hub and reads no weights.

    Args:
        config: A folder, GGUF file, hub name (weights), config .json or mapping (random initialisation).
        seed: Of random initialisation; only named in the label here.

    Raises:
        ConfigError: Nothing usable is there; the error says what is.
        CheckpointError: Files are damaged, lack tensors, or cannot be converted.
    """
    if config.name is None:
        raise ConfigError(_FIELD, None, "a hub name, folder, GGUF file or config", "name a model")
    if config.miniature:
        return _miniature(config, seed)
    return with_added_tokens(_as_it_is(config, seed), config)


def _as_it_is(config: ModelConfig, seed: int) -> ModelSource:
    """The model without the recipe's own tokens."""
    assert config.name is not None
    if isinstance(config.name, Mapping) or config.name.endswith(".json"):
        hf_config = _from_values(*_values(config.name))
        label = f"{_label(config.name)}, random init (seed {seed})"
        return ModelSource(hf_config, None, config.tokenizer, label)
    path = Path(config.name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        folder = convert_gguf(path)
    elif path.is_dir():
        folder = path
    else:
        if path.exists() or _is_path(config.name):
            raise _no_such_path(config.name)
        folder = fetch_model(config.name, config.trust_remote_code)
        return dataclasses.replace(_from_folder(folder, config), hub_name=config.name, base=config.name)
    return dataclasses.replace(_from_folder(folder, config), base=str(folder.resolve()))


def resolve_architecture(config: ModelConfig) -> PretrainedConfig:
    """The architecture that ``config`` names; no weights are looked for, let alone read.

    Raises:
        ConfigError: No config is at hand for it; the error says what is.
    """
    name = config.name
    if config.miniature or name is None or isinstance(name, Mapping) or name.endswith(".json"):
        return resolve_model(config, seed=0).hf_config
    hf_config = _architecture(name, config)
    if not config.add_tokens:
        return hf_config
    source = ModelSource(hf_config, None, config.tokenizer or name, _label(name))
    try:
        return with_added_tokens(source, config).hf_config
    except ConfigError as error:
        if error.field != "model.tokenizer" or config.tokenizer is not None:
            raise
        _log.warning("model.add_tokens: no tokenizer at hand for %s, so their rows are not counted", _label(name))
        return hf_config


def _architecture(name: str, config: ModelConfig) -> PretrainedConfig:
    """Of a folder, GGUF file or hub repository, as it is there."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _trainable(_read_config(path, config.trust_remote_code), name)
    if path.is_file() and path.suffix == ".gguf":
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    if path.exists() or _is_path(name):
        raise _no_such_path(name)
    values = shipped_config(name, exact=True)
    if values is not None:
        return _from_values(values, name)
    return _trainable(_read_config(fetch_config(name, config.trust_remote_code), config.trust_remote_code), name)


def _trainable(hf_config: PretrainedConfig, name: str) -> PretrainedConfig:
    if getattr(hf_config, "quantization_config", None):
        fix = "start from the model's bf16 or fp32 version"
        raise ConfigError(_FIELD, f"{name}, which is quantized", "weights that can be trained", fix)
    return hf_config


def _from_folder(folder: Path, config: ModelConfig) -> ModelSource:
    hf_config = _trainable(_read_config(folder, config.trust_remote_code), str(config.name))
    label = _label(config.name)
    tokenizer = config.tokenizer or str(folder)
    if has_safetensors(folder):
        model = build_on_meta(hf_config, "eager", config.trust_remote_code)
        match = match_names(model, stored_tensors(folder))
        fits = not match.misshapen and not (match.missing and match.unexpected)
        if fits:
            return ModelSource(hf_config, folder, tokenizer, label)
    elif not list(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            _FIELD,
            f"{folder}, a folder with config.json but no weights",
            "model.safetensors or its index beside config.json",
            f"for random init name {folder / 'config.json'}",
        )
    return ModelSource(hf_config, convert_checkpoint(folder, config.trust_remote_code), tokenizer, label)


def _miniature(config: ModelConfig, seed: int) -> ModelSource:
    assert config.name is not None
    local = Path(config.name).expanduser() if isinstance(config.name, str) else None
    tokenizer_folders = [Path(config.tokenizer).expanduser()] if config.tokenizer else [local] if local else []
    tokenizer = next((str(f) for f in tokenizer_folders if (f / "tokenizer.json").is_file()), None)
    if local is not None and (local / "config.json").is_file():
        full = _read_config(local, config.trust_remote_code)
    elif isinstance(config.name, Mapping) or config.name.endswith(".json"):
        full = _from_values(*_values(config.name))
    else:
        values = shipped_config(config.name)
        if values is not None:
            full = _from_values(values, config.name)
        elif local is not None and local.suffix == ".gguf" and local.is_file():
            full = AutoConfig.from_pretrained(local.parent, gguf_file=local.name, local_files_only=True)
        else:
            raise ConfigError(
                _FIELD,
                f"{config.name} with miniature: true",
                "a model whose config is at hand: a folder, a config .json, or one that ships in configs/model",
                "download its config.json and name that file",
            )
    label = f"{_label(config.name)} miniature, random init (seed {seed})"
    loaded = read_tokenizer(tokenizer, config.trust_remote_code) if tokenizer else miniature_tokenizer()
    add_special_tokens(loaded, config.add_tokens or ())
    small = shrink(full, loaded, config.trust_remote_code)
    layers, hidden = (getattr(small, key, "?") for key in ("num_hidden_layers", "hidden_size"))
    _log.info(
        "miniature: model.name: %s → %s of %s layers, hidden size %s, random init",
        _label(config.name),
        small.model_type,
        layers,
        hidden,
    )
    if tokenizer is None:
        _log.info(
            "miniature: model.tokenizer: %s → %d byte-level tokens made here",
            config.tokenizer or "the model's",
            len(loaded),
        )
    return ModelSource(small, None, tokenizer, label)


def _values(name: str | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The keys of an inline config or of a config file, and where they stand."""
    if isinstance(name, Mapping):
        return dict(name), _FIELD
    path = Path(name).expanduser()
    if not path.is_file():
        raise _no_such_path(name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except ValueError as error:
        raise ConfigError(
            _FIELD, f"{name}, which is no JSON ({error})", "a Hugging Face config.json", "mend it"
        ) from error
    return values if isinstance(values, dict) else {}, name


def _special_float(values: dict[str, Any]) -> Any:
    """Transformers writes infinity as ``{"__float__": "Infinity"}``, which JSON has no number for."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _from_values(values: dict[str, Any], where: str) -> PretrainedConfig:
    values = {key: value for key, value in values.items() if key != HUB_NAMES_KEY}
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


def _is_path(name: str) -> bool:
    """Whether ``name`` can only be meant as a path: hub names have at most one slash and no file ending of ours."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".json", "/"))


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
