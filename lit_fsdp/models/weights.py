"""Where the tensors of a model come from, read one at a time and only as many rows as asked for.

A folder of safetensors files is held against the model once, by names and shapes; what no file holds is initialized.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.initial import InitialValues

_log = logging.getLogger(__name__)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EXPERT_PARTS = {  # what a tensor of all experts is made of where each is stored by itself, joined in dim 0
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_WHOLE_MODEL = {  # prefixes of a text model, and what they are in the multimodal one: on the hub, and in memory
    "gemma3_text": (("", "language_model."), ("model.", "model.language_model.")),
}


@dataclass(frozen=True)
class ModelSource:
    """What a model name has been resolved to; nothing large has been read yet."""

    hf_config: PretrainedConfig
    weights_folder: Path | None
    """Folder of safetensors files whose names and shapes fit, or None for random initialization."""
    tokenizer_source: str | None
    """Folder or hub name of the tokenizer; None with a miniature means the generated one."""
    label: str
    """Short name for logs and reports."""
    hub_name: str | None = None
    """What model cards name as their base model."""
    base: str | None = None
    """What ``from_pretrained`` loads it from: a hub name or folder, which adapters name so that peft finds their
    base; None with random init."""
    overlay: Path | None = None
    """Folder of the tensors to be taken instead of those in ``weights_folder``: grown by ``model.add_tokens``."""


class Stored(NamedTuple):
    """Where a tensor lies, and its shape there."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """The tensor or its ``rows`` in dim 0, on the CPU, in the dtype of the file."""
        try:  # open, copy, close: the mapping of the file, which counts as this process's memory, goes at once
            with safe_open(self.file, framework="pt") as handle:
                if rows is None:
                    return handle.get_tensor(self.name).clone()
                return handle.get_slice(self.name)[rows].clone()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.file}: cannot read {self.name} ({error})") from error


class StoredExperts(NamedTuple):
    """A tensor of all experts whose parts lie apart, as on the hub: ``experts.0.w1.weight`` and so on."""

    parts: tuple[tuple[Stored, ...], ...]
    """Of each expert, those that are joined in dim 0."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole: experts first."""
        first = self.parts[0]
        return (len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:])

    @property
    def file(self) -> Path:
        """Of the first part."""
        return self.parts[0][0].file

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """As :meth:`Stored.read`; of other experts than those in ``rows`` nothing is read."""
        chosen = self.parts[rows or slice(None)]
        whole = self.parts[0][0].read(slice(0, 0)).new_empty(len(chosen), *self.shape[1:])
        for expert, parts in zip(whole, chosen, strict=True):
            for target, part in zip(expert.split([part.shape[0] for part in parts]), parts, strict=True):
                target.copy_(part.read())
        return whole


class Match(NamedTuple):
    """A model held against a folder.

    ``found`` has the names of parameters and persistent buffers of the model, tied ones all with the one stored;
    ``missing`` are names of the model, ``unexpected`` names in the folder but for those that models are known to drop,
    and ``misshapen`` lines of text.
    """

    found: dict[str, Stored | StoredExperts]
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]


class Weights:
    """Where every parameter and buffer of a model comes from; made by :func:`open_weights`."""

    def __init__(
        self, initial: InitialValues, stored: dict[str, Stored | StoredExperts], first_owner: dict[str, str]
    ) -> None:
        self._initial, self._stored, self._first_owner = initial, stored, first_owner

    def read(self, module_name: str, module: nn.Module, attribute: str, rows: slice | None = None) -> torch.Tensor:
        """The parameter or buffer ``attribute`` of ``module``, or only its ``rows`` (maybe none) in dim 0.

        Args:
            module_name: Inside the transformers model.
            module: Not looked at.
            attribute: ``weight``, ``bias``, ``inv_freq``, ...
            rows: Of the unsharded tensor; only these are read from a file.

        Returns:
            A CPU tensor that owns its memory: in the file's dtype if it comes from one, else in the model's.

        Raises:
            CheckpointError: The file has been cut short, or the model's code does not initialize what no file holds.
        """
        name = f"{module_name}.{attribute}" if module_name else attribute
        if name in self._stored:
            return self._stored[name].read(rows)
        owner, _, attribute = self._first_owner.get(name, name).rpartition(".")
        return self._initial.value(owner, attribute, rows)


def open_weights(source: ModelSource, model: PreTrainedModel, seed: int) -> Weights:
    """The weights of ``source`` for ``model`` (on meta, not yet wrapped), held against each other by names and shapes.

    Raises:
        CheckpointError: Tensors are missing in the folder or have other shapes, or a file is damaged.
    """
    first_owner = {name: names[0] for names in tied_groups(model) for name in names}
    initial, folder = InitialValues(model, seed), source.weights_folder
    if folder is None:
        return Weights(initial, {}, first_owner)
    tensors = stored_tensors(folder)
    if source.overlay is not None:
        tensors |= headers_of(source.overlay.glob("*.safetensors"))
    match, kind = match_names(model, tensors), type(model).__name__
    for names, what in ((match.missing, "are missing"), (match.misshapen, "have other shapes than config.json says")):
        if names:
            raise CheckpointError(f"{folder}: {len(names)} tensors of {kind} {what}: {_some(names)}")
    if match.unexpected:
        _log.warning(
            "%s: %d tensors are not in %s and are not loaded: %s",
            *(folder, len(match.unexpected), kind, _some(match.unexpected)),
        )
    return Weights(initial, match.found, first_owner)


def has_safetensors(folder: Path) -> bool:
    """Whether ``folder`` holds a whole-model safetensors file or an index of several."""
    return (folder / _SINGLE).is_file() or (folder / _INDEX).is_file()


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors model folder, as :func:`headers_of` its files."""
    if (folder / _SINGLE).is_file():
        return headers_of([folder / _SINGLE])
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    return headers_of(folder / name for name in sorted(set(index.values())))


def headers_of(files: Iterable[Path]) -> dict[str, Stored]:
    """Every tensor of safetensors files by its name; only headers are read.

    Raises:
        CheckpointError: A file is missing, damaged or cut short.
    """
    tensors: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                    tensors[name] = Stored(file, name, tuple(handle.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file}: not a whole safetensors file ({error})\n"
                "  fix:     fetch the model again: lit-fsdp model prepare --name NAME"
            ) from error
    return tensors


def match_names(model: PreTrainedModel, tensors: dict[str, Stored]) -> Match:
    """Hold ``model`` (any device) against the tensors of a folder.

    A name in the folder may lack the model's base prefix (``h.0.…`` for ``transformer.h.0.…``) or carry one that the
    model lacks; a tied parameter may be stored under any of its names, and experts each by themselves.
    """
    found: dict[str, Stored | StoredExperts] = {}
    used: set[str] = set()
    groups = tied_groups(model)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items()}
    for names in groups:
        for candidate in [c for n in names for c in _may_be_stored_as(model, n)]:
            if candidate in tensors:
                used.add(candidate)
                found.update({name: found.get(name, tensors[candidate]) for name in names})
        if names[0] not in found and (experts := _experts(model, names[0], shapes[names[0]], tensors)):
            used |= {part.name for parts in experts.parts for part in parts}
            found[names[0]] = experts
    # transformers drops these without a word: they are computed, not trained
    dropped = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())]
    surplus = (name for name in tensors if name not in used)
    return Match(
        found=found,
        missing=[names[0] for names in groups if names[0] not in found],
        unexpected=sorted(name for name in surplus if not any(re.search(pattern, name) for pattern in dropped)),
        misshapen=[
            f"{name}: {stored.shape} in {stored.file.name}, {shapes[name]} in the model"
            for name, stored in found.items()
            if stored.shape != shapes[name]
        ],
    )


def _may_be_stored_as(model: PreTrainedModel, name: str) -> list[str]:
    prefix = f"{model.base_model_prefix}."
    whole = [(old, new) for old, new in _WHOLE_MODEL.get(model.config.model_type, ()) if name.startswith(old)]
    same = [name, name.removeprefix(prefix), prefix + name, *(new + name.removeprefix(old) for old, new in whole)]
    return [*same, *(one.replace(".mlp.", ".block_sparse_moe.") for one in same if ".mlp." in one)]  # Mixtral's files


def _experts(
    model: PreTrainedModel, name: str, shape: tuple[int, ...], tensors: dict[str, Stored]
) -> StoredExperts | None:
    owner, _, own = name.rpartition(".")
    for stored_owner in _may_be_stored_as(model, owner) if owner.endswith(".experts") else ():
        for words in _EXPERT_PARTS.get(own, ()):
            names = [[f"{stored_owner}.{i}.{word}.weight" for word in words] for i in range(shape[0])]
            if all(part in tensors for parts in names for part in parts):
                return StoredExperts(tuple(tuple(tensors[part] for part in parts) for parts in names))
    return None


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Names of parameters and persistent buffers, those of one tensor together, in the order of the module tree."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _some(lines: Sequence[str], most: int = 8) -> str:
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return "; ".join(lines[:most]) + more
