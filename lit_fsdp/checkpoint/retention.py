"""Which checkpoints may go, and how one goes without ever being half there."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lit_fsdp.checkpoint import staging
from lit_fsdp.checkpoint.disk import naming, sync_folder
from lit_fsdp.checkpoint.find import Found, checkpoints, ranked
from lit_fsdp.checkpoint.manifest import MANIFEST, not_a_checkpoint
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError

_log = logging.getLogger(__name__)


def to_remove(found: Sequence[Found], config: CheckpointConfig, current: int | None = None) -> list[Found]:
    """The checkpoints that nothing keeps, oldest first.

    Kept are the ``keep_last`` newest, the ``keep_best`` with the best value of ``monitor``, and every step that
    ``keep_every`` divides. Of those saved on a signal, between the others, only the newest counts: a run that is
    preempted a hundred times has one more checkpoint than one that never was, and as many whole intervals behind it.

    Args:
        found: The complete checkpoints of a run.
        config: The ``checkpoint`` section.
        current: The step just saved; it stays even where a run that was resumed from an older checkpoint finds newer
            ones beside it.
    """
    ordered = sorted(found, key=lambda entry: entry.step)
    passed = [entry for entry in ordered if entry.on_signal][:-1]
    counted = [entry for entry in ordered if entry not in passed]
    newest = counted if config.keep_last == -1 else counted[-config.keep_last :]
    top = ranked(ordered, config.monitor, config.mode)[: config.keep_best]
    every = config.keep_every
    kept = {entry.path for entry in (*newest, *top)}
    kept |= {entry.path for entry in ordered if entry.step == current or (every and entry.step % every == 0)}
    return [entry for entry in ordered if entry.path not in kept]


def retain(run_folder: Path, config: CheckpointConfig, current: int | None = None) -> Path | None:
    """Remove the checkpoints of a run that nothing keeps, on one rank, once the new one stands.

    Args:
        run_folder: Its ``checkpoints`` are looked at.
        config: The ``checkpoint`` section.
        current: See :func:`to_remove`.

    Returns:
        The best checkpoint that is there, if any has a value of the metric.
    """
    found = checkpoints(run_folder)
    gone = to_remove(found, config, current)
    for old in gone:
        try_to_remove(old.path)
    left = [entry for entry in found if entry not in gone]
    return next((entry.path for entry in ranked(left, config.monitor, config.mode)), None)


def try_to_remove(folder: Path) -> None:
    """:func:`remove`; one that cannot go is a warning, since training does not need its end."""
    try:
        remove(folder)
    except (CheckpointError, OSError) as error:
        _log.warning("%s", error)


def remove(folder: Path) -> None:
    """Delete one checkpoint; it is hidden by a rename first, so a kill in between leaves nothing half visible.

    Of a symbolic link only the link goes; a file of Lightning's own strategies goes as it is.

    Raises:
        CheckpointError: ``folder`` is no checkpoint, or cannot be renamed or deleted.
    """
    folder = Path(folder)
    if folder.is_symlink() or folder.is_file():
        with naming(folder):
            folder.unlink()
        return
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"not removed: {not_a_checkpoint(folder)}")
    hidden = staging.hidden_name(folder, "removed")
    with naming(folder):
        os.rename(folder, hidden)
    sync_folder(folder.parent)
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the old checkpoint cannot be deleted: {error.filename or hidden}: {error.strerror or error}; "
            f"what is left of it is in {hidden}"
        ) from error


def sweep(parent: Path) -> None:
    """Delete what killed saves and removals have left in a folder of checkpoints; says what it found.

    A leftover that cannot be deleted is named in a warning: it takes space, but is no checkpoint.
    """
    for path in staging.sweep(parent):
        if os.path.lexists(path):
            _log.warning("%s: left by a killed save or removal, and cannot be deleted; delete it by hand", path)
        else:
            _log.info("%s: removed; a killed save or removal had left it", path)
