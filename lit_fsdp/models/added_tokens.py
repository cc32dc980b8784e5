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
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import require
from lit_fsdp.host import cache_root, make_once
from lit_fsdp.models.build import build_on_meta, vocabulary_tensors
from lit_fsdp.models.tokenizers import add_special_tokens, read_tokenizer
from lit_fsdp.models.weights import ModelSource, Stored, match_names, stored_tensors

_log = logging.getLogger(__name__)
_CHUNK_ROWS = 8192  # of which the sum is made at a time, in fp64
_VERSION = 1


def with_added_tokens(source: ModelSource, config: ModelConfig) -> ModelSource:
    """``source`` with a vocabulary that has a row for each token of ``model.add_tokens``; itself if none is named.

    Rows that the model has beyond the tokenizer's tokens (a padded vocabulary) are used first, so it may stay as
    large as it is. They start at the mean too: what a file holds there was never trained.
    """
    if not config.add_tokens or source.tokenizer_source is None:
        return source
    tokenizer = read_tokenizer(source.tokenizer_source, config.trust_remote_code)
    num_used, num_stored = len(tokenizer), source.hf_config.get_text_config().vocab_size
    fresh = add_special_tokens(tokenizer, config.add_tokens)
    numbers = tokenizer.get_vocab()
    unnamed = [token for token in numbers if numbers[token] >= num_stored and token not in config.add_tokens]
    require(
        not unnamed,
        "model.tokenizer",
        f"{source.tokenizer_source} with {len(unnamed)} tokens beyond the {num_stored} embeddings of"
        f" {source.label}, which add_tokens does not name ({', '.join(unnamed[:5])})",
        "the tokenizer that belongs to the model, and in add_tokens every token without an embedding",
    )
    num_rows = max(num_stored, 1 + max(numbers[token] for token in config.add_tokens))
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
        model = build_on_meta(source.hf_config, "eager", config.trust_remote_code)
        found = match_names(model, stored_tensors(source.weights_folder)).found
        stored = {one for name in vocabulary_tensors(model) if isinstance(one := found.get(name), Stored)}
        overlay = _written_overlay(stored, num_rows, sorted(ids), min(num_used, num_stored))
    grown = copy.deepcopy(source.hf_config)
    grown.get_text_config().vocab_size = num_rows
    return dataclasses.replace(source, hf_config=grown, overlay=overlay)


def _written_overlay(stored: Collection[Stored], num_rows: int, ids: list[int], num_used: int) -> Path:
    """The folder with these tensors grown to ``num_rows``, where the rows ``ids`` are the mean of the first ones."""
    times = sorted((str(one.file.resolve()), one.file.stat().st_mtime_ns, one.name) for one in stored)
    key = hashlib.blake2b(repr((_VERSION, times, num_rows, ids, num_used)).encode(), digest_size=6)

    def make(folder: Path) -> None:
        for number, one in enumerate(stored):
            values = one.read()
            sums = [part.double().sum(0) for part in values[:num_used].split(_CHUNK_ROWS)]
            grown = torch.empty(num_rows, *values.shape[1:])
            grown[: len(values)] = values
            grown[ids] = (torch.stack(sums).sum(0) / num_used).float()
            save_file({one.name: grown}, folder / f"{number}.safetensors")

    return make_once(cache_root() / "models" / f"tokens-{key.hexdigest()}", make, f"adding {len(ids)} rows")
