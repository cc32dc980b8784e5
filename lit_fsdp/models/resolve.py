"""From what the recipe names to a config, a folder of weights and a tokenizer."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.host import cache_root, make_once
from lit_fsdp.models.build import build_on_meta, vocabulary_tensors
from lit_fsdp.models.convert import convert
from lit_fsdp.models.hub import fetch, reading
from lit_fsdp.models.miniature import HUB_NAMES_KEY, shipped_config, shrink
from lit_fsdp.models.tokenizers import (
    add_special_tokens,
    find_tokenizer,
    load_tokenizer,
    miniature_tokenizer,
    read_tokenizer,
)
from lit_fsdp.models.weights import (
    ModelSource,
    Stored,
    files_key,
    has_safetensors,
    match_names,
    open_weights,
    stored_tensors,
)

_log = logging.getLogger(__name__)
_FIELD = "model.name"
_CHUNK_ROWS = 8192  # of which a sum is made at a time, in fp64


def resolve_model(config: ModelConfig, seed: int = 0, with_weights: bool = True) -> ModelSource:
    """Find what ``config`` names, converting it once if it cannot be read shard by shard as it is.

    Safe to call in every process: conversions happen in one, the others wait. A miniature never asks the hub and
    reads no weights. Without ``with_weights`` nothing large is fetched or converted, and the result has none.

    Raises:
        ConfigError: Nothing usable is there.
        CheckpointError: Files are damaged, lack tensors, or cannot be converted.
    """
    if (name := config.name) is None:
        raise ConfigError(_FIELD, "null", "a hub name, folder, GGUF file or config", "name the model")
    hf_config, folder = _find(name, config, with_weights and not config.miniature)
    label, tokenizer = _label(name), config.tokenizer
    if config.miniature:
        return _miniature(hf_config, config, label, seed)
    if isinstance(name, Mapping) or name.endswith(".json"):
        source = ModelSource(hf_config, None, tokenizer, f"{label}, random init (seed {seed})")
    elif folder is None:
        source = ModelSource(hf_config, None, tokenizer or name, label)
    else:
        weights = _readable(folder, hf_config, config.trust_remote_code)
        hub_name = None if Path(name).expanduser().exists() else name
        base = hub_name or str(folder.resolve())
        source = ModelSource(hf_config, weights, tokenizer or str(folder), label, hub_name, base)
    return _with_added_tokens(source, config)


def resolve_architecture(config: ModelConfig) -> PretrainedConfig:
    """The architecture that ``config`` names; no weights are looked for, let alone read."""
    return resolve_model(config, with_weights=False).hf_config


def resolve_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that training uses, to the last token: no weights are read, fetched or converted."""
    return load_tokenizer(resolve_model(config, with_weights=False), config)


def prepare_model(config: ModelConfig) -> dict[str, str | None]:
    """Bring all that a run needs of a model into the caches of this node; names and shapes of tensors are compared."""
    source = resolve_model(config)
    open_weights(source, build_on_meta(source.hf_config, "eager", config.trust_remote_code), 0)
    load_tokenizer(source, config)
    tokenizer = source.tokenizer_source
    return {
        "weights": str(source.weights_folder) if source.weights_folder else None,
        "tokenizer": tokenizer and str(find_tokenizer(tokenizer, config.trust_remote_code)),
        "hub_name": source.hub_name,
    }


def _find(
    name: str | Mapping[str, Any], config: ModelConfig, with_weights: bool
) -> tuple[PretrainedConfig, Path | None]:
    """The config that ``name`` stands for, and the folder of its weights, if it has any and they are wanted."""
    if isinstance(name, Mapping):
        return _config_of(name, _FIELD), None
    path = Path(name).expanduser()
    is_gguf = path.suffix == ".gguf" and path.is_file()
    if path.suffix == ".json" and path.is_file():
        with reading(path):
            values = PretrainedConfig.get_config_dict(path)[0]
        return _config_of(values, name), None
    if is_gguf and not with_weights:
        with reading(path):
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True), None
    shipped = None if with_weights or path.exists() else shipped_config(name, exact=not config.miniature)
    if shipped is not None:
        return _config_of(shipped, name), None
    if path.is_dir():
        folder = path
    elif is_gguf:
        folder = convert(path, config.trust_remote_code)
    else:
        _check_hub_name(name, config)
        folder = fetch(name, "model" if with_weights else "config", config.trust_remote_code)
    return _read_config(folder, config.trust_remote_code), folder if with_weights else None


def _check_hub_name(name: str, config: ModelConfig) -> None:
    allowed = "a model whose config is at hand: a folder, a config .json, or one that ships in configs/model"
    fix = "download its config.json and name that file"
    require(not config.miniature, _FIELD, f"{name} with miniature: true", allowed, fix)
    path = Path(name).expanduser()
    # hub names have at most one slash and no file ending of ours
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.suffix in (".gguf", ".json"):
        given = f"{name}, which {'is no model' if path.exists() else 'does not exist'}"
        close = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*")], cutoff=0.4)
        fix = f"write {path.parent / close[0]}" if close and not path.exists() else ""
        raise ConfigError(_FIELD, given, "a folder, GGUF file, config .json or hub name", fix)


def _readable(folder: Path, hf_config: PretrainedConfig, trust_remote_code: bool) -> Path:
    if has_safetensors(folder):
        match = match_names(build_on_meta(hf_config, "eager", trust_remote_code), stored_tensors(folder))
        if not match.misshapen and not (match.missing and match.unexpected):
            return folder
    else:
        allowed = "model.safetensors or its index, or .bin files, beside config.json"
        fix = f"for random init name {folder / 'config.json'}; to fetch all of it: lit-fsdp model prepare --name NAME"
        require(any(folder.glob("pytorch_model*.bin")), _FIELD, f"{folder}, without weights", allowed, fix)
    return convert(folder, trust_remote_code)


def _miniature(full: PretrainedConfig, config: ModelConfig, label: str, seed: int) -> ModelSource:
    given = config.tokenizer or (config.name if isinstance(config.name, str) else "")
    tokenizer = given if (Path(given).expanduser() / "tokenizer.json").is_file() else None
    loaded = read_tokenizer(tokenizer, config.trust_remote_code) if tokenizer else miniature_tokenizer()
    add_special_tokens(loaded, config.add_tokens or ())
    small = shrink(full, loaded, config.trust_remote_code)
    sizes = (small.model_type, small.num_hidden_layers, small.hidden_size)
    _log.info("miniature: model.name: %s → %s of %s layers, hidden size %s, random init", label, *sizes)
    if tokenizer is None:
        text = "miniature: model.tokenizer: %s → %d byte-level tokens made here"
        _log.info(text, config.tokenizer or "the model's", len(loaded))
    return ModelSource(small, None, tokenizer, f"{label} miniature, random init (seed {seed})")


def _config_of(values: Mapping[str, Any], where: str) -> PretrainedConfig:
    values = {key: value for key, value in values.items() if key != HUB_NAMES_KEY}
    model_type = values.pop("model_type", None)
    close = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), n=1) or ["llama"]
    given, fix = f"model_type {model_type!r} in {where}", f"write model_type: {close[0]}"
    require(model_type in CONFIG_MAPPING, _FIELD, given, "a model type of transformers", fix)
    with reading(where, fix=f"correct that key of the {model_type} config"):
        return _text_part(AutoConfig.for_model(model_type, **values), where)


def _read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    fix = (
        "name a Hugging Face model folder (of a training checkpoint, export it first); for a model with its own code"
        " set trust_remote_code: true, after you have read that code"
    )
    with reading(folder, fix=fix):
        found = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    is_packed = getattr(found, "quantization_config", None)
    fix = "start from the model's bf16 or fp32 version"
    require(not is_packed, _FIELD, f"{folder}, which is quantized", "weights that can be trained", fix)
    return _text_part(found, folder.name)


def _text_part(hf_config: PretrainedConfig, where: str) -> PretrainedConfig:
    """The config of the language model inside of one that also sees, where it is known to work without the rest.

    On the hub Gemma 3 4B and larger are ``gemma3``, and transformers builds their vision tower too for a causal LM.
    Rows of text never reach it. What is saved and exported is the text model.
    """
    text = hf_config.get_text_config()
    if hf_config.model_type != "gemma3" or text.model_type != "gemma3_text":
        return hf_config
    text.architectures = ["Gemma3ForCausalLM"]
    _log.info("%s sees images too (gemma3): its text part is used alone (gemma3_text)", where)
    return text


def _label(name: str | Mapping[str, Any]) -> str:
    if isinstance(name, Mapping):
        return str(name.get("model_type", "model"))
    path = Path(name)
    if path.name == "config.json":
        return path.absolute().parent.name
    return path.stem if path.suffix in (".gguf", ".json") else path.name


def _with_added_tokens(source: ModelSource, config: ModelConfig) -> ModelSource:
    """``source`` with a vocabulary that has a row for each token of ``model.add_tokens``; itself if none is named.

    Embedding and head are written once more, in fp32, to the cache, with the mean of the old rows in each new one: old
    logits stay as they were, and a new token starts less likely than the average of the old ones, where random values
    would make some the most likely of all. Rows beyond the tokenizer's tokens (a padded vocabulary) are used first.

    Source: https://nlp.stanford.edu/~johnhew/vocab-expansion.html (Hewitt, 2021).
    """
    if not config.add_tokens or source.tokenizer_source is None:
        return source
    tokenizer = read_tokenizer(source.tokenizer_source, config.trust_remote_code)
    num_used, num_stored = len(tokenizer), source.hf_config.get_text_config().vocab_size
    fresh = add_special_tokens(tokenizer, config.add_tokens)
    numbers = tokenizer.get_vocab()
    unnamed = [token for token in numbers if numbers[token] >= num_stored and token not in config.add_tokens]
    given = f"{len(unnamed)} tokens beyond the {num_stored} embeddings, which add_tokens does not name ({unnamed[:5]})"
    allowed = f"the tokenizer that belongs to {source.label}, and in add_tokens every token without an embedding"
    require(not unnamed, "model.tokenizer", given, allowed)
    num_rows = max(num_stored, 1 + max(numbers[token] for token in config.add_tokens))
    ids = {numbers[token] for token in fresh} | set(range(num_stored, num_rows))
    if not ids:
        return source
    text = "model.add_tokens: %d new row(s) in embedding and head, which start at the mean of the others: %d rows → %d"
    _log.info(text, len(ids), num_stored, num_rows)
    overlay = None
    if source.weights_folder is not None:
        model = build_on_meta(source.hf_config, "eager", config.trust_remote_code)
        found = match_names(model, stored_tensors(source.weights_folder)).found
        stored = {one for name in vocabulary_tensors(model) if isinstance(one := found.get(name), Stored)}
        overlay = _written_overlay(stored, num_rows, sorted(ids), min(num_used, num_stored))
    grown = copy.deepcopy(source.hf_config)
    grown.get_text_config().vocab_size = num_rows
    return dataclasses.replace(source, hf_config=grown, overlay=overlay)


def _written_overlay(stored: Collection[Stored], num_rows: int, ids: list[int], num_used: int) -> Path:
    """The folder with these tensors grown to ``num_rows``, where the rows ``ids`` are the mean of the first ones."""
    key = files_key([one.file for one in stored], sorted(one.name for one in stored), num_rows, ids, num_used)

    def make(folder: Path) -> None:
        for number, one in enumerate(stored):
            values = one.read()
            sums = [part.double().sum(0) for part in values[:num_used].split(_CHUNK_ROWS)]
            grown = torch.empty(num_rows, *values.shape[1:])
            grown[: len(values)] = values
            grown[ids] = (torch.stack(sums).sum(0) / num_used).float()
            save_file({one.name: grown}, folder / f"{number}.safetensors")

    return make_once(cache_root() / "models" / f"tokens-{key}", make, f"adding {len(ids)} rows")
