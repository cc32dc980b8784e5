"""Resolve a recipe's model name to a config, a folder of weights and a tokenizer."""

import copy
import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.host import cache_root, make_once
from lit_fsdp.models.adapter_names import CONFIG_FILE, read_adapter_config
from lit_fsdp.models.build import build_on_meta, vocabulary_tensors
from lit_fsdp.models.convert import convert
from lit_fsdp.models.hub import fetch, reading
from lit_fsdp.models.miniature import HUB_NAMES_KEY, shipped_config, shrink
from lit_fsdp.models.overrides import ROPE_OF_A_MODEL, overridden
from lit_fsdp.models.tokenizers import add_special_tokens, load_tokenizer, miniature_tokenizer, read_tokenizer
from lit_fsdp.models.weights import (
    ModelSource,
    Stored,
    files_key,
    match_names,
    open_weights,
    refuse_quantized,
    stored_tensors,
)

_log = logging.getLogger(__name__)
_FIELD = "model.name"
_CHUNK_ROWS = 8192  # rows summed at a time, in fp64


def resolve_model(config: ModelConfig, with_weights: bool = True) -> ModelSource:
    """Find the model that ``config`` names, and convert it once if it cannot be read shard by shard.

    Safe to call in every process: one process converts, the others wait. A miniature never contacts the hub and
    reads no weights. Without ``with_weights`` no weights are downloaded or converted, and the result has none.

    Raises:
        ConfigError: No usable model was found.
        CheckpointError: Files are damaged, lack tensors, or cannot be converted.
    """
    name: Any = config.name
    require(name is not None, _FIELD, "no value", "a hub name, folder, GGUF file or config", "set model.name")
    hf_config, folder = _find(name, config, with_weights and not config.miniature)
    given = f"{name}, an encoder-decoder model ({hf_config.model_type}), whose decoder alone would be trained"
    fix = "train it as your own LightningModule (model.class_path), which fsdp_strategy shards as well"
    is_whole = not getattr(hf_config, "is_encoder_decoder", False)
    require(is_whole, _FIELD, given, "a causal language model", fix)
    is_random = isinstance(name, Mapping) or name.endswith(".json")
    if config.config_overrides:
        hf_config = overridden(hf_config, config.config_overrides, not is_random, config.trust_remote_code)
    if config.miniature:
        return _miniature(hf_config, config)
    if folder is None:
        source = ModelSource(hf_config, None, config.tokenizer or (None if is_random else name))
    else:
        weights = _readable(folder, hf_config, config.trust_remote_code)
        hub_name = None if Path(name).expanduser().exists() else name
        base = hub_name or str(folder.resolve())
        source = ModelSource(hf_config, weights, config.tokenizer or str(folder), hub_name, base)
    return _with_added_tokens(source, config)


def resolve_architecture(config: ModelConfig) -> PretrainedConfig:
    """The architecture that ``config`` names, without its weights."""
    return resolve_model(config, with_weights=False).hf_config


def prepare_model(config: ModelConfig) -> dict[str, str | None]:
    """Download all files that a run needs of a model to this node's caches, and check names and shapes of tensors."""
    source = resolve_model(config)
    open_weights(source, build_on_meta(source.hf_config, "eager", config.trust_remote_code), 0)
    load_tokenizer(source, config)
    weights = str(source.weights_folder) if source.weights_folder else None
    return {"weights": weights, "tokenizer": source.tokenizer_source}


def _find(name: Any, config: ModelConfig, with_weights: bool) -> tuple[PretrainedConfig, Path | None]:
    """The config of model ``name``, and the folder of its weights if it has any and ``with_weights`` is set."""
    if isinstance(name, Mapping):
        return _config_of(name, _FIELD), None
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        with reading(path):
            values = PretrainedConfig.get_config_dict(path)[0]
        return _config_of(values, name), None
    if path.is_file() and path.suffix == ".gguf":
        if with_weights:
            folder = convert(path, config.trust_remote_code)
        else:
            with reading(path):
                return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True), None
    elif path.is_dir():
        folder = path
    else:
        shipped = None if with_weights else shipped_config(name, exact=not config.miniature)
        if shipped is not None:
            return _config_of(shipped, name), None
        allowed = "a model with a local config: a folder, a config .json, or a config that ships in configs/model"
        fix = "download its config.json and name that file"
        require(not config.miniature, _FIELD, f"{name} with miniature: true", allowed, fix)
        folder = fetch(name, "model" if with_weights else "config", config.trust_remote_code)
    if (folder / CONFIG_FILE).is_file():
        base = read_adapter_config(folder).get("base_model_name_or_path")
        fix = (
            f"name its base ({base or 'not recorded'}) and resume from its checkpoint with --ckpt_path (lit-fsdp ckpt"
            " import converts the folder to one); or merge the two: lit-fsdp export --merge of that checkpoint, or"
            " peft's merge_and_unload"
        )
        raise ConfigError(_FIELD, f"{folder}, which contains an adapter", "a whole model", fix)
    fix = (
        "name a Hugging Face model folder (of a training checkpoint, export it first); for a model with its own code"
        " set trust_remote_code: true, after you have read that code"
    )
    with reading(folder, fix=fix):
        options = {"trust_remote_code": config.trust_remote_code, "local_files_only": True}
        found = AutoConfig.from_pretrained(folder, **options)
        values = PretrainedConfig.get_config_dict(folder)[0]
    _keep_rope(found, values, str(folder / "config.json"))
    packed, fix = values.get("quantization_config"), "start from the model's bf16 or fp32 version"
    if packed and packed.get("quant_method") == "mxfp4":  # unpacked while reading
        del found.quantization_config
        packed = None
    require(not packed, _FIELD, f"{folder}, which is quantized", "weights that can be trained, or in MXFP4", fix)
    return _text_part(found), folder if with_weights else None


def _readable(folder: Path, hf_config: PretrainedConfig, trust_remote_code: bool) -> Path:
    """``folder``, or the result of its conversion if names or shapes do not match the model."""
    if tensors := stored_tensors(folder):
        match = match_names(build_on_meta(hf_config, "eager", trust_remote_code), tensors)
        refuse_quantized(folder, match.unexpected)
        if not match.misshapen and not (match.missing and match.unexpected):
            return folder
    else:
        allowed = "model.safetensors or its index, or .bin files, beside config.json"
        fix = f"for random init name {folder / 'config.json'}; to download weights: lit-fsdp model prepare --name NAME"
        require(any(folder.glob("pytorch_model*.bin")), _FIELD, f"{folder}, without weights", allowed, fix)
    return convert(folder, trust_remote_code)


def _miniature(full: PretrainedConfig, config: ModelConfig) -> ModelSource:
    given = config.tokenizer or (config.name if isinstance(config.name, str) else "")
    tokenizer = given if (Path(given).expanduser() / "tokenizer.json").is_file() else None
    loaded = read_tokenizer(tokenizer, config.trust_remote_code) if tokenizer else miniature_tokenizer()
    add_special_tokens(loaded, config.add_tokens or ())
    small = shrink(full, loaded, config.trust_remote_code)
    sizes = (small.model_type, small.num_hidden_layers, small.hidden_size)
    _log.info("miniature: model.name: %s of %s layers, hidden size %s, random init", *sizes)
    if tokenizer is None:
        text = "miniature: model.tokenizer: %s → generated, %d byte-level tokens"
        _log.info(text, config.tokenizer or "the model's", len(loaded))
    return ModelSource(small, None, tokenizer)


def _config_of(values: Mapping[str, Any], where: str) -> PretrainedConfig:
    values = {key: value for key, value in values.items() if key != HUB_NAMES_KEY}
    with reading(where, fix="correct that key of the config"):
        found = AutoConfig.for_model(values.pop("model_type", None), **copy.deepcopy(values))
    _keep_rope(found, values, where)
    return _text_part(found)


def _keep_rope(config: PretrainedConfig, values: Mapping[str, Any], where: str) -> None:
    """Keep the model's ``rope_parameters``, in place, when ``rope_scaling`` is added, as model cards recommend.

    transformers replaces one mapping by the other: the key ``rope_theta`` silently becomes the default of the
    architecture.

    Raises:
        ConfigError: The scaling has no type, or has no effect next to parameters for each layer type.
    """
    for name, part in values.items():
        if isinstance(part, Mapping) and isinstance(inner := getattr(config, name, None), PretrainedConfig):
            _keep_rope(inner, part, f"{where}: {name}")
    saved, added = values.get("rope_parameters"), values.get("rope_scaling")
    live = getattr(config, "rope_parameters", None)
    own, theta = (saved or {}).get("rope_theta"), values.get("rope_theta")
    given = f"{where} with rope_theta {theta} and rope_parameters with {own}"
    fits = added or None in (own, theta) or own == theta
    require(fits, _FIELD, given, "one theta", "write rope_theta into rope_parameters, and drop the other")
    if not (saved and added and isinstance(live, dict)):
        return
    is_flat, was_flat = (not any(isinstance(one, Mapping) for one in part.values()) for part in (added, saved))
    kind = added.get("rope_type", added.get("type"))
    wanted = {**{key: value for key, value in added.items() if key != "type"}, "rope_type": kind}.items()
    layers = [live] if was_flat else [one for one in live.values() if isinstance(one, Mapping)]
    has_effect = kind and is_flat and any(wanted <= layer.items() for layer in layers)
    given = f"{where} with rope_scaling {added} and rope_parameters, which transformers does not combine"
    allowed = "one mapping with rope_type, rope_theta and the scaling, for each layer type that has its own"
    require(has_effect, _FIELD, given, allowed, "write the scaling into rope_parameters, and drop rope_scaling")
    lost = {key: saved[key] for key in ROPE_OF_A_MODEL if key in saved and key not in {**values, **added}}
    if lost and was_flat:
        config.rope_parameters.update(lost)
        _log.warning("%s: rope_scaling replaces rope_parameters, except for %s", where, lost)


def _text_part(hf_config: PretrainedConfig) -> PretrainedConfig:
    """The config of the language model in a vision-language model, if it is known to work on its own.

    On the hub Gemma 3 4B and larger are ``gemma3``, and transformers builds their vision tower too for a causal LM.
    Text never uses it. Only the text model is saved and exported.
    """
    text = hf_config.get_text_config()
    if hf_config.model_type != "gemma3" or text.model_type != "gemma3_text":
        return hf_config
    text.architectures = ["Gemma3ForCausalLM"]
    _log.info("model.name: gemma3 has a vision tower: using only its text model (gemma3_text)")
    return text


def _with_added_tokens(source: ModelSource, config: ModelConfig) -> ModelSource:
    """``source`` with a vocabulary row for each token of ``model.add_tokens``; unchanged if there are none.

    Embedding and head are written to the cache again, in fp32, with the mean of the old rows in each new row: old
    logits do not change, and a new token starts less likely than the average old token, while random values would make
    some new tokens the most likely of all. Unused rows of a padded vocabulary are used first.

    Source: https://nlp.stanford.edu/~johnhew/vocab-expansion.html (Hewitt, 2021).
    """
    if not config.add_tokens or source.tokenizer_source is None:
        return source
    tokenizer = read_tokenizer(source.tokenizer_source, config.trust_remote_code)
    num_used, num_stored = len(tokenizer), source.num_embeddings
    fresh = add_special_tokens(tokenizer, config.add_tokens)
    numbers = tokenizer.get_vocab()
    unnamed = [token for token in numbers if numbers[token] >= num_stored and token not in config.add_tokens]
    foreign = [token for token in unnamed if token not in tokenizer.added_tokens_encoder]
    given = f"{len(unnamed)} tokens beyond the {num_stored} embeddings, which add_tokens does not name ({unnamed[:5]})"
    allowed = "the tokenizer that belongs to the model: only added tokens may lack an embedding"
    require(not foreign, "model.tokenizer", given, allowed)
    num_rows = max(num_stored, 1 + max(numbers[token] for token in config.add_tokens))
    ids = sorted({numbers[token] for token in fresh} | set(range(num_stored, num_rows)))
    if not ids:
        return source
    overlay = None
    if source.weights_folder is not None:
        model = build_on_meta(source.hf_config, "eager", config.trust_remote_code)
        found = match_names(model, stored_tensors(source.weights_folder)).found
        stored = {one for name in vocabulary_tensors(model) if isinstance(one := found.get(name), Stored)}
        overlay = _written_overlay(stored, num_rows, ids, min(num_used, num_stored))
    grown = copy.deepcopy(source.hf_config)
    grown.get_text_config().vocab_size = num_rows
    return dataclasses.replace(source, hf_config=grown, overlay=overlay)


def _written_overlay(stored: Collection[Stored], num_rows: int, ids: list[int], num_used: int) -> Path:
    """The folder with these tensors grown to ``num_rows``; rows ``ids`` are the mean of the first ``num_used`` rows."""
    key = files_key([one.file for one in stored], sorted(one.name for one in stored), num_rows, ids, num_used)

    def make(folder: Path) -> None:
        for number, one in enumerate(stored):
            values = one.read()
            sums: Any = sum(part.double().sum(0) for part in values[:num_used].split(_CHUNK_ROWS))
            grown = torch.empty(num_rows, *values.shape[1:])
            grown[: len(values)] = values
            grown[ids] = (sums / num_used).float()
            save_file({one.name: grown}, folder / f"{number}.safetensors")

    text = f"adding {len(ids)} rows to embedding and head, initialized to the mean of the others"
    return make_once(cache_root() / "models" / f"tokens-{key}", make, text)
