"""Models of several tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.dist.reference import TINY, UNTIED, save_tiny


@pytest.fixture(scope="session")
def dropout_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with dropout in its attention, so that the random state matters."""
    config = LlamaConfig(**{**TINY.to_dict(), "attention_dropout": 0.2})
    return save_tiny(tmp_path_factory.mktemp("dropout") / "model", config)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head of its own."""
    return save_tiny(tmp_path_factory.mktemp("untied") / "model", UNTIED, seed=1)
