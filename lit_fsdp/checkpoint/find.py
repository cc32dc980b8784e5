"""Which checkpoints a run has, and which one a word such as ``last`` means.

Torch is not imported: the command line asks before.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from lit_fsdp.config.run import CheckpointConfig, RunConfig
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.host import is_first_process, is_launched_by_lightning, is_requeued

FOLDER = "checkpoints"
STEP_NAME = re.compile(r"step-(\d+)")
_ASIDE_NAME = re.compile(r"(damaged|superseded)-.+")


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
    on_signal: bool = False
    """Whether it was saved between others, for no other reason than a signal."""


@dataclass(frozen=True)
class Damaged:
    """A folder in the place of a checkpoint that is not a complete one."""

    path: Path
    """Its folder."""
    reason: str
    """What is wrong with it."""
    step: int
    """Optimizer steps done, by its manifest or else by its name; -1 if neither says."""
    metrics: dict[str, float] | None
    """Logged values, if its manifest can be read."""


@dataclass(frozen=True)
class Choice:
    """The checkpoint that a word or a path means, as far as manifests and sizes of files tell."""

    path: Path
    """Its folder."""
    others: tuple[Path, ...] = ()
    """What the word means next, should this one turn out to be damaged; nothing for a path."""
    damaged: tuple[Damaged, ...] = ()
    """What would have come first, or may have, but is visibly damaged."""


def step_folder(run_folder: Path | str, step: int) -> Path:
    """Where the checkpoint of ``step`` lies: ``<run_folder>/checkpoints/step-00000050``."""
    return Path(run_folder) / FOLDER / f"step-{step:08d}"


def checkpoints(run_folder: Path | str) -> list[Found]:
    """The complete checkpoints of a run, oldest step first: their manifest is sound and no file is missing or cut."""
    return [entry for entry in survey(Path(run_folder) / FOLDER) if isinstance(entry, Found)]


def damaged(run_folder: Path | str) -> list[Damaged]:
    """The visible folders among a run's checkpoints that are not complete ones, with the reason."""
    return [entry for entry in survey(Path(run_folder) / FOLDER) if isinstance(entry, Damaged)]


def ranked(found: Sequence[Found], monitor: str, mode: Literal["min", "max"]) -> list[Found]:
    """The checkpoints with a finite value of ``monitor``, the best first; the newer one first of equals."""
    scored = [entry for entry in found if math.isfinite(entry.metrics.get(monitor, math.nan))]
    sign = -1 if mode == "min" else 1
    return sorted(scored, key=lambda entry: (sign * entry.metrics[monitor], entry.step), reverse=True)


def best(found: Sequence[Found], monitor: str, mode: Literal["min", "max"]) -> Found | None:
    """The checkpoint with the best finite value of ``monitor``; the newest of equals; None if none has one."""
    return next(iter(ranked(found, monitor, mode)), None)


def choose(
    word_or_path: str | Path, run_folder: Path | str, monitor: str, mode: Literal["min", "max"], fallback: bool = False
) -> Choice:
    """The checkpoint folder meant by ``last``, ``best`` or a path, and what may take its place.

    Args:
        word_or_path: ``last`` is the newest complete step, ``best`` has the best value of ``monitor``.
        run_folder: Whose checkpoints the words speak of.
        monitor: Metric that decides what is best.
        mode: Whether a smaller (min) or a larger (max) value is better.
        fallback: Whether a word may pass over what is visibly damaged; a path never is.

    Raises:
        CheckpointError: There is none (what is there is listed), the path is no checkpoint, or without ``fallback``
            a damaged one would come first, or may: that is never passed over in silence.
    """
    word = str(word_or_path)
    if word not in ("last", "best"):
        path = Path(word_or_path).expanduser()
        read_manifest(path)
        return Choice(path)
    found, broken = checkpoints(run_folder), damaged(run_folder)
    if not found:
        raise CheckpointError(_nothing_there(Path(run_folder), word, broken))
    order = found[::-1] if word == "last" else ranked(found, monitor, mode)
    if not order:
        there = sorted({name for entry in found for name in entry.metrics})
        raise CheckpointError(
            f"ckpt_path best: none of the {len(found)} checkpoints in {found[0].path.parent} has a value of "
            f"{monitor}; metrics there: {', '.join(there) or 'none'}; give last or a path"
        )
    passed = [entry for entry in broken if _comes_first(entry, order[0], monitor if word == "best" else None, mode)]
    choice = Choice(order[0].path, tuple(entry.path for entry in order[1:]), tuple(reversed(passed)))
    if passed and not fallback:
        which = "the newest complete one" if word == "last" else "the best complete one"
        lines = "\n".join(f"  {entry.path} is damaged: {entry.reason}" for entry in choice.damaged)
        raise CheckpointError(
            f"ckpt_path {word}: a damaged checkpoint would come first{' or may' if word == 'best' else ''}\n{lines}\n"
            f"  {which} is {choice.path}: to go on from there, give it as --ckpt_path or add --resume.fallback true"
        )
    return choice


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run goes on from, if any."""

    path: str | None
    """The checkpoint, or a word or file that Lightning knows."""
    others: Sequence[Path] = ()
    """With ``resume.fallback``: what may take its place, should its hashes show that it is damaged."""
    manifest: Manifest | None = None

    def check(self, run: RunConfig) -> None:
        """Raise ConfigError where a recipe cannot go on from the checkpoint, though its tensors would fit."""
        if self.manifest is None:
            return
        if run.model.lora is not None:
            run.model.lora.check_checkpoint(self.manifest)
        limit, step = run.trainer["max_steps"], self.manifest.global_step
        given, allowed = f"{limit} with {self.path}", f"at least {step}, from which the run goes on"
        fix = f"set trainer.max_steps: {2 * step}, or give an earlier checkpoint"
        require(run.verb != "fit" or not 0 < limit < step, "trainer.max_steps", given, allowed, fix)


def find_resume(verb: str, word: str | None, run_folder: Path, config: CheckpointConfig, fallback: bool) -> Resume:
    """The checkpoint that ``ckpt_path`` stands for; every rank looks for itself, before any of them meet.

    Args:
        verb: ``fit`` refuses a run folder that holds checkpoints when ``word`` is None.
        word: ``last``, ``best`` or a path; a requeued job without any checkpoint starts afresh.
        run_folder: Of the run.
        config: ``monitor`` and ``mode`` decide what is best.
        fallback: Whether an older checkpoint may take the place of a damaged one.

    Raises:
        CheckpointError: There is none, or it is damaged.
        ConfigError: The run folder is in use.
    """
    there = survey(run_folder / FOLDER)
    if not word:
        given = (
            f"{run_folder}, which holds {len(there)} checkpoint(s), the newest of step {there[-1].step if there else 0}"
        )
        fix = "add --ckpt_path last, or name another --trainer.default_root_dir"
        mine = verb != "fit" or not there or is_launched_by_lightning()  # then the first process has looked already
        require(mine, "trainer.default_root_dir", given, "a new run folder, or a resume", fix)
        return Resume(None)
    if word == "last" and is_requeued() and not there:
        return Resume(None)
    choice = choose(word, run_folder, config.monitor, config.mode, fallback)
    if is_first_process() and choice.damaged:
        lines = [f"{entry.path} is damaged: {entry.reason}" for entry in choice.damaged]
        print("\n".join([*lines, f"going on from {choice.path} as {word} (resume.fallback)"]), file=sys.stderr)
    return Resume(str(choice.path), choice.others if fallback else (), read_manifest(choice.path))


def resolve_ckpt_path(
    word_or_path: str | Path, run_folder: Path | str, monitor: str, mode: Literal["min", "max"]
) -> Path:
    """The folder of :func:`choose` without fallback."""
    return choose(word_or_path, run_folder, monitor, mode).path


def folder_of_checkpoints(path: Path) -> Path:
    """Where a run folder has its checkpoints; ``path`` itself if it is that folder."""
    inner = path / FOLDER
    return inner if inner.is_dir() or not path.is_dir() or not survey(path) else path


def survey(folder: Path) -> list[Found | Damaged]:
    """The checkpoints in ``folder``, complete or not, oldest step first; what was set aside is left out."""
    if not folder.is_dir():
        return []
    entries = [_entry(path) for path in sorted(folder.iterdir()) if looks_like_one(path)]
    return sorted(entries, key=lambda entry: (entry.step, entry.path.name))


def moved_aside(folder: Path) -> list[Path]:
    """What resumed runs have moved out of the way there; see :mod:`lit_fsdp.checkpoint.aside`."""
    return [path for path in sorted(folder.iterdir()) if _ASIDE_NAME.fullmatch(path.name)] if folder.is_dir() else []


def looks_like_one(path: Path) -> bool:
    """Whether the folder ``path`` is in the place of a checkpoint, complete or not, and not hidden or moved aside."""
    if path.name.startswith(".") or _ASIDE_NAME.fullmatch(path.name):
        return False
    return os.path.lexists(path / MANIFEST) or STEP_NAME.fullmatch(path.name) is not None


def _entry(path: Path) -> Found | Damaged:
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(path)
        for name in manifest.files:
            manifest.file(name)
    except (CheckpointError, OSError) as error:  # OSError: removed by another rank meanwhile
        step = _step_of(path) if manifest is None else manifest.global_step
        return Damaged(path, str(error), step, None if manifest is None else dict(manifest.metrics))
    on_signal = manifest.extra.get("on_signal") is True
    return Found(manifest.global_step, path, dict(manifest.metrics), manifest.created, manifest.num_bytes, on_signal)


def _comes_first(entry: Damaged, chosen: Found, monitor: str | None, mode: Literal["min", "max"]) -> bool:
    """Whether a damaged one is newer than ``chosen``, or better by ``monitor``; unreadable metrics may be better."""
    if monitor is None:
        return entry.step > chosen.step
    if entry.metrics is None:
        return True
    as_found = Found(entry.step, entry.path, entry.metrics, "", 0)
    return best([chosen, as_found], monitor, mode) is as_found


def _step_of(path: Path) -> int:
    match = STEP_NAME.fullmatch(path.name)
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
