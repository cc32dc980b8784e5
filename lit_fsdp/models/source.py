"""What a model name has been resolved to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig


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
    """Name of the repository on the hub, where it is one: what exports name as their base model."""
