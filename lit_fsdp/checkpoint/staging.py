"""Folders that appear complete or not at all.

A folder in the making has a hidden name beside its final one, so on the same file system, and is renamed once at
the end. While its maker lives it is locked, so that the next save can tell what dead ones have left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_fsdp.checkpoint.disk import naming, sync_folder, sync_tree
from lit_fsdp.errors import CheckpointError

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|removed)-[0-9a-f]{16}")


@dataclass(frozen=True)
class Unfinished:
    """A hidden folder: a save or a removal that is going on, or what a dead one has left."""

    path: Path
    """Its folder."""
    kind: Literal["tmp", "removed"]
    """Being written (``tmp``) or being deleted (``removed``)."""
    is_live: bool
    """Whether the process that makes it lives, as far as its lock tells; removals are not locked."""


def hidden_name(folder: Path, kind: Literal["tmp", "removed"]) -> Path:
    """A fresh hidden sibling of ``folder``: being written (``tmp``) or being deleted (``removed``)."""
    return folder.with_name(f".{folder.name}.{kind}-{secrets.token_hex(8)}")


def stage(folder: Path, held: contextlib.ExitStack) -> Path:
    """A new empty hidden sibling of ``folder``, locked until ``held`` closes; dead ones beside it are removed.

    Raises:
        CheckpointError: ``folder`` exists, or its parent cannot be written.
    """
    refuse_existing(folder)
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
    """Make ``staging`` durable and visible as ``folder`` in one step."""
    sync_tree(staging)
    refuse_existing(folder)
    with naming(folder):
        os.rename(staging, folder)
    sync_folder(folder.parent)


def refuse_existing(folder: Path) -> None:
    """Raise CheckpointError if there is anything at ``folder``."""
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists already and is never overwritten; remove it or choose another place")


def discard(folder: Path) -> None:
    """Delete a hidden folder as far as that is possible; what stays is swept by the next save."""
    assert _HIDDEN.fullmatch(folder.name), folder
    shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> list[Path]:
    """Delete what dead saves and removals left in ``parent``; returns what was there.

    The lock of a folder in the making ends with the process that holds it, however it died.
    """
    removed = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        if _HIDDEN.fullmatch(path.name) and path.is_dir() and not path.is_symlink() and not _is_held(path):
            discard(path)
            removed.append(path)
    return removed


def unfinished(parent: Path) -> list[Unfinished]:
    """The hidden folders in ``parent``; the next save there removes those of the dead."""
    found = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _HIDDEN.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append(Unfinished(path, "tmp" if match["kind"] == "tmp" else "removed", _is_held(path)))
    return found


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
