"""Compare a checkpoint with its manifest, file by file, and find an intact checkpoint; without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.files import MANIFEST, hash_file
from lit_fsdp.checkpoint.manifest import Manifest, read_manifest
from lit_fsdp.errors import CheckpointError

if TYPE_CHECKING:
    from lit_fsdp.checkpoint.ranks import Ranks

_THREADS = 4
_WAY_OUT = (
    "  fix:     run lit-fsdp ckpt verify RUN to list intact checkpoints, and set one as --ckpt_path;\n"
    "           with --resume.fallback true, --ckpt_path last (or best) uses the newest (next best) intact checkpoint"
)


def verify(folder: Path | str, hashes: bool = True, ranks: Ranks | None = None) -> dict[str, str]:
    """Return the differences of a checkpoint from its manifest, by file path; empty if it is intact.

    If the manifest is unreadable, it is the only difference. Without ``hashes`` only sizes are compared. With
    ``ranks``, each rank checks a part of the files and all ranks get the same result (collective).
    """
    folder = Path(folder)

    def read() -> Manifest | dict[str, str]:
        try:
            return read_manifest(folder)
        except (CheckpointError, OSError) as error:
            return {MANIFEST: _short(error, folder / MANIFEST)}

    manifest = read() if ranks is None else ranks.first(f"reading {folder}", read)  # rank 0 reads for all
    if isinstance(manifest, dict):
        return manifest
    names = sorted(manifest.files, key=lambda name: -manifest.files[name].num_bytes)
    if ranks is None:
        parts = [_differences(manifest, names, hashes)]
    else:
        mine = names[ranks.rank :: ranks.size]
        parts = ranks.run(f"verifying {folder}", lambda: _differences(manifest, mine, hashes))
    return dict(sorted(item for part in parts for item in part.items()))


def sound_checkpoint(
    folder: Path, others: Sequence[Path], ranks: Ranks, hashes: bool = True
) -> tuple[Path, Mapping[Path, str]]:
    """Return the first intact checkpoint of ``folder`` and ``others``, and the damage of those before it; collective.

    Raises:
        CheckpointError: On every rank if all are damaged; names each file that differs.
    """
    ranks.first(f"looking for {folder}", lambda: disk.restore(folder))
    if not others:
        ranks.first(f"reading {folder}", lambda: read_manifest(folder))
    damaged: dict[Path, str] = {}
    for path in (folder, *others):
        found = verify(path, hashes, ranks)
        if not found:
            return path, damaged
        damaged[path] = describe(path, found)
    raise CheckpointError("\n".join([*damaged.values(), _WAY_OUT]))


def describe(folder: Path, differences: Mapping[str, str]) -> str:
    """Describe the differences in ``folder``, one line per file."""
    return "\n".join([f"{folder} is damaged:", *(f"  {name}: {problem}" for name, problem in differences.items())])


def refuse(folder: Path, differences: Mapping[str, str]) -> None:
    """Raise CheckpointError if there are differences."""
    if differences:
        raise CheckpointError(f"{describe(folder, differences)}\n  use another checkpoint")


def sha256_of(manifest: Manifest) -> str:
    """Return one SHA-256 for a checkpoint: that of the ``sha256sum`` output for its files, sorted by name."""
    lines = (f"{hash_file(manifest.file(name), hashlib.sha256)}  {name}\n" for name in sorted(manifest.files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _differences(manifest: Manifest, names: Sequence[str], hashes: bool) -> dict[str, str]:
    def problem(name: str) -> str:
        try:
            path = manifest.file(name)
            if hashes and hash_file(path) != manifest.files[name].xxh3:
                return "xxh3 differs from the manifest"
        except (CheckpointError, OSError) as error:
            return _short(error, manifest.folder / name)
        return ""

    with ThreadPoolExecutor(_THREADS) as pool:
        found = zip(names, pool.map(problem, names), strict=True)
        return {name: text for name, text in found if text}


def _short(error: Exception, path: Path) -> str:
    """Return the text of an error without the path prefix and without the fix."""
    return str(error).removeprefix(f"{path}: ").partition("; ")[0]
