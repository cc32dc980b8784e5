"""What differs between a checkpoint and its manifest, file by file, and which checkpoint is sound.

Torch is not imported: ``lit-fsdp ckpt verify`` needs none.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lit_fsdp.checkpoint import staging
from lit_fsdp.checkpoint.files import hash_file
from lit_fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from lit_fsdp.errors import CheckpointError

if TYPE_CHECKING:
    from lit_fsdp.checkpoint.ranks import Ranks

_THREADS = 4
# A kill while metrics are added to a manifest leaves the new one beside the old, which holds: no reader opens it.
_UNFINISHED_MANIFEST = re.compile(rf"\.{re.escape(MANIFEST)}\.tmp-[0-9a-f]{{16}}")
_WAY_OUT = (
    "  fix:     lit-fsdp ckpt ls RUN --verify shows which checkpoints are sound: give one as --ckpt_path;\n"
    "           --resume.fallback true lets --ckpt_path last (or best) go on with the newest (next best) sound one"
)


@dataclass(frozen=True)
class Difference:
    """One file that is not what the manifest says."""

    file: str
    """Its path inside the checkpoint."""
    problem: str
    """What is wrong with it."""

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def verify(folder: Path | str, hashes: bool = True, ranks: Ranks | None = None) -> list[Difference]:
    """Everything in which the checkpoint at ``folder`` differs from its manifest; nothing if it is sound.

    An unreadable manifest is the only difference then. A file that the manifest does not list is one in a single
    process alone: a run reads none.

    Args:
        folder: The checkpoint.
        hashes: Compare the content of each file, not only its size.
        ranks: Each takes a part of the files, and all get the same answer; collective.
    """
    folder = Path(folder)
    read = lambda: _read(folder)  # noqa: E731
    manifest = read() if ranks is None else ranks.first(f"reading {folder}", read)  # rank 0 looks for all
    if isinstance(manifest, Difference):
        return [manifest]
    if ranks is None:
        found = [*_differences(manifest, list(manifest.files), hashes), *_unlisted(manifest)]
    else:
        names = _share(manifest, ranks.rank, ranks.size)
        parts = ranks.run(f"verifying {folder}", lambda: _differences(manifest, names, hashes))
        found = [difference for part in parts for difference in part]
    return sorted(found, key=lambda difference: difference.file)


def sound_checkpoint(
    folder: Path, others: Sequence[Path], ranks: Ranks, hashes: bool = True
) -> tuple[Path, Mapping[Path, str]]:
    """The first of ``folder`` and ``others`` that agrees with its manifest, the same one on every rank; collective.

    Args:
        folder: The checkpoint that was asked for.
        others: What may be taken instead, in this order.
        ranks: That look together.
        hashes: As for :func:`verify`.

    Returns:
        Its folder, and what is wrong with each one that would have come first, by folder.

    Raises:
        CheckpointError: On every rank; all are damaged, and each file that differs is named.
    """
    ranks.first(f"looking for {folder}", lambda: staging.restore(folder))
    if not others:
        ranks.first(f"reading {folder}", lambda: read_manifest(folder))
    damaged: dict[Path, str] = {}
    for path in (folder, *others):
        found = verify(path, hashes, ranks)
        if not found:
            return path, damaged
        damaged[path] = describe(path, found)
    text = "\n".join(damaged.values())
    if others:
        raise CheckpointError(f"none of {len(damaged)} checkpoints is sound:\n{text}")
    raise CheckpointError(f"{text}\n{_WAY_OUT}")


def describe(folder: Path, differences: Sequence[Difference], shown: int = 8) -> str:
    """``folder`` and what differs there, one line per file; more than ``shown`` are counted."""
    lines = [f"{folder} is damaged:", *(f"  {difference}" for difference in differences[:shown])]
    if len(differences) > shown:
        lines.append(f"  and {len(differences) - shown} more files")
    return "\n".join(lines)


def sha256_of(manifest: Manifest) -> str:
    """One SHA-256 for a checkpoint: that of what ``sha256sum`` says of the manifest's files, sorted by name."""
    lines = (f"{hash_file(manifest.file(name), hashlib.sha256)}  {name}\n" for name in sorted(manifest.files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _read(folder: Path) -> Manifest | Difference:
    try:
        return read_manifest(folder)
    except (CheckpointError, OSError) as error:
        return Difference(MANIFEST, _short(error, folder / MANIFEST))


def _share(manifest: Manifest, rank: int, size: int) -> list[str]:
    """The files that ``rank`` hashes: the largest first to the rank with the least."""
    load, mine = [0] * size, []
    for name in sorted(manifest.files, key=lambda n: (-manifest.files[n].num_bytes, n)):
        least = load.index(min(load))
        load[least] += manifest.files[name].num_bytes
        if least == rank:
            mine.append(name)
    return mine


def _differences(manifest: Manifest, names: Sequence[str], hashes: bool) -> list[Difference]:
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _difference(manifest, name, hashes), names)
    return [difference for difference in found if difference is not None]


def _difference(manifest: Manifest, name: str, hashes: bool) -> Difference | None:
    try:
        path = manifest.file(name)
        if hashes and hash_file(path) != manifest.files[name].xxh3:
            return Difference(name, "xxh3 differs from the manifest")
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
