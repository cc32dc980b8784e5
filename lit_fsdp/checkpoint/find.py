"""Which checkpoints a run has, and which one a word such as ``last`` means.

Standard library only: the command line asks before torch is imported.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from lit_fsdp.errors import CheckpointError

FOLDER = "checkpoints"
_STEP_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Found:
    """One complete checkpoint of a run."""

    step: int
    """Optimizer steps done, from its manifest."""
    path: Path
    """Its folder."""
    metrics: dict[str, float]
    """Logged values from its manifest."""
    created: str
    """Time of writing, ISO 8601 in UTC."""
    num_bytes: int
    """Bytes of its files."""


@dataclass(frozen=True)
class Damaged:
    """A folder in the place of a checkpoint that is not a complete one."""

    path: Path
    """Its folder."""
    reason: str
    """What is wrong with it."""


def step_folder(run_folder: Path | str, step: int) -> Path:
    """Where the checkpoint of ``step`` lies: ``<run_folder>/checkpoints/step-00000050``."""
    return Path(run_folder) / FOLDER / f"step-{step:08d}"


def checkpoints(run_folder: Path | str) -> list[Found]:
    """The complete checkpoints of a run, oldest step first: their manifest is sound and no file is missing or cut."""
    return [entry for entry in _survey(Path(run_folder)) if isinstance(entry, Found)]


def damaged(run_folder: Path | str) -> list[Damaged]:
    """The visible folders among a run's checkpoints that are not complete ones, with the reason."""
    return [entry for entry in _survey(Path(run_folder)) if isinstance(entry, Damaged)]


def best(found: Sequence[Found], monitor: str, mode: Literal["min", "max"]) -> Found | None:
    """The checkpoint with the best finite value of ``monitor``; the newest of equals; None if none has one."""
    scored = [entry for entry in found if math.isfinite(entry.metrics.get(monitor, math.nan))]
    sign = -1 if mode == "min" else 1
    return max(scored, key=lambda entry: (sign * entry.metrics[monitor], entry.step), default=None)


def resolve_ckpt_path(
    word_or_path: str | Path, run_folder: Path | str, monitor: str, mode: Literal["min", "max"]
) -> Path:
    """The checkpoint folder meant by ``last``, ``best`` or a path.

    Args:
        word_or_path: ``last`` is the newest complete step, ``best`` has the best value of ``monitor``.
        run_folder: Whose checkpoints the words speak of.
        monitor: Metric that decides what is best.
        mode: Whether a smaller (min) or a larger (max) value is better.

    Raises:
        CheckpointError: There is none (what is there is listed), the path is no checkpoint, or a step newer than the
            newest complete one is damaged: that is never passed over in silence.
    """
    if str(word_or_path) not in ("last", "best"):
        path = Path(word_or_path)
        read_manifest(path)
        return path
    found = checkpoints(run_folder)
    broken = damaged(run_folder)
    if not found:
        raise CheckpointError(_nothing_there(Path(run_folder), str(word_or_path), broken))
    if word_or_path == "best":
        choice = best(found, monitor, mode)
        if choice is None:
            there = sorted({name for entry in found for name in entry.metrics})
            raise CheckpointError(
                f"ckpt_path best: none of the {len(found)} checkpoints in {found[0].path.parent} has a value of "
                f"{monitor}; metrics there: {', '.join(there) or 'none'}; give last or a path"
            )
        return choice.path
    newest = found[-1]
    newer = [entry for entry in broken if _step_of(entry.path) > newest.step]
    if newer:
        raise CheckpointError(
            f"ckpt_path last: {newer[-1].path} is damaged: {newer[-1].reason}\n"
            f"  the newest complete one is {newest.path}; to go on from there, give it as --ckpt_path"
        )
    return newest.path


def _survey(run_folder: Path) -> list[Found | Damaged]:
    parent = run_folder / FOLDER
    if not parent.is_dir():
        return []
    entries: list[Found | Damaged] = []
    for path in sorted(parent.iterdir()):
        if path.name.startswith(".") or not (os.path.lexists(path / MANIFEST) or _STEP_NAME.fullmatch(path.name)):
            continue
        try:
            manifest = read_manifest(path)
            for name in manifest.files:
                manifest.file(name)
        except (CheckpointError, OSError) as error:  # OSError: removed by another rank meanwhile
            entries.append(Damaged(path, str(error)))
        else:
            entries.append(_found(manifest))
    return sorted(entries, key=lambda e: (e.step if isinstance(e, Found) else _step_of(e.path), e.path.name))


def _found(manifest: Manifest) -> Found:
    return Found(manifest.global_step, manifest.folder, dict(manifest.metrics), manifest.created, manifest.num_bytes)


def _step_of(path: Path) -> int:
    match = _STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _nothing_there(run_folder: Path, word: str, broken: Sequence[Damaged]) -> str:
    if broken:
        lines = "\n".join(f"  {entry.path.name}: {entry.reason}" for entry in broken)
        return f"ckpt_path {word}: no complete checkpoint in {run_folder / FOLDER}; damaged:\n{lines}"
    if not run_folder.is_dir():
        return f"ckpt_path {word}: there is no run folder {run_folder}"
    if (run_folder / MANIFEST).is_file():
        return f"ckpt_path {word}: {run_folder} is a checkpoint, not a run folder; give its path as --ckpt_path"
    names = sorted(path.name for path in run_folder.iterdir())
    there = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"ckpt_path {word}: no checkpoint in {run_folder / FOLDER}; in {run_folder}: {there or 'nothing'}"
