"""Room for a run that goes on from an older checkpoint: what is newer is moved aside, never deleted.

Left in its place, a newer checkpoint would stand in the way of the save of the same step, and ``last`` would mean a
step that the run, as it goes on, has not reached.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection
from pathlib import Path

from lit_fsdp.checkpoint.disk import naming, sync_folder
from lit_fsdp.checkpoint.find import FOLDER, Damaged, survey
from lit_fsdp.checkpoint.staging import refuse_existing


def move_newer_aside(run_folder: Path, step: int, damaged: Collection[Path] = ()) -> dict[Path, Path]:
    """Rename the run's checkpoints of later steps than ``step``; call on one rank.

    ``step-00000010`` becomes ``damaged-step-00000010-20260101T120000123456``, or ``superseded-…`` if nothing is known
    to be wrong with it. No word means them any more and nothing removes them.

    Args:
        run_folder: Whose checkpoints.
        step: From where the run goes on.
        damaged: Folders whose damage their sizes do not show.

    Returns:
        The new place of each folder by its old one, the oldest step first.

    Raises:
        CheckpointError: A folder cannot be renamed.
    """
    parent = Path(run_folder) / FOLDER
    known = {Path(folder).resolve() for folder in damaged}
    moved = {}
    for entry in survey(parent):
        if entry.step > step:
            word = "damaged" if isinstance(entry, Damaged) or entry.path.resolve() in known else "superseded"
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
            target = parent / f"{word}-{entry.path.name}-{now}"
            refuse_existing(target)
            with naming(entry.path):
                os.rename(entry.path, target)
            moved[entry.path] = target
    if moved:
        sync_folder(parent)
    return moved
