"""What an export writes, decided from descriptions alone: names, where each tensor comes from, dtypes and files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from lit_fsdp.checkpoint.manifest import Manifest, TensorSpec
from lit_fsdp.checkpoint.safetensors_file import num_bytes
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.host import GIB

if TYPE_CHECKING:
    from lit_fsdp.models.base import BaseWeights

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Dtypes of an export, by the words of the command line."""
Form = Literal["model", "adapter", "merge"]
BASE = "base/"
"""What begins the name of a tensor that is not in the checkpoint, but in the base of its adapters."""
OpenBase = Callable[[Manifest], "BaseWeights"]
"""Opens the base that a checkpoint of adapters names."""
_MODEL = "model/"
_ADAPTER = "default"
_WHOLE_COPY = f".modules_to_save.{_ADAPTER}."
_LORA_PARTS = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.", ".lora_magnitude_vector.")


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The adapter that is added to a weight; tensors by their names in the checkpoint."""

    a: str
    b: str
    magnitude: str | None
    """Of DoRA."""
    scaling: float
    is_transposed: bool
    """Whether the weight is stored with its inputs first, as embeddings and GPT-2's layers are."""


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Which tensors go into which file."""

    form: Form
    """A whole model, an adapter alone, or a model with its adapter merged."""
    entry: Mapping[str, Any]
    """What the manifest says about the model."""
    sources: Mapping[str, str]
    """Name in the checkpoint, or in its base after ``BASE``, by name in the export."""
    deltas: Mapping[str, Delta] = field(default_factory=dict)
    """Adapters to merge, by name in the export."""
    specs: Mapping[str, TensorSpec]
    """Dtype and shape by name in the export; a tied tensor once."""
    files: Mapping[str, list[str]]
    """Names by weight file, as transformers numbers them."""
    base: BaseWeights | None = None
    """What is merged with; opened for nothing else."""

    @property
    def dtype(self) -> str:
        """The dtype that most bytes of floating-point numbers have."""
        return _most_common_dtype(self.specs.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(num_bytes(spec) for spec in self.specs.values())


def plan_export(
    manifest: Manifest,
    dtype: str | None,
    max_shard_gib: float,
    lora: Literal["adapter", "merge"] | None = None,
    open_base: OpenBase | None = None,
) -> ExportPlan:
    """Names, dtypes and files of an export; arguments and errors are :func:`lit_fsdp.checkpoint.export.export`'s."""
    entry = manifest.extra.get("model")
    if entry is None:
        raise CheckpointError(f"{manifest.folder}: only checkpoints of a CausalLMModule can be exported")
    adapter = entry.get("adapter")
    given = "a checkpoint without adapters"
    require(adapter or lora is None, f"--{lora}", given, "one of a run with model.lora", f"drop --{lora}")
    prefix = _MODEL + entry["prefix"]
    found = {name.removeprefix(prefix): name for name in manifest.tensors if name.startswith(prefix)}
    form: Form = (lora or "adapter") if adapter else "model"
    available, kept = dict(manifest.tensors), DTYPES.get(dtype or "")
    base: BaseWeights | None = None
    if form == "merge":
        assert open_base is not None
        base = open_base(manifest)
        of_base = {BASE + name: TensorSpec(*spec) for name, spec in base.specs.items()}
        available |= of_base
        kept = kept or _most_common_dtype(of_base.values())
    if form == "adapter":
        sources = _adapter_sources(found, entry["kept_with_adapter"])
    else:
        tied = {base_name(again): base_name(first) for again, first in entry["tied"].items()}
        sources = _model_sources(found, tied, base.specs if base else ())
    specs = {}
    for name, source in sorted(sources.items()):
        spec = available[source]
        is_float = getattr(torch, spec.dtype).is_floating_point
        specs[name] = TensorSpec(kept if kept and is_float else spec.dtype, spec.shape)
    return ExportPlan(
        form=form,
        entry=entry,
        sources=sources,
        deltas=_deltas(found, adapter, sources, available) if form == "merge" else {},
        specs=specs,
        files=_files(specs, form, int(max_shard_gib * GIB)),
        base=base,
    )


def base_name(name: str) -> str:
    """The name that a tensor has in the model without adapters: wrappers around layers and whole copies are gone."""
    for part in (".base_layer.", ".original_module.", _WHOLE_COPY):
        name = name.replace(part, ".")
    return name


def _files(specs: dict[str, TensorSpec], form: Form, max_bytes: int) -> dict[str, list[str]]:
    if form == "adapter":
        return {"adapter_model.safetensors": list(specs)}
    size_of: Any = num_bytes  # of a description instead of a tensor
    pattern = "model{suffix}.safetensors"
    found = split_state_dict_into_shards_factory(
        specs, get_storage_size=size_of, filename_pattern=pattern, max_shard_size=max_bytes
    )
    return found.filename_to_tensors


def _most_common_dtype(specs: Iterable[TensorSpec]) -> str:
    votes: Counter[str] = Counter()
    for spec in specs:
        votes[spec.dtype] += num_bytes(spec) * getattr(torch, spec.dtype).is_floating_point
    return votes.most_common(1)[0][0]


def _is_lora(name: str) -> bool:
    return any(part in f"{name}." for part in _LORA_PARTS)


def _model_sources(found: Mapping[str, str], tied: Mapping[str, str], of_base: Iterable[str]) -> dict[str, str]:
    """Every name of the plain model; of a module that was trained whole its trained copy, else that of the base."""
    copies = {base_name(name) for name in found if _WHOLE_COPY in name}
    plain = {name: BASE + name for name in of_base} | {
        base_name(name): source
        for name, source in found.items()
        if not _is_lora(name) and (_WHOLE_COPY in name or base_name(name) not in copies)
    }
    sources = {name: source for name, source in plain.items() if name not in tied}
    for alias, name in tied.items():  # the one copy that was saved may stand under either name
        if name not in sources and alias in plain:
            sources[name] = plain[alias]
    return sources


def _adapter_sources(found: Mapping[str, str], beside: Collection[str]) -> dict[str, str]:
    """The names that peft gives the tensors of an adapter in ``adapter_model.safetensors``.

    What is kept with it (embeddings) stands there under its own name, as with peft's ``save_embedding_layers``.
    """
    sources = {}
    for name, source in found.items():
        kept = name
        if _is_lora(name):
            kept = name.removesuffix(f".{_ADAPTER}").replace(f".{_ADAPTER}.", ".")
            kept = kept.removesuffix(".weight") if ".lora_magnitude_vector." in name else kept
        elif _WHOLE_COPY in name:
            kept = name.replace(_WHOLE_COPY, ".")
        elif name not in beside:
            continue
        sources[f"base_model.model.{kept}"] = source
    return sources


def _deltas(
    found: Mapping[str, str], adapter: Mapping[str, Any], sources: Mapping[str, str], saved: Mapping[str, TensorSpec]
) -> dict[str, Delta]:
    """The adapter of each weight that has one."""
    deltas = {}
    rank = int(adapter["r"])
    for name, source in found.items():
        for part, other in ((".lora_A.", ".lora_B."), (".lora_embedding_A.", ".lora_embedding_B.")):
            layer, inner, rest = f"{name}.".partition(part)
            if not inner:
                continue
            b = found[f"{layer}{other}{rest}".removesuffix(".")]
            num_in, num_out = saved[source].shape[1], saved[b].shape[0]
            weight = saved[sources[base_name(f"{layer}.weight")]].shape
            deltas[base_name(f"{layer}.weight")] = Delta(
                a=source,
                b=b,
                magnitude=found.get(f"{layer}.lora_magnitude_vector.{_ADAPTER}.weight"),
                scaling=adapter["lora_alpha"] / (math.sqrt(rank) if adapter.get("use_rslora") else rank),
                is_transposed=weight == (num_in, num_out) and (num_in != num_out or bool(adapter["fan_in_fan_out"])),
            )
    return deltas
