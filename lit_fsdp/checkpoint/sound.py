"""Verification shared out over the ranks, and the way back to an older checkpoint that all of them take together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.checkpoint import staging
from lit_fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.verify import Difference, describe, file_differences
from lit_fsdp.errors import CheckpointError

_WAY_OUT = (
    "  fix:     lit-fsdp ckpt ls RUN --verify shows which checkpoints are sound: give one as --ckpt_path;\n"
    "           --resume.fallback true lets --ckpt_path last (or best) go on with the newest (next best) sound one"
)


@dataclass(frozen=True)
class Sound:
    """The checkpoint to load, and those that were passed over because they are damaged."""

    path: Path
    """Its folder."""
    damaged: Mapping[Path, str]
    """What is wrong with each one that would have come first, by folder."""


def sound_checkpoint(folder: Path, others: Sequence[Path] = (), verify: bool = True) -> Sound:
    """The first of ``folder`` and ``others`` that agrees with its manifest, the same one on every rank; collective.

    Args:
        folder: The checkpoint that was asked for.
        others: What may be taken instead, in this order.
        verify: Compare the hash of every file, not only its size; each rank hashes a part of them.

    Raises:
        CheckpointError: On every rank; all are damaged, and each file that differs is named.
    """
    ranks = Ranks()
    ranks.first(f"looking for {folder}", lambda: staging.restore(Path(folder)))
    if not others and (Path(folder) / ".metadata").is_file():  # somebody else's: nothing is damaged
        ranks.first(f"reading {folder}", lambda: read_manifest(folder))
    damaged: dict[Path, str] = {}
    for path in (Path(folder), *others):
        found = differences_on_all(path, ranks, verify)
        if not found:
            return Sound(path, damaged)
        damaged[path] = describe(path, found)
    text = "\n".join(damaged.values())
    if others:
        raise CheckpointError(f"none of {len(damaged)} checkpoints is sound:\n{text}")
    raise CheckpointError(f"{text}\n{_WAY_OUT}")


def shared_differences(manifest: Manifest, names: Iterable[str], ranks: Ranks, hashes: bool = True) -> list[Difference]:
    """:func:`file_differences` with the files shared out, the largest first to the rank with the least; collective."""
    load, mine = [0] * ranks.size, []
    for name in sorted(names, key=lambda n: (-manifest.files[n].num_bytes, n)):
        rank = load.index(min(load))
        load[rank] += manifest.files[name].num_bytes
        if rank == ranks.rank:
            mine.append(name)
    found = ranks.run(f"verifying {manifest.folder}", lambda: file_differences(manifest, mine, hashes))
    return sorted((difference for part in found for difference in part), key=lambda d: d.file)


def differences_on_all(folder: Path, ranks: Ranks, hashes: bool = True) -> list[Difference]:
    """What differs between the checkpoint and its manifest, the same list on every rank; collective.

    Files that the manifest does not list are no difference here: nothing reads them.
    """
    manifests: list[Manifest] = []

    def read() -> Difference | None:
        try:
            manifests.append(read_manifest(folder))
        except (CheckpointError, OSError) as error:
            return Difference(MANIFEST, str(error).removeprefix(f"{folder / MANIFEST}: "))
        return None

    unread = [found for found in ranks.run(f"reading {folder}", read) if found is not None]
    return unread[:1] or shared_differences(manifests[0], manifests[0].files, ranks, hashes)
