"""A model fetched or converted ahead of a run, and where it is then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.hub import TOKENIZER_FILES
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.tokenizers import find_tokenizer, load_tokenizer
from lit_fsdp.models.weights import open_weights


def prepare_model(config: ModelConfig) -> dict[str, Any]:
    """Bring everything a run needs of a model into the caches of this node, and look whether it fits together.

    Any number of processes may do so at once; one works. Names and shapes of all tensors are compared, no weights are
    loaded.

    Returns:
        ``weights`` and ``tokenizer``, each with ``folder`` (None: made from nothing, see ``note``), ``num_bytes``,
        ``num_files`` and ``note``; and ``hub_name`` or None.

    Raises:
        ConfigError: Nothing usable can be had; the error says how it could.
        CheckpointError: Files are damaged, lack tensors, or cannot be converted.
    """
    source = resolve_model(config, seed=0)
    if source.weights_folder is None:
        weights = _part(None, (), "random init, nothing to fetch")
    else:
        open_weights(source, build_on_meta(source.hf_config, "eager", config.trust_remote_code), 0)
        weights = _part(source.weights_folder, ("*.safetensors", "*.json"), "")
    load_tokenizer(source, config)
    found = source.tokenizer_source
    if found is None:
        tokenizer = _part(None, (), "the generated one of the miniature")
    else:
        tokenizer = _part(find_tokenizer(found, config.trust_remote_code), TOKENIZER_FILES, "")
    return {"weights": weights, "tokenizer": tokenizer, "hub_name": source.hub_name}


def _part(folder: Path | None, patterns: tuple[str, ...], note: str) -> dict[str, Any]:
    files = {path.resolve() for pattern in patterns for path in (folder.glob(pattern) if folder else ())}
    num_bytes = sum(file.stat().st_size for file in files)
    shown = None if folder is None else str(folder)
    return {"folder": shown, "num_bytes": num_bytes, "num_files": len(files), "note": note}
