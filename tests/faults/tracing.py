"""What a process does to the file system, seen by an audit hook, and what can be done to it at any such moment.

It works below whatever writes a checkpoint, so it does not know how the writer is built.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.checkpoint import files as disk

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_HIDDEN = re.compile(r"\.(step-\d+)\.(tmp|removed)-[0-9a-f]{16}")


@dataclass(frozen=True)
class Event:
    """One operation that is about to be done."""

    kind: str
    """``open``, ``write``, ``sync``, ``mkdir``, ``rename``, ``remove`` or ``rmdir``."""
    path: str
    """Relative to the traced folder; random parts of hidden names left out."""
    stage: str
    """Which part of a save it belongs to."""


class Tracer:
    """Calls ``react`` before every change that this process makes under ``folder``, in the thread that makes it.

    It may raise, kill or stop the process.
    """

    def __init__(self, folder: Path, react: Callable[[Event], None]) -> None:
        self.folder, self.react = str(folder), react
        self._busy = threading.local()
        sys.addaudithook(self._audited)
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._syncing(getattr(os, name)))
        disk.open = self._open_for_writing  # type: ignore[attr-defined]  # found before the builtin one

    def _audited(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "open" and not isinstance(args[0], int) and args[0] is not None and args[2] & _WRITING:
            self._happened("open", os.fsdecode(args[0]))
        elif name in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            path, at = os.fsdecode(args[0]), args[-1]
            if at >= 0 and not path.startswith("/"):  # relative to an open folder, as shutil.rmtree does it
                path = f"{os.readlink(f'/proc/self/fd/{at}')}/{path}"
            if name == "os.mkdir" and os.path.isdir(path):  # changes nothing
                return
            to = os.fsdecode(args[1]) if name == "os.rename" else None
            self._happened(name.removeprefix("os."), path, to)

    def _open_for_writing(self, path: Path, mode: str, buffering: int) -> io.BufferedWriter:
        raw = io.FileIO(path, mode.replace("b", ""))
        return _TracedFile(raw, buffering, lambda: self._happened("write", str(path)))

    def _syncing(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def traced(number: int) -> None:
            self._happened("sync", os.readlink(f"/proc/self/fd/{number}"))
            sync(number)

        return traced

    def _happened(self, kind: str, path: str, to: str | None = None) -> None:
        if not path.startswith(self.folder) or getattr(self._busy, "yes", False):
            return
        self._busy.yes = True
        try:
            self.react(Event(kind, _HIDDEN.sub(r".\1.\2", path[len(self.folder) + 1 :]), _stage(kind, path, to)))
        finally:
            self._busy.yes = False


class _TracedFile(io.BufferedWriter):
    """A file whose writes are announced."""

    def __init__(self, raw: io.FileIO, buffering: int, announce: Callable[[], None]) -> None:
        super().__init__(raw, buffering)
        self._announce = announce

    def write(self, data: Any) -> int:
        self._announce()
        return super().write(data)


def _stage(kind: str, path: str, to: str | None) -> str:
    if to is not None and ".removed-" in to:
        return "before removal"
    if ".removed-" in path:
        return "removal"
    if to is not None and ".tmp-" in path and _HIDDEN.fullmatch(os.path.basename(path)):
        return "rename"
    if os.path.basename(path).startswith((".manifest", "manifest")):
        return "manifest"
    if kind == "sync" and not os.path.basename(path).count(".", 1):
        return "rename"  # folders are synced around it
    if "tensors" in path:
        return "tensors"
    return "preparing" if kind == "mkdir" else "states"


class StageFile:
    """The stage a process is in, readable from outside also after it was killed."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDWR | os.O_CREAT)

    def put(self, stage: str) -> None:
        """Say what is being done now."""
        os.pwrite(self._number, f"{stage:<20}".encode(), 0)


def hurt(how: str, event: Event | None = None) -> None:
    """``raise`` an I/O error, or ``error`` another one; ``kill`` or ``stop`` this process, ``kill_all`` of the job."""
    if how == "raise":
        has_name = event is not None and event.kind not in ("write", "sync")  # as errors of the kernel do or do not
        raise OSError(errno.EIO, "made to fail", *([event.path] if event is not None and has_name else []))
    if how == "error":
        raise RuntimeError("made to fail")
    if how == "kill_all":
        os.killpg(os.getpgid(0), signal.SIGKILL)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
