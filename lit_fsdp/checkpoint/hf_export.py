"""A checkpoint as a Hugging Face folder, on one CPU process and with one tensor in memory at a time.

The checkpoint brings everything along: tensors under the module's names, and the config, tokenizer and chat
template in its ``hf/`` folder. Nothing is downloaded and no model is built.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lit_fsdp.checkpoint import dcp_files, disk, staging
from lit_fsdp.checkpoint.manifest import Manifest, TensorSpec, read_manifest
from lit_fsdp.checkpoint.safetensors_file import num_bytes, opened, write_tensors
from lit_fsdp.checkpoint.store import verify_files
from lit_fsdp.checkpoint.write import FULL_FILE
from lit_fsdp.errors import CheckpointError, ConfigError

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_EXTRAS = "hf/"
_MODEL = "model/"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export wrote."""

    folder: Path
    """Where the model is."""
    dtype: str
    """Dtype of its floating-point tensors, as in config.json."""
    num_tensors: int
    """Tensors written; a tied one once."""
    num_params: int
    """Elements in them."""
    num_bytes: int
    """Bytes of the weight files."""
    files: list[str]
    """Every file in the folder."""
    tied: dict[str, str]
    """Names that are not stored because the model shares them, and the name each is shared with."""
    left_out: list[str]
    """Tensors of the training module that are not part of the transformers model."""

    def __str__(self) -> str:
        shared = f", {len(self.tied)} tied name(s) stored once" if self.tied else ""
        size = f"{self.num_params / 1e6:.1f}M parameters, {self.num_bytes / _GIB:.2f} GiB"
        return f"{self.folder}: {self.num_tensors} tensors in {self.dtype}, {size}{shared}"


@dataclass(frozen=True)
class _Plan:
    """Which tensors go into which file."""

    sources: dict[str, str]
    specs: dict[str, TensorSpec]
    shards: list[list[str]]
    tied: dict[str, str]
    left_out: list[str]

    @property
    def dtype(self) -> str:
        """The dtype most floating-point elements have."""
        votes: Counter[str] = Counter()
        for spec in self.specs.values():
            if getattr(torch, spec.dtype).is_floating_point:
                votes[spec.dtype] += max(1, num_bytes(spec))
        return votes.most_common(1)[0][0] if votes else "float32"

    def files(self) -> dict[str, list[str]]:
        """Tensor names by file name, in the order transformers numbers them."""
        if len(self.shards) == 1:
            return {"model.safetensors": self.shards[0]}
        count = len(self.shards)
        return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(self.shards, 1)}


def export(
    ckpt: Path, out: Path, dtype: Literal["bf16", "fp32"] | None = None, max_shard_gib: float = 5.0
) -> ExportReport:
    """Write the model of a checkpoint as a folder that plain transformers loads.

    Args:
        ckpt: A checkpoint in either layout, verified first.
        out: The folder to make; missing or empty. It appears only when it is complete.
        dtype: Of the floating-point tensors; None keeps what was trained.
        max_shard_gib: Largest weight file in GiB (one tensor larger than that gets its own).

    Raises:
        CheckpointError: ``ckpt`` is no sound checkpoint, or its module left no description of a transformers model.
        ConfigError: ``out`` is not empty, or an argument is out of range.
    """
    ckpt, out = Path(ckpt), Path(out)
    _check_arguments(out, dtype, max_shard_gib)
    manifest = read_manifest(ckpt)
    plan = _plan_export(manifest, None if dtype is None else _DTYPES[dtype], max_shard_gib)
    config = _config(manifest, plan.dtype)
    verify_files(ckpt)
    with contextlib.ExitStack() as held:
        with disk.naming(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            out.rmdir()
        place = staging.stage(out, held)
        try:
            _write(place, manifest, plan, config)
            files = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
            staging.publish(place, out)
        except BaseException:
            staging.discard(place)
            raise
    return ExportReport(
        folder=out,
        dtype=plan.dtype,
        num_tensors=len(plan.specs),
        num_params=sum(torch.Size(spec.shape).numel() for spec in plan.specs.values()),
        num_bytes=sum(num_bytes(spec) for spec in plan.specs.values()),
        files=files,
        tied=plan.tied,
        left_out=plan.left_out,
    )


def _check_arguments(out: Path, dtype: str | None, max_shard_gib: float) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, " | ".join(_DTYPES), "leave it out to keep the dtype of the checkpoint")
    if not max_shard_gib > 0:
        raise ConfigError("max_shard_gib", max_shard_gib, "> 0", "write max_shard_gib: 5")
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        kind = "a folder that is not empty" if out.is_dir() else "something that is no folder"
        raise ConfigError("out", f"{out}, {kind}", "a new or empty folder", f"name another one, or remove {out}")


def _plan_export(manifest: Manifest, dtype: str | None, max_shard_gib: float) -> _Plan:
    """Names, dtypes and files of the export; pure.

    Raises:
        CheckpointError: The manifest does not describe a transformers model, or there is no tensor of it.
    """
    model = manifest.extra.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("prefix"), str):
        raise CheckpointError(
            f"{manifest.folder}: its manifest has no `model` entry, so the module that wrote it is not lit_fsdp's "
            "CausalLMModule; only such checkpoints can be exported"
        )
    prefix = _MODEL + model["prefix"]
    tied = {str(alias): str(name) for alias, name in (model.get("tied") or {}).items()}
    found = {name.removeprefix(prefix): name for name in manifest.tensors if name.startswith(prefix)}
    sources = {name: source for name, source in found.items() if name not in tied}
    for alias, name in tied.items():  # the one copy that was saved may stand under either name
        if name not in sources and alias in found:
            sources[name] = found[alias]
    if not sources:
        raise CheckpointError(f"{manifest.folder}: no tensor begins with {prefix}; this checkpoint holds no model")
    specs = {}
    for name, source in sorted(sources.items()):
        spec = manifest.tensors[source]
        is_float = getattr(torch, spec.dtype).is_floating_point
        specs[name] = TensorSpec(dtype, spec.shape) if dtype is not None and is_float else spec
    left_out = sorted(n for n in manifest.tensors if n.startswith(_MODEL) and not n.startswith(prefix))
    return _Plan(sources, specs, _shards(specs, max_shard_gib * _GIB), tied, left_out)


def _shards(specs: Mapping[str, TensorSpec], max_bytes: float) -> list[list[str]]:
    """Names in order, cut where the next tensor would make a file larger than ``max_bytes``."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        size = num_bytes(spec)
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _config(manifest: Manifest, dtype: str) -> bytes:
    """config.json of the checkpoint with the dtype of the exported weights."""
    path = manifest.file(f"{_EXTRAS}config.json")
    try:
        config = json.loads(path.read_bytes())
        config.pop("torch_dtype", None)  # its name before transformers 5
        config.pop("quantization_config", None)  # the weights are written as plain numbers
        config["dtype"] = dtype
        config["architectures"] = config.get("architectures") or _architectures(str(config.get("model_type")))
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: not the config of a model: {error}") from error
    return json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"


def _architectures(model_type: str) -> list[str]:
    """The causal LM class of a model type, which a config that was never part of a saved model does not name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return [name] if isinstance(name, str) else list(name or ())


def _write(place: Path, manifest: Manifest, plan: _Plan, config: bytes) -> None:
    disk.write_bytes(place / "config.json", config)
    for name in manifest.files:
        if name.startswith(_EXTRAS) and name != f"{_EXTRAS}config.json":
            disk.copy_file(manifest.file(name), place / name.removeprefix(_EXTRAS))
    with _reader(manifest) as read:

        def tensor_of(name: str) -> torch.Tensor:
            return read(plan.sources[name]).to(getattr(torch, plan.specs[name].dtype))

        for file, names in plan.files().items():
            write_tensors(place / file, {name: plan.specs[name] for name in names}, tensor_of)
    if len(plan.shards) > 1:
        weight_map = {name: file for file, names in plan.files().items() for name in names}
        total = {"total_size": sum(num_bytes(spec) for spec in plan.specs.values())}
        index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
        disk.write_bytes(place / "model.safetensors.index.json", json.dumps(index, indent=2).encode() + b"\n")


@contextlib.contextmanager
def _reader(manifest: Manifest) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function that reads one whole tensor of the checkpoint by name."""
    if manifest.layout == "sharded":
        description: Any = dcp_files.read_description(manifest)
        yield lambda name: dcp_files.read_tensor(manifest, description, name)
        return
    with opened(manifest.file(FULL_FILE)) as file:
        yield file.get_tensor
