"""transformers without its progress bars, and with errors that name the file."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging as hf_logging

from lit_fsdp.errors import ConfigError


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, loading a model draws nothing; the bars are put back as they were."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


@contextmanager
def reading(source: Path) -> Iterator[None]:
    """Inside, transformers loads a model quietly; what it raises about the file becomes a ConfigError that names it."""
    try:
        with no_progress_bars():
            yield
    except (ImportError, OSError, ValueError, LookupError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        if isinstance(error, ImportError) and "gguf" in str(error).lower():
            allowed, fix = "a GGUF file, with the gguf package installed", "pip install 'lit-fsdp[gguf]'"
            raise ConfigError("model.name", source, allowed, fix) from error
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            "model.name",
            f"{source} ({type(error).__name__}: {text})",
            "a causal LM that transformers can read",
            "check that the file is whole; else start from the model's safetensors folder",
        ) from error
