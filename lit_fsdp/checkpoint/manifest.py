"""``manifest.json``: what a checkpoint consists of; a folder without one is no checkpoint.

It is written last, lists every other file with size and hash, and ends with a hash of itself, so that whatever
changes later is noticed. Standard library only: the command line reads manifests before torch is imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_fsdp.checkpoint.files import MANIFEST, FileEntry, checked_name, inside, naming, replace_bytes
from lit_fsdp.errors import CheckpointError

FORMAT = "lit_fsdp.checkpoint"
VERSION = 3
Layout = Literal["sharded", "full"]


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of one whole (unsharded) tensor."""

    dtype: str
    """Name without ``torch.``, e.g. ``float32``."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Chunk:
    """Where a part of a tensor lies: under the tensor's name in a safetensors file."""

    file: str
    """Path inside the checkpoint."""
    offsets: tuple[int, ...]
    """Where the part begins in the whole tensor."""
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's description of itself."""

    folder: Path
    """Where it was read from."""
    layout: Layout
    """One safetensors file per rank under ``tensors/`` (sharded) or one ``tensors.safetensors`` (full)."""
    global_step: int
    world_size: int
    """Ranks that wrote it."""
    created: str
    """Time of writing, ISO 8601 in UTC."""
    versions: Mapping[str, str]
    """Of python and the packages that wrote it."""
    tensors: Mapping[str, TensorSpec]
    files: Mapping[str, FileEntry]
    """Every file but the manifest, by path inside the folder."""
    metrics: Mapping[str, float]
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    """The parts that make up each tensor, by its name."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the caller of the save added: ``model``, ``epoch``, ``engine`` and the like."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, the manifest aside."""
        return sum(entry.num_bytes for entry in self.files.values())

    def file(self, name: str) -> Path:
        """The listed file ``name``, which lies inside the folder and has the listed size."""
        if name not in self.files:
            raise CheckpointError(f"{self.folder / name}: not in the manifest of this checkpoint")
        path = inside(self.folder, name)
        num_bytes = path.stat().st_size
        if num_bytes != self.files[name].num_bytes:
            raise CheckpointError(
                f"{path}: {num_bytes} bytes, {self.files[name].num_bytes} in the manifest; "
                "this checkpoint is damaged, use another one"
            )
        return path

    def dumps(self) -> bytes:
        """The text of ``manifest.json``."""
        document = {
            "format": FORMAT,
            "format_version": VERSION,
            "extra": dict(self.extra),
            "global_step": self.global_step,
            "layout": self.layout,
            "world_size": self.world_size,
            "created": self.created,
            "versions": dict(self.versions),
            "metrics": {name: v if math.isfinite(v) else str(v) for name, v in self.metrics.items()},
            "tensors": {
                name: {
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "chunks": [[c.file, list(c.offsets), list(c.sizes)] for c in self.chunks.get(name, ())],
                }
                for name, spec in self.tensors.items()
            },
            "files": {name: {"bytes": f.num_bytes, "xxh3": f.xxh3} for name, f in self.files.items()},
        }
        return _sealed(document)


def checked_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A caller's additions to a manifest, ready for it: ``global_step``, perhaps ``metrics``, and free JSON keys."""
    try:
        plain = json.loads(json.dumps({k: v for k, v in extra.items() if k != "metrics"}, allow_nan=False))
        _count(plain.get("global_step"))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"manifest: global_step and plain JSON are needed: {error}") from error
    return {**plain, "metrics": checked_metrics(extra.get("metrics") or {})}


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain floats; 0-dim tensors are numbers too."""
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"metrics: {dict(metrics)!r} holds something that is not one number: {error}") from error


def read_manifest(folder: Path | str) -> Manifest:
    """The checked manifest of the checkpoint at ``folder``.

    Raises:
        CheckpointError: There is nothing there, it is something else (named), or the manifest is damaged.
    """
    folder = Path(folder)
    if not os.path.lexists(folder / MANIFEST):
        raise CheckpointError(not_a_checkpoint(folder))
    path = inside(folder, MANIFEST)
    with naming(path):
        text = path.read_bytes()
    try:
        document = json.loads(text)
        del document["sha256"]
        if _sealed(document) != text:  # also where a changed byte leaves every value as it was
            raise ValueError("it was changed after it was written")
        return _parsed(folder, document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged or not ours ({error!r}); use another checkpoint") from error


def record_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add ``metrics`` to a finished checkpoint's manifest, atomically; call on one rank."""
    old = read_manifest(folder)
    values = {**old.metrics, **checked_metrics(metrics)}
    if values != old.metrics:
        replace_bytes(folder / MANIFEST, Manifest(**{**vars(old), "metrics": values}).dumps())


def not_a_checkpoint(path: Path) -> str:
    """What is at ``path`` instead of a checkpoint, and what to give instead."""
    if not os.path.lexists(path):
        return f"{path}: no such checkpoint folder"
    steps = sorted(path.glob(f"step-*/{MANIFEST}")) or sorted(path.glob(f"checkpoints/step-*/{MANIFEST}"))
    if steps:
        return f"{path}: not a checkpoint; give one of those that are in it: {steps[-1].parent}"
    if (path / "config.json").is_file():
        return f"{path}: a Hugging Face model folder, not a checkpoint; give it as model.name to train from it"
    return f"{path}: not a checkpoint: it has no {MANIFEST}; lit-fsdp ckpt import reads those of other tools"


def _sealed(document: Mapping[str, Any]) -> bytes:
    """The text of a manifest with its own hash; one line per key, since many ranks make very many chunks."""
    digest = hashlib.sha256(_lines(document).encode()).hexdigest()
    return _lines({**document, "sha256": digest}).encode()


def _lines(document: Mapping[str, Any]) -> str:
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in document.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _parsed(folder: Path, document: dict[str, Any]) -> Manifest:
    """The manifest from its JSON; any built-in exception means that it is malformed."""
    written = (document["format"], document["format_version"])
    if written != (FORMAT, VERSION):
        raise ValueError(f"format and version are {written}, this version reads {(FORMAT, VERSION)}")
    tensors = {name: TensorSpec(str(t["dtype"]), _counts(t["shape"])) for name, t in document["tensors"].items()}
    chunks = {
        name: tuple(Chunk(file, _counts(offsets), _counts(sizes)) for file, offsets, sizes in t["chunks"])
        for name, t in document["tensors"].items()
    }
    for name, spec in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in chunks[name]) != math.prod(spec.shape):
            raise ValueError(f"{name}: its parts do not make up the tensor")
    return Manifest(
        folder=folder,
        layout=document["layout"],
        global_step=_count(document["global_step"]),
        world_size=_count(document["world_size"]),
        created=document["created"],
        versions=document["versions"],
        tensors=tensors,
        chunks=chunks,
        files={checked_name(n): FileEntry(_count(f["bytes"]), str(f["xxh3"])) for n, f in document["files"].items()},
        metrics={name: float(value) for name, value in document["metrics"].items()},
        extra=document["extra"],
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number >= 0")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))
