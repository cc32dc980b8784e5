"""The file systems of run folder, checkpoints and cache: room, speed, and whether renames and locks hold there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.launch.checks.row import GIB, MIB, Row, Wanted, size_text

CHECKPOINTS = "checkpoints"
_SCRATCH = ".lit-fsdp-doctor-"
_PIECE_BYTES = 8 * MIB
_WRITE_SECONDS = 20.0
_LEFTOVER_SECONDS = 6 * 3600
_RATE = {"bad": 10 * MIB, "warning": 100 * MIB}
"""Bytes per second. 8B parameters with AdamW are 96 GB: 16 minutes of writing at the second, alone on a node."""
_CACHE_BYTES = 2 * GIB
_STEP_SECONDS = 30


@dataclass(frozen=True)
class Written:
    """A trial of a file system."""

    num_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second, on the disk."""
        return self.num_bytes / max(self.seconds, 1e-9)


def nearest(path: Path) -> Path:
    """The folder itself or the closest one above it that exists, links followed."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir()).resolve()


@contextlib.contextmanager
def scratch(folder: Path, inner: str = CHECKPOINTS) -> Iterator[Path]:
    """A hidden folder where the checkpoints of a run will lie, gone afterwards whatever happens.

    It lies in the closest folder that exists, so that a run folder is not made by looking at it.

    Args:
        folder: Run folder, or another one.
        inner: Folder in it, which may lie on a file system of its own.

    Raises:
        OSError: It cannot be made.
    """
    place = nearest(folder / inner) / f"{_SCRATCH}{secrets.token_hex(8)}"
    _clear_away(place.parent)
    try:
        place.mkdir()
        yield place
    finally:
        for _ in range(3):  # a rank on another node may have been killed just now; NFS needs a moment
            shutil.rmtree(place, ignore_errors=True)
            if not place.exists():
                break
            time.sleep(0.2)


def _clear_away(folder: Path) -> None:
    """Remove what a doctor has left that was killed: none that is at work is as old."""
    for leftover in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)


def write_and_sync(folder: Path, num_bytes: int, seconds: float = _WRITE_SECONDS) -> Written:
    """Write up to so many bytes in up to so many seconds and sync them; the file has no name, so it cannot stay.

    Raises:
        OSError: Of the file system.
    """
    path = folder / "write"
    piece = os.urandom(_PIECE_BYTES)  # a file system may compress zeros
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        path.unlink()
        start, done = time.monotonic(), 0
        while done < num_bytes and time.monotonic() - start < seconds:
            done += os.write(handle, piece[: num_bytes - done])
            if done % (8 * _PIECE_BYTES) == 0:
                os.fsync(handle)  # else the page cache takes all of it and the time limit comes too late
        os.fsync(handle)
        return Written(done, time.monotonic() - start)
    finally:
        os.close(handle)


def judge_rate(written: Written, wanted: Wanted) -> list[Row]:
    """Whether a file system is fast enough for checkpoints, and whether the last save fits before a time limit."""
    rate = written.rate
    found = f"{rate / MIB:.0f} MiB/s ({size_text(written.num_bytes)} written and synced in {written.seconds:.2f} s)"
    fix = "name a faster file system (trainer.default_root_dir), or save less often (checkpoint.every_steps)"
    grade = "bad" if rate < _RATE["bad"] else "warning" if rate < _RATE["warning"] else "good"
    rows = [Row("write and sync", found, grade, fix if grade != "good" else "")]  # type: ignore[arg-type]
    if wanted.checkpoint_bytes is None:
        return rows
    seconds = wanted.checkpoint_bytes / wanted.nodes / rate
    text = f"about {seconds:.0f} s for {size_text(wanted.checkpoint_bytes)} from {wanted.nodes} node(s) at this rate"
    lead = wanted.signal_lead_seconds
    if lead is not None and lead < seconds + _STEP_SECONDS:
        least = int(seconds + _STEP_SECONDS) // 10 * 10 + 10
        text = f"{text}, with slurm.signal_lead_seconds {lead}"
        return [*rows, Row("time of a save", text, "bad", f"set slurm.signal_lead_seconds: {least}")]
    return [*rows, Row("time of a save", text)]


def try_rename(folder: Path) -> Row:
    """Whether a folder can be renamed onto its final name: that is what makes a checkpoint visible."""
    name = "rename"
    before, after = folder / "rename-before", folder / "rename-after"
    try:
        before.mkdir()
        (before / "file").write_bytes(b"content")
        os.rename(before, after)
        content = (after / "file").read_bytes()
        if before.exists() or content != b"content":
            return Row(name, "the old name is still seen", "bad", "name another trainer.default_root_dir")
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        fix = "name another trainer.default_root_dir: checkpoints become visible by a rename"
        return Row(name, f"fails: {error.strerror or error}", "bad", fix)
    return Row(name, "works, and the folder can be synced")


def try_lock(folder: Path, what: str) -> Row:
    """Whether flock keeps a second holder out."""
    name = f"lock in the {what}"
    fix = "mount with flock (Lustre: -o flock; NFS: local_lock=none and a lock daemon), or name another folder"
    path = folder / "lock"
    try:
        with open(path, "w", encoding="utf-8") as first, open(path, encoding="utf-8") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return Row(name, "works")
                raise
            return Row(name, "two holders at the same time: two jobs could write one run folder", "bad", fix)
    except OSError as error:
        return Row(name, f"fails: {error.strerror or error}", "bad", fix)


def unwritable(folder: Path, error: OSError, key: str) -> Row:
    """A folder in which nothing can be made."""
    if error.errno == errno.ENOSPC:
        fix = f"free space, or set {key} to another place"
    else:
        fix = f"set {key} to a folder that you may write, or see owner and mount: ls -ld {folder}, findmnt -T {folder}"
    return Row(f"write to {folder}", f"fails: {error.strerror or error}", "bad", fix)


def look_at_run_folder(folder: Path, wanted: Wanted, num_bytes: int) -> list[Row]:
    """Rows on speed, renames and locks in a scratch folder."""
    try:
        rows = judge_rate(write_and_sync(folder, num_bytes), wanted)
    except OSError as error:
        rows = [unwritable(folder.parent, error, "trainer.default_root_dir")]
    return [*rows, try_rename(folder), try_lock(folder, "run folder")]


def look_at_cache(wanted: Wanted) -> list[Row]:
    """Rows on room and locks of the cache."""
    room = judge_cache(wanted, shutil.disk_usage(nearest(wanted.cache)).free)
    try:
        with scratch(wanted.cache, "") as folder:
            return [room, try_lock(folder, "cache")]
    except OSError as error:
        return [room, unwritable(nearest(wanted.cache), error, "LIT_FSDP_CACHE (or data.cache_dir)")]


def judge_room(folder: Path, wanted: Wanted, free: int) -> Row:
    """Free bytes of the run folder's file system against the checkpoints that are kept at the same time."""
    name, found = "disk of the run folder", f"{size_text(free)} free at {folder}"
    if wanted.checkpoint_bytes is None and wanted.num_checkpoints:
        fix = "fetch the model's config (see the row about the model), and ask again"
        return Row(name, f"{found}; the size of a checkpoint is not known without the model's config", "warning", fix)
    if wanted.checkpoint_bytes is None:
        if free < GIB:
            return Row(name, found, "warning", "give --config RECIPE.yaml: its checkpoints are compared then")
        return Row(name, found)
    needed = wanted.checkpoint_bytes * wanted.num_checkpoints
    text = f"{found}; {wanted.num_checkpoints} checkpoints of {size_text(wanted.checkpoint_bytes)} at a time"
    if free < needed:
        fix = (
            f"free {size_text(needed - free)}, name another trainer.default_root_dir, or keep fewer "
            "(checkpoint.keep_last, keep_best)"
        )
        return Row(name, text, "bad", fix)
    return Row(name, text)


def judge_cache(wanted: Wanted, free: int) -> Row:
    """Free bytes of the cache of tokenised rows and converted models."""
    name, found = "disk of the cache", f"{size_text(free)} free at {wanted.cache}"
    if free < _CACHE_BYTES:
        fix = "free space, or set LIT_FSDP_CACHE (or data.cache_dir) to another place"
        return Row(name, found, "bad" if free < 64 * MIB else "warning", fix)
    return Row(name, found)
