"""Folders that appear complete or not at all.

A folder in the making has a hidden name beside its final one, so on the same file system, and is renamed once at
the end. What a kill leaves is hidden too, and goes when the same folder is made again or the run goes on.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Literal

from lit_fsdp.checkpoint.files import naming, sync_folder, sync_tree
from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.errors import CheckpointError

Kind = Literal["tmp", "removed", "replaced"]
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|removed|replaced)-[0-9a-f]{16}")


def hidden_name(folder: Path, kind: Kind) -> Path:
    """A fresh hidden sibling of ``folder``: being written, deleted, or giving its place to a new one."""
    return folder.with_name(f".{folder.name}.{kind}-{secrets.token_hex(8)}")


def hidden_folders(parent: Path) -> list[tuple[Path, str, Kind]]:
    """The hidden folders in ``parent``: their paths, whose they are, and of which kind."""
    found = []
    for path in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _HIDDEN.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append((path, match["name"], match["kind"]))
    return found  # type: ignore[return-value]


def stage(folder: Path) -> Path:
    """A new empty hidden sibling of ``folder``; what a dead process has left of ``folder`` is cleared away."""
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
    """Make ``draft`` durable and visible as ``folder``; an older one of that name steps aside first, and is deleted.

    After a kill in between, the older one gets its name back when it is asked for, or at the next save there.
    """
    sync_tree(draft)
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
