"""Loader processes, and signals: one to a whole job must not end them before the rank they work for.

SLURM, a terminal and ``kill -- -GROUP`` send a signal to every process. A loader that dies of it makes its rank fail
where it should have saved; one that inherits its rank's handlers reports every signal to it a second time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lit_fsdp.host import return_freed_memory, wait_until_orphaned

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def load(
    dataset: Dataset[Any], num_workers: int, pin_memory: bool = False, sampler: Iterable[Any] | None = None
) -> Iterator[Any]:
    """What torch's loader processes make, one by one and in order; they live through signals to the whole job.

    ``dataset`` maps what ``sampler`` gives, which is asked as late as the loaders need it, or is an iterable one. An
    error that it gives is raised here, as it is; of one that it raises torch would make another, with a traceback.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # the global one stays as it is, which resuming relies on
        worker_init_fn=partial(obey_parent_only, os.getpid()),
    )
    return_freed_memory()  # a forked loader would hold on to what this process is about to write over
    # loaders begin with signals blocked, and nothing is lost for this process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        items = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for item in items:
        if isinstance(item, Exception):
            del items  # its processes end now, not when the traceback is let go
            raise item
        yield item


def _as_it_is(item: Any) -> Any:
    return item


def obey_parent_only(parent: int, worker_id: int) -> None:
    """Called first in a loader: from now on only its parent can ask it to end (SIGTERM), and does when it dies."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of tokenizers do not survive a fork
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # already so if it was forked
    threading.Thread(target=_wait_for_parent, args=(parent,), name="signals", daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    def is_asked() -> bool:
        received = signal.sigtimedwait(_IGNORED, 1.0)
        return bool(received and received.si_signo == signal.SIGTERM and received.si_pid == parent)

    # torch's loaders look only between batches, which one that is stuck never reaches
    wait_until_orphaned(parent, is_asked)
    os._exit(0)
