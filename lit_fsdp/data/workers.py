"""Signals and loader processes: a signal to a whole job must not end them before the rank they work for.

SLURM, a terminal and ``kill -- -GROUP`` send a signal to every process. A loader that dies of it makes its rank fail
where it should have saved; one that inherits its rank's handlers reports every signal to it a second time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lit_fsdp.host import return_freed_memory

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SECONDS = 1.0


@contextmanager
def signals_held() -> Iterator[None]:
    """Around the start of loaders: they begin with signals blocked, and nothing is lost for this process.

    Free memory is given back first: a forked loader would hold on to what this process is about to write over.
    """
    return_freed_memory()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_parent_only(worker_id: int) -> None:
    """Called first in a loader: from now on only its parent can ask it to end (SIGTERM), and does when it dies."""
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # already so if it was forked
    threading.Thread(target=_wait_for_parent, args=(os.getppid(),), name="signals", daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:  # torch's loaders look only between batches, which one that is stuck never reaches
        received = signal.sigtimedwait(_IGNORED, _SECONDS)
        if received and received.si_signo == signal.SIGTERM and received.si_pid == parent:
            break
    os._exit(0)
