"""What a checkpoint keeps of a model beside its tensors, so that it can be exported without anything else."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lit_fsdp.models.tokenizers import end_of_turn_id, pad_id
from lit_fsdp.models.weights import ModelSource


def model_files(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase, model: nn.Module | None = None
) -> dict[str, bytes]:
    """Config, generation config, tokenizer and chat template as a model folder has them, each under ``hf/``.

    The generation config is that of ``source`` if it has one, else of the live ``model``, with the tokenizer's pad
    token if it named none, and the end of a turn of its template as an end mark: a base model's own end of text is not
    what it has learned to answer with. ``config.json`` keeps its ``pad_token_id``, which makes a row without gradient.
    """
    generation: Any = copy.deepcopy(getattr(model, "generation_config", None))
    if source.weights_folder is not None and (source.weights_folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source.weights_folder)
    with tempfile.TemporaryDirectory() as folder:
        source.hf_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if generation is not None:
            if generation.pad_token_id is None:
                generation.pad_token_id = pad_id(tokenizer, source.num_embeddings)
            given, turn = generation.eos_token_id, end_of_turn_id(tokenizer)
            stops = given if isinstance(given, list) else [] if given is None else [given]
            if turn is not None and turn not in stops:
                generation.eos_token_id = [*stops, turn] if stops else turn
            generation.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {f"hf/{path.relative_to(folder)}": path.read_bytes() for path in files}


def model_entry(
    source: ModelSource,
    ties: dict[str, str],
    adapter_config: dict[str, Any] | None,
    kept_with_adapter: Sequence[str] = (),
    base: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``model`` entry of a checkpoint's manifest: how the tensors map to the transformers model.

    ``ties`` are names inside the LightningModule; ``kept_with_adapter`` belongs into the folder of exported adapters.
    """
    return {
        "prefix": "model.",
        "tied": {a.removeprefix("model."): b.removeprefix("model.") for a, b in ties.items()},
        "base": base,
        "hub_name": source.hub_name,
        "adapter": adapter_config,
        "kept_with_adapter": list(kept_with_adapter),
    }
