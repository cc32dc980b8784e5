"""Loader processes that ignore signals sent to the whole job, so that they do not end before their rank.

SLURM, a terminal and ``kill -- -GROUP`` send a signal to every process. If a loader died of it, its rank would fail
instead of saving a checkpoint. If a loader inherited the handlers of its rank, it would report every signal again.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lit_fsdp.host import return_freed_memory, wait_until_orphaned
from lit_fsdp.signals import STOPPING


def load(
    dataset: Dataset[Any], num_workers: int, pin_memory: bool = False, sampler: Iterable[Any] | None = None
) -> Iterator[Any]:
    """Yield the items of torch loader processes in order; these processes survive signals to the whole job.

    The ``dataset`` is either iterable or maps items of ``sampler``, which is read lazily. An error that ``dataset``
    returns is raised here unchanged; an error raised in a loader would be wrapped by torch together with a traceback.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # resuming relies on an unchanged global generator
        worker_init_fn=partial(obey_parent_only, os.getpid()),
    )
    return_freed_memory()  # a forked loader would keep pages that this process overwrites
    # loaders start with signals blocked; this process still receives them afterwards
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        items = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for item in items:
        if isinstance(item, Exception):
            del items  # ends its processes now, not when the traceback is released
            raise item
        yield item


def _as_it_is(item: Any) -> Any:
    return item


def obey_parent_only(parent: int, worker_id: int) -> None:
    """Initialize a loader: it ends only on SIGTERM from its parent, or when its parent dies."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tokenizer threads do not survive a fork
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # already so if it was forked
    threading.Thread(target=_wait_for_parent, args=(parent,), name="signals", daemon=True).start()


def _wait_for_parent(parent: int) -> None:
    def is_asked() -> bool:
        received = signal.sigtimedwait(STOPPING, 1.0)
        return bool(received and received.si_signo == signal.SIGTERM and received.si_pid == parent)

    # torch loaders check their parent only between batches, which a stuck loader never reaches
    wait_until_orphaned(parent, is_asked)
    os._exit(0)
