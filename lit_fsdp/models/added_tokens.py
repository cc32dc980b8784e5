"""``model.add_tokens``: rows of embedding and head for tokens that the model was not trained with.

The files of the model have no such rows, so embedding and head are written once more, in fp32, to a file of their own
in the cache, with the mean of the rows that tokens had before in each new one. Every old logit stays as it was, and a
new token starts less likely than the average of the old ones, where random values would make some of them the most
likely of all.

Source: Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021,
https://nlp.stanford.edu/~johnhew/vocab-expansion.html.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import cache_root, make_once
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.names import Stored, match_names, stored_tensors
from lit_fsdp.models.source import ModelSource
from lit_fsdp.models.tokenizers import add_special_tokens, read_tokenizer
from lit_fsdp.models.weights import read_stored

_log = logging.getLogger(__name__)
_CHUNK_ROWS = 8192  # of which the sum is made at a time, in fp64
_VERSION = 1


def with_added_tokens(source: ModelSource, config: ModelConfig) -> ModelSource:
    """``source`` with a vocabulary that has a row for each token of ``model.add_tokens``; itself if none is named.

    Rows that the model has beyond the tokenizer's tokens (a padded vocabulary) are used first, so it may stay as
    large as it is. They start at the mean too: what a file holds there was never trained.

    Args:
        source: Of a model that has its tokens still to be added.
        config: The ``model`` section.

    Raises:
        ConfigError: There is no tokenizer, or it has tokens without a row that are not named.
    """
    if not config.add_tokens or source.tokenizer_source is None:  # a miniature's own tokenizer has them already
        return source
    tokenizer = read_tokenizer(source.tokenizer_source, config.trust_remote_code)
    num_used = len(tokenizer)
    fresh = add_special_tokens(tokenizer, config.add_tokens)
    hf_config, num_stored = source.hf_config, source.hf_config.get_text_config().vocab_size
    numbers = tokenizer.get_vocab()
    beyond = {token: number for token, number in numbers.items() if number >= num_stored}
    unnamed = sorted(set(beyond) - set(config.add_tokens), key=lambda token: beyond[token])
    if unnamed:
        raise ConfigError(
            "model.tokenizer",
            f"{source.tokenizer_source} with {len(unnamed)} tokens beyond the {num_stored} embeddings of"
            f" {source.label}, which add_tokens does not name ({', '.join(unnamed[:5])})",
            "the tokenizer that belongs to the model, and in add_tokens every token without an embedding",
            "name the tokenizer that belongs to the model",
        )
    num_rows = max(num_stored, 1 + max(beyond.values(), default=0))
    ids = {numbers[token] for token in fresh} | set(range(num_stored, num_rows))
    if not ids:
        return source
    _log.info(
        "model.add_tokens: %d new row(s) in embedding and head, which start at the mean of the others: %s",
        len(ids),
        f"{num_stored} rows grow to {num_rows}" if num_rows > num_stored else f"{num_stored} rows had room for them",
    )
    overlay = None
    if source.weights_folder is not None:
        model = build_on_meta(hf_config, "eager", config.trust_remote_code)
        match = match_names(model, stored_tensors(source.weights_folder))
        stored = [one for name in vocabulary_tensors(model) if isinstance(one := match.found.get(name), Stored)]
        overlay = _written_overlay({one.name: one for one in stored}, num_rows, sorted(ids), min(num_used, num_stored))
    grown = copy.deepcopy(hf_config)
    grown.get_text_config().vocab_size = num_rows
    return dataclasses.replace(source, hf_config=grown, overlay=overlay)


def _written_overlay(stored: Mapping[str, Stored], num_rows: int, ids: list[int], num_used: int) -> Path:
    """The folder with these tensors grown to ``num_rows``, where the rows ``ids`` are the mean of the first ones."""
    times = [(str(one.file.resolve()), one.file.stat().st_mtime_ns) for one in stored.values()]
    key = hashlib.blake2b(repr((_VERSION, times, sorted(stored), num_rows, ids, num_used)).encode(), digest_size=6)

    def make(folder: Path) -> None:
        for number, (name, one) in enumerate(stored.items()):
            values = read_stored(one)
            sums = [part.double().sum(0) for part in values[:num_used].split(_CHUNK_ROWS)]
            grown = torch.empty(num_rows, *values.shape[1:])
            grown[: len(values)] = values
            grown[ids] = (torch.stack(sums).sum(0) / num_used).float()
            save_file({name: grown}, folder / f"{number}.safetensors")

    return make_once(cache_root() / "models" / f"tokens-{key.hexdigest()}", make, f"adding {len(ids)} rows")


def vocabulary_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Input embedding and head by name."""
    wanted: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {name: module for name, module in model.named_modules() if any(module is one for one in wanted)}


def vocabulary_tensors(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that have one row per token: of the embedding and of the head, its bias too."""
    return [
        f"{name}.{own}"
        for name, module in vocabulary_modules(model).items()
        for own in dict(module.named_parameters(recurse=False))
    ]


def train_beside_adapters(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> None:
    """Unfreeze the embedding and the head of a model with adapters, in place, wherever they are no adapter's.

    A module that ``lora.modules_to_save`` names has its trained copy already.

    Args:
        model: With adapters.
        modules: Embedding and head as they were before, by name.

    Raises:
        ConfigError: An adapter stands on one of them: its two factors cannot give single rows a value of their own.
    """
    inside = {module: name for name, module in model.named_modules()}
    for name, module in modules.items():
        where = inside[module]
        if where.endswith(".base_layer"):
            raise ConfigError(
                "model.lora.target_modules",
                f"{name.rpartition('.')[2]} beside add_tokens, which trains it whole",
                "layers other than embedding and head",
                "leave it out of target_modules; all-linear leaves embedding and head alone",
            )
        if where == name:
            module.requires_grad_(True)


def warn_of_frozen_rows(model: PreTrainedModel, config: ModelConfig) -> None:
    """Say so if the rows of added tokens are not trained."""
    if not config.add_tokens:
        return
    frozen = [name for name in vocabulary_tensors(model) if not model.get_parameter(name).requires_grad]
    if frozen:
        _log.warning(
            "model.add_tokens: %s not trained, so that new tokens keep the values they start from",
            f"{' and '.join(frozen)} {'is' if len(frozen) == 1 else 'are'}",
        )
