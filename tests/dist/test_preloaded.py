"""A program that is forked from a loaded interpreter cannot tell that it is not one that has just begun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.dist.forks import server

SAYS = """
import atexit, json, os, signal, sys
import beside
atexit.register(print, "end")
with open(int(sys.argv[1])) as handed:
    print(json.dumps([sys.argv[2:], sys.stdin.read(), os.getcwd(), os.environ["X"], __name__, handed.read()]))
print("error", file=sys.stderr)
sys.exit(7)
"""
WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_words_files_and_the_end(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SAYS)
    (tmp_path / "beside.py").touch()
    for python in (server().python, sys.executable):
        reading, writing = os.pipe()
        os.write(writing, b"handed over")
        os.close(writing)
        done = subprocess.run(
            [python, str(tmp_path / "program.py"), str(reading), "a b", "c"],
            input="typed", cwd=tmp_path, env=os.environ | {"X": "y"}, pass_fds=(reading,),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        os.close(reading)
        said, end = done.stdout.splitlines()
        assert json.loads(said) == [["a b", "c"], "typed", str(tmp_path), "y", "__main__", "handed over"]
        assert (end, done.stderr, done.returncode) == ("end", "error\n", 7)


def test_signals_and_a_client_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAITS)
    for number, code in ((signal.SIGUSR1, 9), (signal.SIGTERM, -15), (signal.SIGKILL, -9)):
        words = [server().python, str(tmp_path / "program.py")]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        program = int(process.stdout.readline())
        assert program != process.pid
        process.send_signal(number)
        assert process.wait(30) == code
        process.stdout.close()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{program}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
