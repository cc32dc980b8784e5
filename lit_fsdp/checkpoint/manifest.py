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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lit_fsdp.checkpoint.files import MANIFEST, FileEntry, checked_name, inside, naming, replace_bytes
from lit_fsdp.errors import CheckpointError

FORMAT = "lit_fsdp.checkpoint"
VERSION = 4
Layout = Literal["sharded", "full"]
NOT_ONE = (
    "missing, so this is no checkpoint; give a folder such as RUN/checkpoints/step-00000050; "
    "lit-fsdp ckpt import reads those of other tools, and a Hugging Face folder is a model.name"
)
"""What is said of a manifest that is not there."""


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
    created: str
    """Time of writing, ISO 8601 in UTC."""
    versions: Mapping[str, str]
    tensors: Mapping[str, TensorSpec]
    files: Mapping[str, FileEntry]
    """Every file but the manifest, by path inside the folder."""
    metrics: Mapping[str, float]
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    """The parts that make up each tensor."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the caller of the save added: ``model``, ``epoch``, ``engine`` and the like."""
    averages: Mapping[str, str] = field(default_factory=dict)
    """By name of a tensor the one to read in its place; not part of the file."""

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
        document = {"format": FORMAT, "format_version": VERSION, **vars(self)}
        del document["folder"], document["averages"]
        document["metrics"] = {name: v if math.isfinite(v) else str(v) for name, v in self.metrics.items()}
        return _sealed(document)


def checked_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A caller's additions to a manifest, ready for it: ``global_step``, perhaps ``metrics``, and free JSON keys."""
    try:
        metrics = {name: float(value) for name, value in (extra.get("metrics") or {}).items()}
        plain = json.loads(json.dumps({**extra, "metrics": {}}, allow_nan=False))
        _count(plain.get("global_step"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"manifest: global_step, numbers as metrics and plain JSON are needed: {error}"
        ) from error
    return {**plain, "metrics": metrics}


def read_manifest(folder: Path | str) -> Manifest:
    """The checked manifest of the checkpoint at ``folder``.

    Raises:
        CheckpointError: There is no checkpoint, or the manifest is damaged.
    """
    folder = Path(folder)
    if not os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{folder / MANIFEST}: {NOT_ONE}")
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
    values = {**old.metrics, **metrics}
    if values != old.metrics:
        replace_bytes(folder / MANIFEST, replace(old, metrics=values).dumps())


def _sealed(document: Mapping[str, Any]) -> bytes:
    """The text of a manifest with its own hash; one line per key, since many ranks make very many chunks."""
    digest = hashlib.sha256(_lines(document).encode()).hexdigest()
    return _lines({**document, "sha256": digest}).encode()


def _lines(document: Mapping[str, Any]) -> str:
    texts = {key: json.dumps(value, allow_nan=False, default=vars) for key, value in document.items()}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {text}" for key, text in texts.items()) + "\n}\n"


def _parsed(folder: Path, document: dict[str, Any]) -> Manifest:
    """The manifest from its JSON; any built-in exception means that it is malformed."""
    written = (document.pop("format"), document.pop("format_version"))
    if written != (FORMAT, VERSION):
        raise ValueError(f"format and version are {written}, this version reads {(FORMAT, VERSION)}")
    chunks = {
        name: tuple(Chunk(part["file"], _counts(part["offsets"]), _counts(part["sizes"])) for part in parts)
        for name, parts in document["chunks"].items()
    }
    tensors = {name: TensorSpec(spec["dtype"], _counts(spec["shape"])) for name, spec in document["tensors"].items()}
    for name, spec in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in chunks[name]) != math.prod(spec.shape):
            raise ValueError(f"{name}: its parts do not make up the tensor")
    files = {checked_name(n): FileEntry(_count(f["num_bytes"]), f["xxh3"]) for n, f in document["files"].items()}
    metrics = {name: float(value) for name, value in document["metrics"].items()}
    _counts((document["global_step"], document["world_size"]))
    parsed = {"chunks": chunks, "tensors": tensors, "files": files, "metrics": metrics}
    return Manifest(folder=folder, **{**document, **parsed})


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number >= 0")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))
