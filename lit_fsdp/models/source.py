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
    """Folder of safetensors files whose names and shapes fit, or None for random initialization."""
    tokenizer_source: str | None
    """Folder or hub name of the tokenizer; None with a miniature means the generated one."""
    label: str
    """Short name for logs and reports."""
    hub_name: str | None = None
    """Name of the repository on the hub, where it is one: what model cards name as their base model."""
    base: str | None = None
    """What ``from_pretrained`` loads the model from: the name on the hub, or a folder (of a GGUF file, its converted
    one); None with random init. Adapters name it, so that peft finds their base."""
    overlay: Path | None = None
    """Folder of the tensors to be taken instead of those in ``weights_folder``: embedding and head with rows for
    ``model.add_tokens``."""
