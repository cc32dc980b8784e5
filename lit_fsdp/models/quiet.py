"""transformers without its progress bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as hf_logging


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, loading a model draws nothing; the bars are put back as they were."""
    shown, gguf_bar = hf_logging.is_progress_bar_enabled(), modeling_gguf_pytorch_utils.tqdm
    hf_logging.disable_progress_bar()
    # GGUF loading asks tqdm directly, which nothing can switch off after its import
    modeling_gguf_pytorch_utils.tqdm = _silent
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = gguf_bar
        if shown:
            hf_logging.enable_progress_bar()


def _silent(items: Iterable[Any], **_: Any) -> Iterable[Any]:
    return items
