"""Files that are on the disk when we say so, and names that stay inside their folder.

``fsync`` of a file does not save its name: the folder that holds it has to be synced too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from lit_fsdp.errors import CheckpointError

_SMALL_BYTES = 1 << 18
_WRITEBACK_BYTES = 1 << 24
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint as its writer saw it."""

    num_bytes: int
    """Size in bytes."""
    sha256: str
    """Hash of the content, in hex."""


class HashedFile:
    """A new binary file that is hashed while it is written and synced when it is closed.

    Hashing and writing of large pieces run side by side, and the kernel is asked to write back every 16 MiB, so
    that the sync at the end finds little left to do.

    Args:
        path: Must not exist yet.

    Raises:
        CheckpointError: The file cannot be created, written or synced; names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entry: FileEntry | None = None
        self._failure: CheckpointError | None = None
        self._hash = hashlib.sha256()
        self._num_bytes = self._since_writeback = 0
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="checkpoint-file")
        self._writeback: Future[None] | None = None
        with naming(path):
            self._file = open(path, "xb", buffering=_SMALL_BYTES)  # noqa: SIM115

    def write(self, data: Any) -> int:
        """Append ``data`` (any contiguous buffer); returns its bytes."""
        view = memoryview(data)
        if view.nbytes == 0:  # an empty view cannot be cast
            return 0
        view = view.cast("B")
        if view.nbytes < _SMALL_BYTES:
            self._hash.update(view)
            self._append(view)
        else:
            hashing = self._pool.submit(self._hash.update, view)
            try:
                self._append(view)
            finally:
                hashing.result()
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._num_bytes

    def flush(self) -> None:
        """Hand buffered bytes to the kernel."""
        with naming(self.path):
            self._file.flush()

    def fileno(self) -> int:
        """The file descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Flush, sync and close; ``entry`` is set afterwards. Further calls do nothing."""
        if self._file.closed:
            return
        try:
            with naming(self.path), self._file:
                self._file.flush()
                if self._writeback is not None:
                    self._writeback.result()
                os.fsync(self._file.fileno())
        finally:
            self._pool.shutdown()
        self.entry = FileEntry(self._num_bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close without syncing, after a failure."""
        self._pool.shutdown()
        with contextlib.suppress(OSError):  # the failure that led here is the one to report
            self._file.close()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        self.abandon()
        if self._failure is not None and error is not self._failure:  # torch's zip writer raises one of its own
            raise self._failure from error

    def _append(self, view: memoryview) -> None:
        try:
            self._append_now(view)
        except CheckpointError as error:
            self._failure = self._failure or error
            raise

    def _append_now(self, view: memoryview) -> None:
        with naming(self.path):
            self._file.write(view)
            self._num_bytes += view.nbytes
            self._since_writeback += view.nbytes
            if self._since_writeback >= _WRITEBACK_BYTES and (self._writeback is None or self._writeback.done()):
                if self._writeback is not None:
                    self._writeback.result()
                self._since_writeback = 0
                self._writeback = self._pool.submit(os.fdatasync, self._file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def write_bytes(path: Path, data: bytes) -> FileEntry:
    """Write one new file, synced; parents are made."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        file.write(data)
    assert file.entry is not None
    return file.entry


def copy_file(source: Path, target: Path) -> FileEntry:
    """Copy one file, synced; parents are made."""
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with naming(source), source.open("rb") as reader, HashedFile(target) as file:
        while piece := reader.read(_READ_BYTES):
            file.write(piece)
    assert file.entry is not None
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


def hash_file(path: Path) -> str:
    """sha256 of a file in hex."""
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names inside ``folder`` durable."""
    with naming(folder):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_tree(folder: Path) -> None:
    """Make the names in ``folder`` and all folders under it durable."""
    for path, _, _ in os.walk(folder):
        sync_folder(Path(path))


def checked_name(name: str) -> str:
    """``name`` if it is a plain relative POSIX path (``hf/config.json``) that stays inside its folder.

    Raises:
        CheckpointError: It is absolute, has ``..``, empty or dot components, backslashes or control characters.
    """
    parts = name.split("/") if isinstance(name, str) else []
    plain = all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in parts)
    if not parts or not plain or str(PurePosixPath(name)) != name:
        raise CheckpointError(f"{name!r} is not a file name inside a checkpoint; use names such as hf/config.json")
    return name


def inside(folder: Path, name: str) -> Path:
    """The regular file ``name`` under ``folder``.

    Raises:
        CheckpointError: It is missing, is no regular file, or a symbolic link leads out of ``folder``.
    """
    path = folder / checked_name(name)
    with naming(path):
        real = path.resolve(strict=True)
    if not real.is_relative_to(folder.resolve()):
        raise CheckpointError(f"{path}: leads out of the checkpoint, to {real}; copy the file into its place")
    if not real.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    return path
