"""What differs between a checkpoint and its manifest, file by file.

Standard library only: ``lit-fsdp ckpt verify`` needs no torch. The tensor description of a sharded checkpoint is a
listed file like any other, so a hash covers it; it is read, and compared with the manifest, only when tensors are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.checkpoint.disk import hash_file
from lit_fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from lit_fsdp.errors import CheckpointError

_HASHING_THREADS = 4
# A kill while metrics are added to a manifest leaves the new one beside the old, which holds: no reader opens it.
_UNFINISHED_MANIFEST = re.compile(rf"\.{re.escape(MANIFEST)}\.tmp-[0-9a-f]{{16}}")


@dataclass(frozen=True)
class Difference:
    """One file that is not what the manifest says."""

    file: str
    """Its path inside the checkpoint."""
    problem: str
    """What is wrong with it."""

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def find_differences(folder: Path | str) -> list[Difference]:
    """Everything in which the checkpoint at ``folder`` differs from its manifest; nothing if it is sound.

    Every listed file is there, has its size and its sha256, and nothing else lies in the folder. An unreadable
    manifest is the only difference then.
    """
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except (CheckpointError, OSError) as error:
        return [Difference(MANIFEST, _short(error, folder / MANIFEST))]
    return sorted([*file_differences(manifest, manifest.files), *_unlisted(manifest)], key=lambda d: d.file)


def file_differences(manifest: Manifest, names: Iterable[str], hashes: bool = True) -> list[Difference]:
    """The files among ``names`` that are missing, of another size or, with ``hashes``, of other content."""
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _difference(manifest, name, hashes), sorted(names))
    return [difference for difference in found if difference is not None]


def describe(folder: Path, differences: Sequence[Difference], shown: int = 8) -> str:
    """``folder`` and what differs there, one line per file; more than ``shown`` are counted."""
    lines = [f"{folder} is damaged:", *(f"  {difference}" for difference in differences[:shown])]
    if len(differences) > shown:
        lines.append(f"  and {len(differences) - shown} more files")
    return "\n".join(lines)


def _difference(manifest: Manifest, name: str, hashes: bool) -> Difference | None:
    try:
        path = manifest.file(name)
        if hashes and hash_file(path) != manifest.files[name].sha256:
            return Difference(name, "sha256 differs from the manifest")
    except (CheckpointError, OSError) as error:
        return Difference(name, _short(error, manifest.folder / name))
    return None


def _unlisted(manifest: Manifest) -> list[Difference]:
    found = []
    for place, folders, files in os.walk(manifest.folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))):
            inner = str(Path(place, name).relative_to(manifest.folder))
            if inner not in manifest.files and inner != MANIFEST and not _UNFINISHED_MANIFEST.fullmatch(inner):
                found.append(Difference(inner, "not in the manifest"))
    return found


def _short(error: Exception, path: Path) -> str:
    """The text of an error without the path that stands before it anyway, and without advice."""
    return str(error).removeprefix(f"{path}: ").partition("; ")[0]
