"""``python`` for tests: hand words, environment, files and signals to :mod:`tests.dist.preloaded`, and end as it ends.

``python -I -S client.py SOCKET REAL_PYTHON WORDS...``; what is not served there goes to the real Python.
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SERVED = ("lit_fsdp", "lit_fsdp.launch.doctor_ranks", "torch.distributed.run")


def connect(address, request, files):
    """Ask for a program that has these files open; the connection, on which its exit code will come, and its process.

    The connection has to stay open: its end is the end of the program.
    """
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(address))
    server.sendmsg([b"{"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    server.sendall(json.dumps(request, default=str)[1:].encode() + b"\n")
    answers = server.makefile()
    return server, answers, int(answers.readline())


def main(address: str, words: list[str]) -> None:
    """Never returns."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")]
    request = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ), "mask": list(mask), "files": files}
    _, answers, program = connect(address, request, files)

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(program, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = int(answers.readline())
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _address, _python, *_words = sys.argv[1:]
    _program = [word for word in _words if word != "-u"]
    if not _program[0].endswith(".py") and (_program[0] != "-m" or _program[1] not in SERVED):
        os.execv(_python, [_python, *_words])
    main(_address, _program)
