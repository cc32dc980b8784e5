"""Folders that appear complete or not at all.

A folder in the making has a hidden name beside its final one, so on the same file system, and is renamed once at
the end; an older one of that name gives its place up in the same moment. While its maker lives it is locked, so that
the next save can tell what dead ones have left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from lit_fsdp.checkpoint.disk import naming, sync_folder, sync_tree
from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.errors import CheckpointError

Kind = Literal["tmp", "removed", "replaced"]
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|removed|replaced)-[0-9a-f]{16}")


@dataclass(frozen=True)
class Unfinished:
    """A hidden folder: a save or a removal that is going on, or what a dead one has left."""

    path: Path
    """Its folder."""
    kind: Kind
    """Being written (``tmp``), deleted (``removed``), or giving its place to a new one (``replaced``)."""
    is_live: bool
    """Whether the process that makes it lives, as far as its lock tells; removals are not locked."""


def hidden_name(folder: Path, kind: Kind) -> Path:
    """A fresh hidden sibling of ``folder``; for the kinds see :class:`Unfinished`."""
    return folder.with_name(f".{folder.name}.{kind}-{secrets.token_hex(8)}")


def stage(folder: Path, held: contextlib.ExitStack) -> Path:
    """A new empty hidden sibling of ``folder``, locked until ``held`` closes; dead ones beside it are removed.

    Raises:
        CheckpointError: ``folder`` is something that no checkpoint may replace, or its parent cannot be written.
    """
    _refuse_other(folder)
    with naming(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    staging = hidden_name(folder, "tmp")
    with naming(staging):
        staging.mkdir()
        handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, handle)
    with contextlib.suppress(OSError):  # some network file systems cannot lock folders; then nothing is protected
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return staging


def publish(staging: Path, folder: Path) -> None:
    """Make ``staging`` durable and visible as ``folder`` in one step; an older one of that name is deleted afterwards.

    Where the file system cannot swap two names, the older one is moved aside first. After a kill in between it gets
    its name back when it is asked for, or at the next save there.
    """
    sync_tree(staging)
    _refuse_other(folder)
    old: Path | None = None
    with naming(folder):
        if not os.path.lexists(folder):
            os.rename(staging, folder)
        elif _swapped(staging, folder):
            old = staging
        else:
            old = hidden_name(folder, "replaced")
            os.rename(folder, old)
            try:
                os.rename(staging, folder)
            except BaseException:
                os.rename(old, folder)
                raise
    sync_folder(folder.parent)
    if old is not None:
        discard(old)


def restore(folder: Path) -> None:
    """Give ``folder`` its name back if a kill came while it was being replaced."""
    for path in folder.parent.iterdir() if folder.parent.is_dir() and not os.path.lexists(folder) else []:
        match = _HIDDEN.fullmatch(path.name)
        if match and match["kind"] == "replaced" and match["name"] == folder.name:
            os.rename(path, folder)


def refuse_existing(folder: Path) -> None:
    """Raise CheckpointError if there is anything at ``folder``."""
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists already and is never overwritten; remove it or choose another place")


def discard(hidden: Path) -> None:
    """Delete what is hidden as far as that is possible; what stays of a folder is swept by the next save."""
    assert _HIDDEN.fullmatch(hidden.name), hidden
    if hidden.is_dir() and not hidden.is_symlink():
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        hidden.unlink(missing_ok=True)


def sweep(parent: Path) -> list[Path]:
    """Delete what dead saves and removals left in ``parent``; returns what was there.

    The lock of a folder in the making ends with the process that holds it, however it died.
    """
    removed = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _HIDDEN.fullmatch(path.name)
        if match and match["kind"] == "replaced":
            restore(parent / match["name"])
        if match and path.is_dir() and not path.is_symlink() and not _is_held(path):
            discard(path)
            removed.append(path)
    return removed


def unfinished(parent: Path) -> list[Unfinished]:
    """The hidden folders in ``parent``; the next save there removes those of the dead."""
    found = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _HIDDEN.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append(Unfinished(path, cast(Kind, match["kind"]), _is_held(path)))
    return found


def _refuse_other(folder: Path) -> None:
    """Raise CheckpointError if ``folder`` holds anything but a checkpoint; files and links may be replaced."""
    if folder.is_dir() and not folder.is_symlink() and not (folder / MANIFEST).is_file() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: not replaced, because it is no checkpoint; remove it or choose another place")


def _swapped(one: Path, other: Path) -> bool:
    """Swap two names in one moment; False if this system, or this file system, cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    at_working_folder, exchange = -100, 2
    if rename(at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # NFS, Lustre and others
        return False
    raise OSError(code, os.strerror(code))


def _is_held(folder: Path) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
