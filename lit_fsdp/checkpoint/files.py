"""Durable files, folders that appear only when complete, and file names that cannot leave their folder.

While being written, a folder has a hidden name next to its final one; it is renamed once at the end. A killed process
leaves only hidden folders, which are deleted when the same folder is written again or the run resumes.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import xxhash

from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import sync

MANIFEST = "manifest.json"
"""A folder without this file is not a checkpoint."""
Kind = Literal["tmp", "removed", "replaced"]
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|removed|replaced)-[0-9a-f]{16}")
_BUFFER_BYTES = 1 << 18
_SENT_AT_ONCE = 1 << 25  # bytes: the disk writes 32 MiB while the next 32 MiB are hashed and copied


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of a checkpoint file, recorded by its writer."""

    num_bytes: int
    """Size in bytes."""
    xxh3: str
    """XXH3-128 of the content, in hex: detects damage, not forgery."""


class HashedFile:
    """A new binary file, hashed while written, and synced if its ``with`` block succeeds; parent folders are created.

    The option ``at_once`` starts disk writes while the rest is hashed. Use it only if the caller waits: it slows
    training down.
    """

    def __init__(self, path: Path, at_once: bool = True) -> None:
        self.path, self._at_once = path, at_once and sys.platform == "linux"
        self._hash = xxhash.xxh3_128()
        self._num_bytes = self._sent = 0
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "xb", buffering=_BUFFER_BYTES)  # noqa: SIM115

    def write(self, data: Any) -> int:
        """Append ``data`` (any contiguous buffer), and return its number of bytes."""
        view = memoryview(data)
        if view.nbytes == 0:  # an empty view cannot be cast
            return 0
        view = view.cast("B")
        self._hash.update(view)
        with naming(self.path):
            self._file.write(view)
            self._num_bytes += view.nbytes
            if self._at_once and self._num_bytes - self._sent >= _SENT_AT_ONCE:  # writes dirty pages back
                os.posix_fadvise(self._file.fileno(), self._sent, _SENT_AT_ONCE, os.POSIX_FADV_DONTNEED)
                self._sent += _SENT_AT_ONCE
        return view.nbytes

    @property
    def entry(self) -> FileEntry:
        """Size and hash of the written content."""
        return FileEntry(self._num_bytes, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: Any, *more: Any) -> None:
        if failure is not None:
            with contextlib.suppress(OSError):  # report the original failure
                self._file.close()
            return
        with naming(self.path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Convert an OSError to a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """Write and sync one new file; parent folders are created."""
    with HashedFile(path) as file:
        file.write(data)
    return file.entry


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace the content of an existing file atomically."""
    beside = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        write_bytes(beside, data)
        with naming(path):
            os.replace(beside, path)
            sync_folder(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def hash_file(path: Path, kind: Any = xxhash.xxh3_128) -> str:
    """Return the hash of a file in hex."""
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names inside ``folder`` durable."""
    with naming(folder):
        sync(folder)


def checked_name(name: str) -> str:
    """Return ``name`` if it is a plain relative POSIX path; CheckpointError for ``..``, backslashes, control chars."""
    if any(part in ("", ".", "..") or not part.isprintable() or "\\" in part for part in name.split("/")):
        raise CheckpointError(f"{name!r} is not a file name inside a checkpoint; use names such as hf/config.json")
    return name


def inside(folder: Path, name: str) -> Path:
    """Return the regular file ``name`` in ``folder``; CheckpointError if it is missing or a link leads outside."""
    path = folder / checked_name(name)
    with naming(path):
        real = path.resolve(strict=True)
    if not real.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path}: links outside the checkpoint, to {real}; replace the link by the file")
    if not real.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    return path


def hidden_name(folder: Path, kind: Kind) -> Path:
    """Return a new hidden sibling path of ``folder``, for a folder being written, deleted or replaced."""
    return folder.with_name(f".{folder.name}.{kind}-{secrets.token_hex(8)}")


def hidden_folders(parent: Path) -> list[tuple[Path, str, str]]:
    """List hidden folders in ``parent``: path, name of the final folder, and kind."""
    found = [(path, _HIDDEN.fullmatch(path.name)) for path in (sorted(parent.iterdir()) if parent.is_dir() else [])]
    return [(path, match["name"], match["kind"]) for path, match in found if match]


def stage(folder: Path) -> Path:
    """Create an empty hidden sibling of ``folder``, and delete leftovers of dead processes for ``folder``."""
    _refuse_other(folder)
    with naming(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    restore(folder)
    for path, name, _ in hidden_folders(folder.parent):
        if name == folder.name:
            discard(path)
    draft = hidden_name(folder, "tmp")
    with naming(draft):
        draft.mkdir()
    return draft


def publish(draft: Path, folder: Path) -> None:
    """Make ``draft`` durable and visible as ``folder``; an existing folder is first renamed, then deleted."""
    for path, _, _ in os.walk(draft):
        sync_folder(Path(path))
    _refuse_other(folder)
    old = hidden_name(folder, "replaced") if os.path.lexists(folder) else None
    with naming(folder):
        if old is not None:
            os.rename(folder, old)
        try:
            os.rename(draft, folder)
        except BaseException:
            if old is not None:
                os.rename(old, folder)
            raise
    sync_folder(folder.parent)
    if old is not None:
        discard(old)


def restore(folder: Path) -> None:
    """Restore the name of ``folder`` if the process was killed while replacing it."""
    for path, name, kind in hidden_folders(folder.parent):
        if (name, kind) == (folder.name, "replaced") and not os.path.lexists(folder):
            with naming(folder):
                os.rename(path, folder)


def discard(hidden: Path) -> None:
    """Delete a hidden file or folder, ignoring errors inside a folder."""
    assert _HIDDEN.fullmatch(hidden.name), hidden
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        hidden.unlink(missing_ok=True)


def _refuse_other(folder: Path) -> None:
    """Raise CheckpointError for a non-empty ``folder`` that is not a checkpoint; files and links may be replaced."""
    if folder.is_dir() and not folder.is_symlink() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: not replaced, because it is not a checkpoint; remove it or choose another")
