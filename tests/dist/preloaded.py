"""Programs as forks of a process that has imported everything: ``lit-fsdp`` in half a second instead of four.

A shell, torchrun or another rank starts them by the path that :meth:`tests.dist.forks.ForkServer.python` gives, with
words, environment, open files and exit code of their own. What a test wants to know of the start itself, of processes
or of imports, it must ask of the real ``sys.executable``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

CLIENT = Path(__file__).with_name("client.py")
_HIGH = 300  # no file of a program has such a number


def write_python(folder: Path) -> Path:
    """The program ``python`` that asks the server at ``folder/socket``."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {CLIENT} {folder / "socket"} {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def listen(folder: Path) -> socket.socket:
    """Where clients can connect from now on."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.listen(64)
    return listening


def serve(folder: Path, listening: socket.socket) -> NoReturn:
    """Fork a program for each client."""
    for number in (0, 1):  # those of the one that forked it
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    programs: dict[Any, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                client = listening.accept()[0]
                request, files = _receive(client)
                if request is None:
                    client.close()
                    continue
                gc.freeze()
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for known in (listening, client, *programs):
                        known.close()
                    _run(request, files, folder)
                for number in files:
                    os.close(number)
                with contextlib.suppress(BrokenPipeError):  # a client that was killed is seen below
                    client.sendall(b"%d\n" % pid)
                programs[client] = pid
                selector.register(client, selectors.EVENT_READ)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, client)
            elif key.data is None:  # a client was killed
                selector.unregister(key.fileobj)
                os.kill(programs[key.fileobj], signal.SIGKILL)
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _tell(key.data, programs.pop(key.data), folder)
                with contextlib.suppress(KeyError):
                    selector.unregister(key.data)
                key.data.close()


def _receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What a client asks for, and its files; nothing if it was killed before it had said it all."""
    first, files, _, _ = socket.recv_fds(client, 1, 256)
    line = first + client.makefile("rb").readline()
    if line.endswith(b"\n"):
        return json.loads(line), files
    for number in files:
        os.close(number)
    return None, []


def _tell(client: socket.socket, pid: int, folder: Path) -> None:
    """The exit code; then import what the program had to, for the next one, but not what it found in its own folder."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(b"%d\n" % code)
    imported = folder / str(pid)
    if imported.exists():
        import_too(json.loads(imported.read_text()))
        imported.unlink()


def import_too(names: list[str]) -> None:
    """Import modules of the packages that are known already."""
    for name in names:
        if name.partition(".")[0] in sys.modules:
            with contextlib.suppress(ImportError):  # what only looks like a module
                importlib.import_module(name)


def die_with_parent() -> None:
    """However the one that started this process ends, this one must not stay; Linux only, as the rest."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run(request: dict[str, Any], files: list[int], folder: Path) -> NoReturn:
    import torch

    die_with_parent()
    _join_host(request["client"])
    torch.set_num_threads(1)  # makes torch's thread pool anew, which two threads at once might do, and one fail
    _give_files(files, request["files"])
    words, cwd, code = request["words"], request["cwd"], 1
    known = set(sys.modules)
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable, sys.orig_argv = str(folder / "python"), ["python", *words]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path[:0] = [cwd if is_module else str(Path(words[0]).resolve().parent)]
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    try:
        if is_module:
            sys.modules.pop(f"{words[1]}.__main__", None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        # as an interpreter ends; only memory is not given back object by object, which takes a second
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        (folder / str(os.getpid())).write_text(json.dumps(sorted(set(sys.modules) - known)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _join_host(client: int) -> None:
    """Network, host name and mounts of the client, which may be on another host."""
    for kind in ("net", "uts", "mnt"):
        theirs = f"/proc/{client}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            assert ctypes.CDLL(None, use_errno=True).setns(os.open(theirs, os.O_RDONLY), 0) == 0, ctypes.get_errno()


def _give_files(files: list[int], numbers: list[int]) -> None:
    """What was open for the client is open here, under the same numbers."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, _HIGH) for number in files]
    for number in files:
        os.close(number)
    for number, wanted in zip(high, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
