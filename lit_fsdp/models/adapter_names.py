"""Names that peft gives: files of an adapter's folder, and parameters of a model with adapters."""

import json
import re
from pathlib import Path
from typing import Any

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter's folder."""
ADAPTER = "default"
"""Name of the only adapter."""
WHOLE_COPY = f".modules_to_save.{ADAPTER}."
"""In names of the fully trained copy of a module."""
_WRAPPERS = re.compile(rf"(\.base_layer|\.original_module|\.modules_to_save\.{ADAPTER})(?=\.|$)")


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The arguments of ``peft.LoraConfig`` in the folder of an adapter."""
    return dict(json.loads((folder / CONFIG_FILE).read_bytes()))


def is_lora(name: str) -> bool:
    """Whether a parameter is a factor, or magnitudes, that an adapter adds."""
    return ".lora_" in f".{name}"


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, or to a fully trained copy of a module (``modules_to_save``)."""
    return is_lora(name) or ".modules_to_save." in name


def base_name(name: str) -> str:
    """The name in the model without adapters of a base module, or of its fully trained copy."""
    return _WRAPPERS.sub("", name)
