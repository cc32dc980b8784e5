"""Names and shapes: which tensor of a safetensors folder belongs to which parameter of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.text_part import names_in_whole_model

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EXPERT_PARTS = {  # what a tensor of all experts is made of where each is stored by itself, joined in dim 0
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


class Stored(NamedTuple):
    """Where a tensor lies, its shape there, and its dtype in the words of safetensors (``BF16``)."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


class StoredExperts(NamedTuple):
    """A tensor of all experts whose parts lie apart, as on the hub: ``experts.0.w1.weight`` and so on."""

    parts: tuple[tuple[Stored, ...], ...]
    """Of each expert, those that are joined in dim 0."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Experts first."""
        first = self.parts[0]
        return (len(self.parts), sum(part.shape[0] for part in first), *first[0].shape[1:])

    @property
    def file(self) -> Path:
        """Of the first part."""
        return self.parts[0][0].file


@dataclass(frozen=True)
class Match:
    """A model held against a folder."""

    found: dict[str, Stored | StoredExperts]
    """By the name of the parameter or persistent buffer in the model; tied names all point at the one stored."""
    missing: list[str]
    """Names in the model with nothing in the folder."""
    unexpected: list[str]
    """Names in the folder without a place in the model, but for those that models are known to drop."""
    misshapen: list[str]
    """One line for each tensor whose shape differs."""


def has_safetensors(folder: Path) -> bool:
    """Whether ``folder`` holds a whole-model safetensors file or an index of several."""
    return (folder / _SINGLE).is_file() or (folder / _INDEX).is_file()


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors model folder by its name there; only headers are read.

    Raises:
        CheckpointError: A file of the index is missing, or a file is damaged or cut short.
    """
    if (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        try:
            index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / _INDEX}: not a readable index of safetensors files ({error})") from error
        files = [folder / name for name in sorted(set(index.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{folder}: {_INDEX} names files that are not there: {', '.join(absent)}")
    return headers_of(files)


def headers_of(files: Iterable[Path]) -> dict[str, Stored]:
    """Every tensor of safetensors files by its name.

    Raises:
        CheckpointError: A file is damaged or cut short.
    """
    tensors: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                    stored = handle.get_slice(name)
                    tensors[name] = Stored(file, name, tuple(stored.get_shape()), stored.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from error
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
    return Match(
        found=found,
        missing=[names[0] for names in groups if names[0] not in found],
        unexpected=sorted(name for name in tensors if name not in used and not _dropped(model, name)),
        misshapen=[
            f"{name}: {stored.shape} in {stored.file.name}, {shapes[name]} in the model"
            for name, stored in found.items()
            if stored.shape != shapes[name]
        ],
    )


def _may_be_stored_as(model: PreTrainedModel, name: str) -> list[str]:
    prefix = f"{model.base_model_prefix}."
    same = [name, name.removeprefix(prefix), prefix + name, *names_in_whole_model(model.config, name)]
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


def _dropped(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers would drop this stored tensor without a word: it is computed, not trained."""
    patterns = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())]
    return any(re.search(pattern, name) for pattern in patterns)
