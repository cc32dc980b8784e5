"""Files of other people, opened so that nothing in them can run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.checkpoint.importing.source import SourceTensor, from_memory
from lit_fsdp.checkpoint.manifest import TensorSpec
from lit_fsdp.checkpoint.safetensors_file import DTYPES_BY_CODE, opened
from lit_fsdp.errors import CheckpointError


def read_torch(path: Path) -> Any:
    """The content of a file that ``torch.save`` wrote; tensors stay in the file until they are used.

    Raises:
        CheckpointError: It holds anything but tensors and plain data (named), or is damaged or cut short.
    """
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):  # torch's format before 1.6 cannot be mapped
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path}: {_refusal(str(error))}") from None
    except Exception as error:  # a damaged file can raise anything
        text = (str(error).strip() or repr(error)).splitlines()[0]
        raise CheckpointError(f"{path}: damaged, or no file of torch.save ({text})") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: It is none.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return found


def plain_state(found: Any, what: str) -> dict[str, SourceTensor]:
    """A state dict that has been read, as tensors by name.

    Raises:
        CheckpointError: No mapping of names to whole tensors.
    """
    if not isinstance(found, Mapping) or not found:
        raise CheckpointError(f"{what}: no tensors by name")
    odd = [str(name) for name, value in found.items() if not (isinstance(name, str) and torch.is_tensor(value))]
    if odd:
        raise CheckpointError(f"{what}: not the state dict of a model; no tensors: {', '.join(odd[:8])}")
    return {name: from_memory(f"{what}: {name}", value) for name, value in found.items()}


def safetensors_state(folder: Path, single: str) -> dict[str, SourceTensor] | None:
    """The tensors of ``single`` in ``folder`` or of the index beside it; None if there is neither.

    Raises:
        CheckpointError: A file is missing, damaged or cut short.
    """
    index = folder / f"{single}.index.json"
    if (folder / single).is_file():
        files = {single}
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
            raise CheckpointError(f"{index}: not an index of safetensors files")
        files = set(weight_map.values())
    else:
        return None
    return {name: tensor for file in sorted(files) for name, tensor in safetensors_tensors(folder / file).items()}


def safetensors_tensors(path: Path) -> dict[str, SourceTensor]:
    """The tensors of one safetensors file; only its header is read.

    Raises:
        CheckpointError: It is missing, damaged or cut short.
    """
    found = {}
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            view = file.get_slice(name)
            code = view.get_dtype()
            if code not in DTYPES_BY_CODE:
                raise CheckpointError(f"{path}: {name} has the dtype {code}, which cannot be trained")
            spec = TensorSpec(DTYPES_BY_CODE[code], tuple(view.get_shape()))
            found[name] = SourceTensor(spec, lambda name=name: _read(path, name))  # type: ignore[misc]
    return found


def _read(path: Path, name: str) -> torch.Tensor:
    with opened(path) as file:
        return file.get_tensor(name)


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name


def _refusal(text: str) -> str:
    """What torch's restricted unpickler refused, without its advice to trust the file."""
    marks = ("Unsupported global: GLOBAL ", "GLOBAL ")
    for mark in marks:
        if mark in text:
            name = text.partition(mark)[2].split()[0]
            return (
                f"refused: it names {name}, which is neither a tensor nor plain data; nothing of it was run. "
                "If you trust where it comes from, save it again there without that object (in Lightning often "
                "something in save_hyperparameters or in the state of a callback)"
            )
    return "refused: it is damaged, or no plain file of tensors; nothing of it was run"
