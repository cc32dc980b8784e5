"""Checkpoints of a run: list them, resolve words such as ``last``, and decide which to keep or remove.

This module does not import torch. Changes require the run lock, so hidden folders belong to dead processes.
"""

import datetime
import functools
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import yaml

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.files import MANIFEST, naming, sync_folder
from lit_fsdp.checkpoint.manifest import NOT_ONE, Manifest, read_manifest
from lit_fsdp.config.run import CheckpointConfig, RunConfig
from lit_fsdp.errors import CheckpointError, ConfigError, require
from lit_fsdp.host import is_first_process, is_launched_by_lightning, is_requeued, may_restart, say_once

FOLDER = "checkpoints"
STEP_NAME = re.compile(r"step-(\d+)")
Mode = Literal["min", "max"]
_RUN_FOLDER, _WRITABLE = "trainer.default_root_dir", "a folder that can be created and written"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint of a run, judged by its manifest and file sizes."""

    step: int
    """Completed optimizer steps from its manifest, or else from its name; -1 if unknown."""
    path: Path
    metrics: dict[str, float] = field(default_factory=dict)
    created: str = ""
    num_bytes: int = 0
    on_signal: bool = False
    """Whether it was saved only because of a signal, outside the schedule."""
    damage: str | None = None
    """Description of the damage; None for a complete checkpoint."""


def step_folder(run_folder: Path | str, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return Path(run_folder) / FOLDER / f"step-{step:08d}"


def survey(folder: Path) -> list[Found]:
    """List the checkpoints in ``folder``, complete or not, oldest step first, except those moved aside."""
    entries = [
        look_at(path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if not path.name.startswith((".", "damaged-", "superseded-"))
        and (os.path.lexists(path / MANIFEST) or STEP_NAME.fullmatch(path.name))
    ]
    return sorted(entries, key=lambda entry: (entry.step, entry.path.name))


def checkpoints(run_folder: Path | str) -> list[Found]:
    """List the complete checkpoints of a run, oldest step first."""
    return [entry for entry in survey(Path(run_folder) / FOLDER) if entry.damage is None]


def ranked(found: Sequence[Found], monitor: str, mode: Mode) -> list[Found]:
    """Sort the checkpoints with a finite value of ``monitor``, best first; ties: newer first."""
    scored = [entry for entry in found if math.isfinite(entry.metrics.get(monitor, math.nan))]
    sign = -1 if mode == "min" else 1
    return sorted(scored, key=lambda entry: (sign * entry.metrics[monitor], entry.step), reverse=True)


def choose(
    word_or_path: str | Path,
    run_folder: Path | str,
    monitor: str,
    mode: Mode,
    fallback: bool = False,
    flag: str = "--ckpt_path",
) -> list[Path]:
    """Resolve ``last`` (newest complete step), ``best`` (by ``monitor``) or a path to folders, in order of preference.

    A path may be that of a checkpoint, or as in :func:`named_checkpoint`. For errors, ``flag`` is the one that gives
    ``word_or_path``.

    Raises:
        CheckpointError: There is no checkpoint, the path is not a checkpoint, or a possibly preferred checkpoint is
            visibly damaged and ``fallback`` does not allow skipping it.
    """
    word = str(word_or_path)
    if word not in ("last", "best"):
        path = Path(word_or_path).expanduser()
        is_in_run = not path.exists() and path.parent != Path() and (path.parent / FOLDER).is_dir()
        path = named_checkpoint(path) if is_in_run or (path / FOLDER).is_dir() else path
        near = ["last"] if word.lower() in ("true", "auto", "latest") else get_close_matches(word, ("last", "best"), 1)
        allowed, fix = "last, best or the path of a checkpoint", f"write --ckpt_path {''.join(near)}"
        require(path.exists() or not near, "ckpt_path", word, allowed, fix)
        disk.restore(path)
        read_manifest(path)
        return [path]
    there = survey(Path(run_folder) / FOLDER)
    found = [entry for entry in there if entry.damage is None]
    broken = [entry for entry in there if entry.damage is not None]
    if word == "last" and found:
        broken = [entry for entry in broken if entry.step > found[-1].step]
    lines = [f"  {entry.path} is damaged: {entry.damage}" for entry in reversed(broken)]
    if not found:
        content = ", ".join(sorted(path.name for path in Path(run_folder).glob("*"))[:12])
        where = f"{run_folder} contains {content}" if content else f"{run_folder} is empty, or does not exist"
        text = f"{flag[2:]} {word}: no complete checkpoint in {run_folder}/{FOLDER}; {where}"
        raise CheckpointError("\n".join([text, *lines]))
    order = [entry.path for entry in (found[::-1] if word == "last" else ranked(found, monitor, mode))]
    if not order:
        names = ", ".join(sorted({name for entry in found for name in entry.metrics}))
        others = f"only of {names}" if names else "as no validation ran before they were saved"
        raise CheckpointError(f"{flag[2:]} best: no checkpoint has a value of {monitor}, {others}; use last")
    text = "\n".join([f"{flag[2:]} {word}: a checkpoint that may take precedence is damaged", *lines])
    if broken and not fallback:
        other = ", or add --resume.fallback true" if flag == "--ckpt_path" else ""
        raise CheckpointError(f"{text}\n  fix:     set {flag} {order[0]}{other}")
    if broken and is_first_process():
        print(f"{text}\n  resuming from {order[0]} (resume.fallback)", file=sys.stderr)
    return order


def check_run_folder(run_folder: Path) -> None:
    """Raise ConfigError if a run folder, or else its nearest parent that exists, cannot be written; on every rank."""
    fix = "write a path; copy finished runs to object storage"
    require(not re.match(r"[a-z0-9]+:/", str(run_folder)), _RUN_FOLDER, run_folder, "a folder of a file system", fix)
    nearest = next(one for one in (run_folder, *run_folder.absolute().parents) if os.path.exists(one))
    reason = "not writable" if os.path.isdir(nearest) else "Not a directory"
    is_writable = os.path.isdir(nearest) and os.access(nearest, os.W_OK | os.X_OK)
    require(is_writable, _RUN_FOLDER, f"{run_folder} ({nearest}: {reason})", _WRITABLE)


def create_run_folder(run_folder: Path) -> None:
    """Create a run folder, unless it exists; raises ConfigError if it cannot be created or written."""
    try:
        run_folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(run_folder, os.W_OK | os.X_OK) else "not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    require(not reason, _RUN_FOLDER, f"{run_folder} ({reason})", _WRITABLE)


def saved_config(run_folder: Path) -> CheckpointConfig:
    """Return the section ``checkpoint`` of a run's recipe, or the defaults."""
    try:
        return CheckpointConfig(
            **yaml.safe_load((run_folder / "recipe.yaml").read_text(encoding="utf-8"))["checkpoint"]
        )
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return CheckpointConfig()  # a file of another tool, or keys of another version


def named_checkpoint(path: Path) -> Path:
    """Return the checkpoint at a path, the last checkpoint of a run folder, or ``RUN/last``, ``RUN/best``, ``RUN/50``.

    Raises:
        CheckpointError: The run has no checkpoint, or none of that step.
    """
    run, word = (path, "last") if (path / FOLDER).is_dir() else (path.parent, path.name)
    if (run / FOLDER).is_dir() and (match := STEP_NAME.fullmatch(word)):
        word = str(int(match[1]))
    is_word = word in ("last", "best") or word.isdecimal()
    if run == Path() and is_word and not path.exists() and not Path(FOLDER).is_dir():
        runs = [one.parent for one in Path("runs").glob(f"*/{FOLDER}") if (one.parent / "recipe.yaml").is_file()]
        newest = max(runs, key=lambda one: one.stat().st_mtime, default=Path("RUN"))
        raise ConfigError("--ckpt", word, "RUN, RUN/last, RUN/best or RUN/STEP", f"write --ckpt {newest}/{word}")
    if (path.exists() and run != path) or not (run / FOLDER).is_dir():
        return path
    if word.isdecimal():
        steps = {found.step: found.path for found in checkpoints(run)}
        if int(word) not in steps:
            raise CheckpointError(f"{run} has no complete checkpoint of step {word}, only of {sorted(steps)}")
        return steps[int(word)]
    config = saved_config(run)
    return choose(word, run, config.monitor, config.mode, flag="--ckpt")[0] if word in ("last", "best") else path


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run resumes from (or a word or file that Lightning resolves), if any."""

    path: str | None
    others: Sequence[Path] = ()
    """With ``resume.fallback``: checkpoints to use instead if its hashes show damage."""
    manifest: Manifest | None = None

    def check(self, run: RunConfig) -> None:
        """Raise ConfigError if a recipe cannot resume from the checkpoint although its tensors would fit."""
        if self.manifest is None:
            return
        if run.model.lora is not None:
            run.model.lora.check_checkpoint(self.manifest)
        limit, step = run.trainer["max_steps"], self.manifest.global_step
        given, allowed = f"{limit} with {self.path}", f"at least {step}, from which the run resumes"
        fix = f"set trainer.max_steps: {2 * step}, or use an earlier checkpoint"
        require(run.verb != "fit" or not 0 < limit < step, "trainer.max_steps", given, allowed, fix)


def refuse_used(run_folder: Path, there: Sequence[Found]) -> None:
    """Raise ConfigError if a new run would mix its checkpoints with existing ones (``there``)."""
    if there:
        raise ConfigError(
            "trainer.default_root_dir",
            f"{run_folder}, which has {len(there)} checkpoint(s), the newest of step {there[-1].step}",
            "a new run folder, or a resume",
            "add --ckpt_path last, or set another --trainer.default_root_dir",
        )


def find_resume(verb: str, word: str | None, run_folder: Path, config: CheckpointConfig, fallback: bool) -> Resume:
    """Resolve ``ckpt_path`` before ranks connect; for loading, the result of rank 0 applies.

    Without a ``word`` (see :func:`choose`), ``fit`` raises ConfigError for a run folder with checkpoints. With ``last``
    but without checkpoints, ``fit`` starts from scratch in a requeued job and where torchrun may restart the ranks.
    """
    there = survey(run_folder / FOLDER)
    if not word:
        if verb == "fit" and not is_launched_by_lightning():  # otherwise the first process has already checked
            refuse_used(run_folder, there)
        if verb != "fit" and any(found.damage is None for found in there) and is_first_process():
            text = "uses the weights of model.name, although the run folder has checkpoints; for the last one, add"
            say_once(f"{verb} {text} --ckpt_path last")
        return Resume(None)
    if word == "last" and is_requeued() and not there:
        return Resume(None)
    if word == "last" and verb == "fit" and may_restart() and not there:
        if is_first_process():
            say_once(f"{run_folder} has no checkpoint: training starts from scratch, as torchrun may restart the ranks")
        return Resume(None)
    path, *others = choose(word, run_folder, config.monitor, config.mode, fallback)
    return Resume(str(path), others if fallback else (), read_manifest(path))


def move_newer_aside(run_folder: Path, step: int, damaged: Collection[Path]) -> dict[Path, Path]:
    """Rename checkpoints later than ``step``, from which the run resumes; returns new paths by old paths.

    Otherwise ``last`` would resolve to a later checkpoint. Its new name is ``damaged-step-00000010-20260101T120000…``,
    or ``superseded-…`` if no damage is known (``damaged``: damage that file sizes do not show).
    """
    parent = run_folder / FOLDER
    known = {folder.resolve() for folder in damaged}
    moved = {}
    for entry in survey(parent):
        if entry.step > step:
            word = "damaged" if entry.damage or entry.path.resolve() in known else "superseded"
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
            target = parent / f"{word}-{entry.path.name}-{now}"
            with naming(entry.path):
                os.rename(entry.path, target)
            moved[entry.path] = target
    if moved:
        sync_folder(parent)
    return moved


def to_remove(found: Sequence[Found], config: CheckpointConfig, current: int | None) -> list[Found]:
    """Return the complete checkpoints of a run that no rule keeps, oldest first.

    The rules keep the ``keep_last`` newest, the ``keep_best`` with the best value of ``monitor``, every multiple of
    ``keep_every``, and the ``current`` step. Of checkpoints saved only on a signal, only the newest counts: a run that
    is preempted a hundred times has one extra checkpoint.
    """
    ordered = sorted(found, key=lambda entry: entry.step)
    passed = {entry.path for entry in [entry for entry in ordered if entry.on_signal][:-1]}
    counted = [entry for entry in ordered if entry.path not in passed]
    newest = counted if config.keep_last == -1 else counted[-config.keep_last :]
    top = ranked(ordered, config.monitor, config.mode)[: config.keep_best]
    every = config.keep_every
    kept = {entry.path for entry in (*newest, *top)}
    kept |= {entry.path for entry in ordered if entry.step == current or (every and entry.step % every == 0)}
    return [entry for entry in ordered if entry.path not in kept]


def retain(run_folder: Path, config: CheckpointConfig, current: int | None = None) -> None:
    """Remove the checkpoints of :func:`to_remove`; failures are logged as warnings."""
    found = [entry for entry in checkpoints(run_folder) if STEP_NAME.fullmatch(entry.path.name)]  # only our own
    for old in to_remove(found, config, current):
        try:
            remove(old.path)
        except (CheckpointError, OSError) as error:
            _log.warning("%s", error)


def remove(folder: Path) -> None:
    """Delete a checkpoint, after hiding it by a rename; for links and files, only the link or file itself."""
    with naming(folder):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
            return
        if not (folder / MANIFEST).is_file():
            raise CheckpointError(f"not removed: {folder / MANIFEST}: {NOT_ONE}")
        hidden = disk.hidden_name(folder, "removed")
        os.rename(folder, hidden)
    sync_folder(folder.parent)
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        where = error.filename or hidden
        raise CheckpointError(f"{folder}: the old checkpoint cannot be deleted: {where}: {error.strerror}") from error


def sweep(run_folder: Path) -> None:
    """Delete leftovers of killed saves and removals in a run; the caller must hold the run lock."""
    parent = run_folder / FOLDER
    for path, name, _ in disk.hidden_folders(parent):
        disk.restore(parent / name)
        if os.path.lexists(path):
            disk.discard(path)


def look_at(path: Path) -> Found:
    """Return the checkpoint at ``path``, with its damage, if any."""
    match = STEP_NAME.fullmatch(path.name)
    found = Found(int(match[1]) if match else -1, path)
    try:
        manifest = _summary(path, *_state(path / MANIFEST))
        on_signal = manifest.extra.get("on_signal") is True
        metrics = dict(manifest.metrics)
        found = Found(manifest.global_step, path, metrics, manifest.created, manifest.num_bytes, on_signal)
        for name in manifest.files:
            manifest.file(name)
    except (CheckpointError, OSError) as error:  # OSError: removed by another process meanwhile
        return replace(found, damage=str(error))
    return found


@functools.lru_cache(maxsize=10_000)
def _summary(path: Path, *state: int) -> Manifest:
    """Read a manifest without its tensors, once per ``state`` of its file: every save looks at all checkpoints."""
    return replace(read_manifest(path), tensors={}, chunks={})


def _state(manifest: Path) -> tuple[int, ...]:
    """Change with every write of a file; empty if it cannot be read, which :func:`read_manifest` explains."""
    try:
        found = manifest.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size
