"""Files that are on the disk when we say so, folders that appear complete or not at all, names that stay inside.

A folder in the making has a hidden name beside its final one and is renamed once at the end. What a kill leaves is
hidden too, and goes when the same folder is made again or the run goes on.
"""

from __future__ import annotations

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
"""A folder without it is no checkpoint."""
Kind = Literal["tmp", "removed", "replaced"]
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|removed|replaced)-[0-9a-f]{16}")
_BUFFER_BYTES = 1 << 18
_SENT_AT_ONCE = 1 << 25  # bytes: the disk writes the last 32 MiB while the next are hashed and copied


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint as its writer saw it."""

    num_bytes: int
    """Size in bytes."""
    xxh3: str
    """XXH3-128 of the content, in hex: it finds damage, not forgery."""


class HashedFile:
    """A new binary file, hashed while it is written, and synced where its ``with`` block ends well; parents are made.

    ``at_once`` lets the disk begin while the rest is hashed, for somebody who waits; it slows training down.
    """

    def __init__(self, path: Path, at_once: bool = True) -> None:
        self.path, self._at_once = path, at_once and sys.platform == "linux"
        self._hash = xxhash.xxh3_128()
        self._num_bytes = self._sent = 0
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "xb", buffering=_BUFFER_BYTES)  # noqa: SIM115

    def write(self, data: Any) -> int:
        """Append ``data`` (any contiguous buffer); returns its bytes."""
        view = memoryview(data)
        if view.nbytes == 0:  # an empty view cannot be cast
            return 0
        view = view.cast("B")
        self._hash.update(view)
        with naming(self.path):
            self._file.write(view)
            self._num_bytes += view.nbytes
            if self._at_once and self._num_bytes - self._sent >= _SENT_AT_ONCE:  # dirty pages are sent, not dropped
                os.posix_fadvise(self._file.fileno(), self._sent, _SENT_AT_ONCE, os.POSIX_FADV_DONTNEED)
                self._sent += _SENT_AT_ONCE
        return view.nbytes

    @property
    def entry(self) -> FileEntry:
        """What was written."""
        return FileEntry(self._num_bytes, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: Any, *more: Any) -> None:
        if failure is not None:
            with contextlib.suppress(OSError):  # the failure that led here is the one to report
                self._file.close()
            return
        with naming(self.path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """Write one new file, synced; parents are made."""
    with HashedFile(path) as file:
        file.write(data)
    return file.entry


def replace_bytes(path: Path, data: bytes) -> None:
    """Give an existing file new content, which a reader sees either wholly or not at all."""
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
    """A hash of a file in hex."""
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names inside ``folder`` durable."""
    with naming(folder):
        sync(folder)


def checked_name(name: str) -> str:
    """``name`` if it is a plain relative POSIX path; else (``..``, backslashes, control characters) CheckpointError."""
    if any(part in ("", ".", "..") or not part.isprintable() or "\\" in part for part in name.split("/")):
        raise CheckpointError(f"{name!r} is not a file name inside a checkpoint; use names such as hf/config.json")
    return name


def inside(folder: Path, name: str) -> Path:
    """The regular file ``name`` under ``folder``; CheckpointError if there is none or a link leads out of it."""
    path = folder / checked_name(name)
    with naming(path):
        real = path.resolve(strict=True)
    if not real.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path}: leads out of the checkpoint, to {real}; copy the file into its place")
    if not real.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    return path


def hidden_name(folder: Path, kind: Kind) -> Path:
    """A fresh hidden sibling of ``folder``: being written, deleted, or giving its place to a new one."""
    return folder.with_name(f".{folder.name}.{kind}-{secrets.token_hex(8)}")


def hidden_folders(parent: Path) -> list[tuple[Path, str, str]]:
    """What is hidden in ``parent``: paths, whose they are, and of which kind."""
    found = [(path, _HIDDEN.fullmatch(path.name)) for path in (sorted(parent.iterdir()) if parent.is_dir() else [])]
    return [(path, match["name"], match["kind"]) for path, match in found if match]


def stage(folder: Path) -> Path:
    """A new empty hidden sibling of ``folder``; what a dead process has left of ``folder`` goes."""
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
    """Make ``draft`` durable and visible as ``folder``; an older one of that name steps aside first, and is deleted."""
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
    """Give ``folder`` its name back if a kill came while it was being replaced."""
    for path, name, kind in hidden_folders(folder.parent):
        if (name, kind) == (folder.name, "replaced") and not os.path.lexists(folder):
            with naming(folder):
                os.rename(path, folder)


def discard(hidden: Path) -> None:
    """Delete what is hidden as far as that is possible."""
    assert _HIDDEN.fullmatch(hidden.name), hidden
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        hidden.unlink(missing_ok=True)


def _refuse_other(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` holds anything but a checkpoint; files and links may be replaced."""
    if folder.is_dir() and not folder.is_symlink() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: not replaced, because it is no checkpoint; remove it or name another")
