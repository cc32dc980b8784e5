"""Names and shapes: which tensor of a safetensors folder belongs to which parameter of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
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


class Stored(NamedTuple):
    """Where a tensor lies, its shape there, and its dtype in the words of safetensors (``BF16``)."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Match:
    """A model held against a folder."""

    found: dict[str, Stored]
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


def match_names(
    model: PreTrainedModel, tensors: dict[str, Stored], stored_rows: Mapping[str, int] | None = None
) -> Match:
    """Hold ``model`` (any device) against the tensors of a folder.

    A name in the folder may lack the model's base prefix (``h.0.…`` for ``transformer.h.0.…``) or carry one that the
    model lacks; a tied parameter may be stored under any of its names.

    Args:
        model: Names and shapes.
        tensors: Of the folder.
        stored_rows: Rows in the folder of tensors that have more of them in the model, by name there.
    """
    found: dict[str, Stored] = {}
    used: set[str] = set()
    groups = tied_groups(model)
    for names in groups:
        for candidate in [c for n in names for c in _may_be_stored_as(model, n)]:
            if candidate in tensors:
                used.add(candidate)
                found.update({name: found.get(name, tensors[candidate]) for name in names})
    shapes = {name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items()}
    shapes |= {name: (rows, *shapes[name][1:]) for name, rows in (stored_rows or {}).items()}
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
    return [name, name.removeprefix(prefix), prefix + name, *names_in_whole_model(model.config, name)]


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Names of parameters and persistent buffers, those of one tensor together, in the order of the module tree."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _dropped(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers would drop this stored tensor without a word: it is computed, not learnt."""
    patterns = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(model._keys_to_ignore_on_load_unexpected or ())]
    return any(re.search(pattern, name) for pattern in patterns)
