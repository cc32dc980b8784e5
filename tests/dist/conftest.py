"""One pool of preloaded workers for all distributed tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Processes that run the functions of ``tests.dist.jobs`` on 1 to 4 ranks."""
    pool = Workers()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with tied embeddings and random weights, saved as a model folder."""
    import torch
    from transformers import LlamaForCausalLM

    from lit_fsdp.models.tokenizers import miniature_tokenizer
    from tests.dist.reference import TINY

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(TINY).save_pretrained(folder)
    miniature_tokenizer().save_pretrained(folder)
    return folder
