"""The tensors of a model, read one at a time and only as many rows as asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.initial import InitialValues, check_filled
from lit_fsdp.models.names import Stored, StoredExperts, headers_of, match_names, stored_tensors, tied_groups
from lit_fsdp.models.source import ModelSource

_log = logging.getLogger(__name__)


class Weights:
    """Where every parameter and buffer of a model comes from; made by :func:`open_weights`.

    Args:
        initial: Values for what no file holds.
        stored: Tensors in files, by name in the model.
        first_owner: For each name of a tied tensor, the first of its names.
    """

    def __init__(
        self, initial: InitialValues, stored: dict[str, Stored | StoredExperts], first_owner: dict[str, str]
    ) -> None:
        self._initial, self._stored, self._first_owner = initial, stored, first_owner

    def read(self, module_name: str, module: nn.Module, attribute: str, rows: slice | None = None) -> torch.Tensor:
        """The parameter or buffer ``attribute`` owned directly by ``module``, or only its ``rows`` in dim 0.

        Args:
            module_name: Name of ``module`` inside the transformers model.
            module: That module, wrapped or not; held against the one of that name when the weights were opened.
            attribute: ``weight``, ``bias``, ``inv_freq``, ...
            rows: Rows of the unsharded tensor; may be empty. Only these are read from a file.

        Returns:
            A CPU tensor that owns its memory: in the file's dtype if it comes from one, else in the model's.

        Raises:
            CheckpointError: The file has been cut short since it was checked, or the model's code does not
                initialize a value that no file holds.
        """
        noted = self._initial.module(module_name)
        assert isinstance(module, type(noted)), f"{module_name} is a {type(noted).__name__}, not {type(module)}"
        name = f"{module_name}.{attribute}" if module_name else attribute
        if name in self._stored:
            return read_stored(self._stored[name], rows)
        owner, _, attribute = self._first_owner.get(name, name).rpartition(".")
        return check_filled(name, self._initial.value(owner, attribute, rows))


def open_weights(source: ModelSource, model: PreTrainedModel, seed: int) -> Weights:
    """The weights of ``source`` for ``model``, held against each other once: names and shapes.

    Args:
        source: A folder, or random initialization.
        model: On meta and not yet wrapped; tied parameters are recognized as one object under several names.
        seed: Of random initialization.

    Raises:
        CheckpointError: Tensors are missing in the folder or have other shapes, or a file is damaged.
    """
    first_owner = {name: names[0] for names in tied_groups(model) for name in names}
    initial = InitialValues(model, seed)
    if source.weights_folder is None:
        return Weights(initial, {}, first_owner)
    tensors = stored_tensors(source.weights_folder)
    if source.overlay is not None:
        tensors |= headers_of(source.overlay.glob("*.safetensors"))
    match = match_names(model, tensors)
    if match.missing:
        raise CheckpointError(
            f"{source.weights_folder}: {len(match.missing)} tensors of {type(model).__name__} are missing:"
            f" {_some(match.missing)}"
        )
    if match.misshapen:
        raise CheckpointError(f"{source.weights_folder}: shapes differ from config.json: {_some(match.misshapen)}")
    if match.unexpected:
        _log.warning(
            "%s: %d tensors have no place in %s and are not loaded: %s",
            *(source.weights_folder, len(match.unexpected), type(model).__name__, _some(match.unexpected)),
        )
    return Weights(initial, match.found, first_owner)


def read_stored(stored: Stored | StoredExperts, rows: slice | None = None) -> torch.Tensor:
    """A tensor of a file, or its ``rows`` in dim 0, on the CPU; of experts stored apart, only those among them.

    Open, copy, close: the mapping of the file (which counts as this process's memory) goes at once.

    Raises:
        CheckpointError: The file has been cut short.
    """
    if isinstance(stored, StoredExperts):
        chosen = stored.parts[rows or slice(None)]
        whole = read_stored(stored.parts[0][0], slice(0, 0)).new_empty(len(chosen), *stored.shape[1:])
        for expert, parts in zip(whole, chosen, strict=True):
            for target, part in zip(expert.split([part.shape[0] for part in parts]), parts, strict=True):
                target.copy_(read_stored(part))
        return whole
    try:
        with safe_open(stored.file, framework="pt") as handle:
            if rows is None:
                return handle.get_tensor(stored.name).clone()
            return handle.get_slice(stored.name)[rows].clone()
    except Exception as error:  # safetensors raises its own and OSError, by version
        raise CheckpointError(f"{stored.file}: cannot read {stored.name} ({error})") from error


def _some(lines: Sequence[str], most: int = 8) -> str:
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
