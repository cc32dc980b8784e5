"""The tensors of a model, read one at a time and only as many rows as asked for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.added_tokens import GrownTensor, vocabulary_tensors
from lit_fsdp.models.initial import InitialValues, check_filled
from lit_fsdp.models.names import Stored, match_names, stored_tensors, tied_groups
from lit_fsdp.models.source import ModelSource

_log = logging.getLogger(__name__)


class Weights:
    """Where every parameter and buffer of a model comes from; made by :func:`open_weights`.

    Args:
        initial: Values for what no file holds.
        stored: Tensors in files, by name in the model.
        first_owner: For each name of a tied tensor, the first of its names.
        grown: Of tensors with more rows than their file, how to read them, by name in the model.
    """

    def __init__(
        self,
        initial: InitialValues,
        stored: dict[str, Stored],
        first_owner: dict[str, str],
        grown: Mapping[str, GrownTensor] | None = None,
    ) -> None:
        self._initial, self._stored, self._first_owner, self._grown = initial, stored, first_owner, grown or {}

    def read(self, module_name: str, module: nn.Module, attribute: str, rows: slice | None = None) -> torch.Tensor:
        """The parameter or buffer ``attribute`` owned directly by ``module``, or only its ``rows`` in dim 0.

        Args:
            module_name: Name of ``module`` inside the transformers model.
            module: That module, wrapped or not; held against the one of that name when the weights were opened.
            attribute: ``weight``, ``bias``, ``inv_freq``, ...
            rows: Rows of the unsharded tensor; may be empty. Only these are read from a file.

        Returns:
            A CPU tensor that owns its memory: in the file's dtype if it comes from one, else in the model's (rows of
            added tokens, and what is read together with them, in fp32).

        Raises:
            CheckpointError: The file has been cut short since it was checked, or the model's code does not
                initialise a value that no file holds.
        """
        noted = self._initial.module(module_name)
        assert isinstance(module, type(noted)), f"{module_name} is a {type(noted).__name__}, not {type(module)}"
        name = f"{module_name}.{attribute}" if module_name else attribute
        if name in self._grown:
            return self._grown[name].read(rows)
        if name in self._stored:
            return read_stored(self._stored[name], rows)
        owner, _, attribute = self._first_owner.get(name, name).rpartition(".")
        return check_filled(name, self._initial.value(owner, attribute, rows))


def open_weights(source: ModelSource, model: PreTrainedModel, seed: int) -> Weights:
    """The weights of ``source`` for ``model``, held against each other once: names and shapes.

    Args:
        source: A folder, or random initialisation.
        model: On meta and not yet wrapped; tied parameters are recognised as one object under several names.
        seed: Of random initialisation.

    Raises:
        CheckpointError: Tensors are missing in the folder or have other shapes, or a file is damaged.
    """
    first_owner = {name: names[0] for names in tied_groups(model) for name in names}
    initial = InitialValues(model, seed)
    if source.weights_folder is None:
        return Weights(initial, {}, first_owner)
    added = source.added_rows
    grown = {} if added is None else dict.fromkeys(vocabulary_tensors(model), added.num_stored)
    match = match_names(model, stored_tensors(source.weights_folder), grown)
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
    if added is None:
        return Weights(initial, match.found, first_owner)
    num_rows = {name: model.get_parameter(name).shape[0] for name in grown}
    tensors = {name: GrownTensor(match.found[name], added, rows, read_stored) for name, rows in num_rows.items()}
    return Weights(initial, match.found, first_owner, tensors)


def read_stored(stored: Stored, rows: slice | None) -> torch.Tensor:
    """A tensor of a file, or its ``rows`` in dim 0, on the CPU.

    Open, copy, close: the mapping of the file (which counts as this process's memory) goes at once.

    Raises:
        CheckpointError: The file has been cut short.
    """
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
