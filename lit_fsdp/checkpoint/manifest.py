"""``manifest.json``: the contents of a checkpoint; a folder without it is not a checkpoint.

The manifest is written last, lists every other file with size and hash, and ends with a hash of itself, so that any
later change is detected. Standard library only: the command line reads manifests before torch is imported.
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
from lit_fsdp.errors import CheckpointError, require

FORMAT = "lit_fsdp.checkpoint"
VERSION = 4
Layout = Literal["sharded", "full"]
NOT_ONE = (
    "missing, so this is not a checkpoint; use a folder such as RUN/checkpoints/step-00000050; "
    "import checkpoints of other tools with lit-fsdp ckpt import; a Hugging Face folder is a model.name"
)
"""Error text for a missing manifest."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of one full (unsharded) tensor."""

    dtype: str
    """Name without ``torch.``, e.g. ``float32``."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Chunk:
    """Location of a part of a tensor, stored under the tensor's name in a safetensors file."""

    file: str
    """Path inside the checkpoint."""
    offsets: tuple[int, ...]
    """Start of the part in the full tensor."""
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of a checkpoint."""

    folder: Path
    """Location that it was read from."""
    layout: Layout
    """One safetensors file per rank under ``tensors/`` (sharded) or one ``tensors.safetensors`` (full)."""
    global_step: int
    world_size: int
    created: str
    """Time of writing, ISO 8601 in UTC."""
    versions: Mapping[str, str]
    tensors: Mapping[str, TensorSpec]
    files: Mapping[str, FileEntry]
    """Every file except the manifest, by path inside the folder."""
    metrics: Mapping[str, float]
    chunks: Mapping[str, tuple[Chunk, ...]] = field(default_factory=dict)
    """Parts of each tensor."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Entries added by the caller of the save, such as ``model``, ``epoch`` and ``engine``."""
    averages: Mapping[str, str] = field(default_factory=dict)
    """Tensor to read in place of another, by name of the other; not part of the file."""

    def averaged(self, option: str) -> Manifest:
        """Return the manifest with averages of :class:`lit_fsdp.EMAWeights` in place of weights, for an ``option``."""
        prefix = "state/callbacks/EMAWeights/weights/"
        names = {f"model/{name.removeprefix(prefix)}": name for name in self.tensors if name.startswith(prefix)}
        given, fix = f"{self.folder}, which has no averages", f"train with lit_fsdp.EMAWeights, or drop {option}"
        require(names, option, given, "a checkpoint after their first update", fix)
        return replace(self, averages=names)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(entry.num_bytes for entry in self.files.values())

    def file(self, name: str) -> Path:
        """Return the listed file ``name``, checked to be inside the folder and of the listed size."""
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
        """Return the content of ``manifest.json``."""
        document = {"format": FORMAT, "format_version": VERSION, **vars(self)}
        del document["folder"], document["averages"]
        document["metrics"] = {name: v if math.isfinite(v) else str(v) for name, v in self.metrics.items()}
        return _sealed(document)


def checked_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Validate a caller's manifest entries: ``global_step``, optional ``metrics``, and any JSON keys."""
    try:
        metrics = {name: float(value) for name, value in (extra.get("metrics") or {}).items()}
        plain = json.loads(json.dumps({**extra, "metrics": {}}, allow_nan=False))
        _count(plain.get("global_step"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"manifest: requires global_step, numeric metrics and plain JSON: {error}") from error
    return {**plain, "metrics": metrics}


def read_manifest(folder: Path | str) -> Manifest:
    """Read and validate the manifest of the checkpoint at ``folder``.

    Raises:
        CheckpointError: The folder is not a checkpoint, or the manifest is damaged.
    """
    folder = Path(folder)
    if not os.path.lexists(folder / MANIFEST):
        missing = f"{folder} does not exist; see lit-fsdp ckpt ls RUN for the checkpoints of a run"
        if (folder / "run.lock").exists():  # a run folder
            has = (folder / "checkpoints").is_dir()
            what = f"a run folder; name one of {folder / 'checkpoints'}" if has else "a run without a checkpoint"
            raise CheckpointError(f"{folder}: {what}")
        raise CheckpointError(f"{folder / MANIFEST}: {NOT_ONE}" if folder.exists() else missing)
    path = inside(folder, MANIFEST)
    with naming(path):
        text = path.read_bytes()
    try:
        document = json.loads(text)
        del document["sha256"]
        if _sealed(document) != text:  # also detects a changed byte that does not affect any value
            raise ValueError("it was changed after it was written")
        return _parsed(folder, document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged or invalid ({error!r}); use another checkpoint") from error


def record_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add ``metrics`` to the manifest of a complete checkpoint, atomically; call on one rank."""
    old = read_manifest(folder)
    values = {**old.metrics, **metrics}
    if values != old.metrics:
        replace_bytes(folder / MANIFEST, replace(old, metrics=values).dumps())


def _sealed(document: Mapping[str, Any]) -> bytes:
    """Serialize a manifest with its own hash; one line per key, because many ranks create very many chunks."""
    digest = hashlib.sha256(_lines(document).encode()).hexdigest()
    return _lines({**document, "sha256": digest}).encode()


def _lines(document: Mapping[str, Any]) -> str:
    texts = {key: json.dumps(value, allow_nan=False, default=vars) for key, value in document.items()}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {text}" for key, text in texts.items()) + "\n}\n"


def _parsed(folder: Path, document: dict[str, Any]) -> Manifest:
    """Build the manifest from its JSON; any built-in exception means that it is malformed."""
    written = (document.pop("format"), document.pop("format_version"))
    if written != (FORMAT, VERSION):
        raise ValueError(f"format and version are {written}, but this version reads {(FORMAT, VERSION)}")
    chunks = {
        name: tuple(Chunk(part["file"], _counts(part["offsets"]), _counts(part["sizes"])) for part in parts)
        for name, parts in document["chunks"].items()
    }
    tensors = {name: TensorSpec(spec["dtype"], _counts(spec["shape"])) for name, spec in document["tensors"].items()}
    for name, spec in tensors.items():
        if sum(math.prod(chunk.sizes) for chunk in chunks[name]) != math.prod(spec.shape):
            raise ValueError(f"{name}: its parts do not cover the tensor")
    files = {checked_name(n): FileEntry(_count(f["num_bytes"]), f["xxh3"]) for n, f in document["files"].items()}
    metrics = {name: float(value) for name, value in document["metrics"].items()}
    _counts((document["global_step"], document["world_size"]))
    parsed = {"chunks": chunks, "tensors": tensors, "files": files, "metrics": metrics}
    return Manifest(folder=folder, **{**document, **parsed})


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not an integer >= 0")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))
