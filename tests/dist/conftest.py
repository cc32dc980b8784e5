"""One pool of preloaded workers for all distributed tests."""

from __future__ import annotations

import json
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


@pytest.fixture(scope="session")
def dropout_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with dropout in its attention, so that the random state matters."""
    folder = tmp_path_factory.mktemp("dropout") / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["attention_dropout"] = 0.2
    (folder / "config.json").write_text(json.dumps(config))
    return folder
