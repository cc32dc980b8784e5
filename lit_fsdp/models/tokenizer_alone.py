"""The tokenizer of a recipe without its weights, for everything that is about data alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.models.added_tokens import with_added_tokens
from lit_fsdp.models.convert import write_gguf_tokenizer
from lit_fsdp.models.resolve import resolve_architecture, resolve_model
from lit_fsdp.models.source import ModelSource
from lit_fsdp.models.tokenizers import load_tokenizer


def tokenizer_alone(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that training uses, to the last token: no weights are read, fetched or converted.

    Raises:
        ConfigError: No tokenizer or no config is at hand, or they do not fit each other.
    """
    if config.miniature or config.name is None:
        return load_tokenizer(resolve_model(config, seed=0), config)
    hf_config = resolve_architecture(config)
    name = config.name if isinstance(config.name, str) else ""
    path = Path(name).expanduser()
    if config.tokenizer is None and path.suffix == ".gguf" and path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            write_gguf_tokenizer(path, Path(folder))
            source = ModelSource(hf_config, None, folder, path.stem)
            return load_tokenizer(with_added_tokens(source, config), config)
    random = not name or name.endswith(".json")  # a config alone has no tokenizer beside it
    found = config.tokenizer or (None if random else str(path) if path.is_dir() else name)
    source = ModelSource(hf_config, None, found, name or "model")
    return load_tokenizer(with_added_tokens(source, config), config)
