"""What a process that listens does with a signal that asks where it is."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, signal, sys, time
from lit_fsdp.signals import SignalFlags

SignalFlags().install()
while not any(frame.f_code.co_name == "_listen" for frame in sys._current_frames().values()):
    time.sleep(0.01)

def waiting_for_a_peer():
    os.kill(os.getpid(), signal.SIGUSR2)

waiting_for_a_peer()
print("goes on")
"""


def test_sigusr2_shows_the_stacks_and_stops_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert "in waiting_for_a_peer" in done.stderr
    assert "in _listen" in done.stderr  # of each thread
