"""What a model name has been resolved to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig


@dataclass(frozen=True)
class AddedRows:
    """Rows of embedding and head that no file has a value for, because their tokens were added by the recipe."""

    ids: tuple[int, ...]
    """Rows that start at the mean of the others, ascending."""
    num_used: int
    """Rows that the tokenizer had tokens for before; the first ones, whose mean is taken."""
    num_stored: int
    """Rows in the files."""


@dataclass(frozen=True)
class ModelSource:
    """Where the parts of a model come from; nothing large has been read yet."""

    hf_config: PretrainedConfig
    """The architecture."""
    weights_folder: Path | None
    """Folder of safetensors files whose names and shapes fit, or None for random initialisation."""
    tokenizer_source: str | None
    """Folder or hub name of the tokenizer; None with a miniature means the generated one."""
    label: str
    """Short name for logs and reports."""
    hub_name: str | None = None
    """Name of the repository on the hub, where it is one: what model cards name as their base model."""
    base: str | None = None
    """What ``from_pretrained`` loads the model from: the name on the hub, or a folder (of a GGUF file, its converted
    one); None with random init. Adapters name it, so that peft finds their base."""
    added_rows: AddedRows | None = None
    """Rows for ``model.add_tokens``; ``hf_config`` has them, ``weights_folder`` has not. None with random init."""
