"""Saving while training goes on: a copy into host memory, then a thread per rank that writes it.

The threads meet in a process group of their own, so that their collectives never mix with those of training; a second
one is for the votes of the main threads on how a save is doing. One save is finished before the next begins, so there
is never more than one copy.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lit_fsdp.checkpoint.disk import naming
from lit_fsdp.checkpoint.host_buffers import HostBuffers, in_place_of, local_part, shape_of
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.safetensors_file import file_order
from lit_fsdp.checkpoint.snapshot import Part, Snapshot, agreed, take
from lit_fsdp.checkpoint.write import write_part

_log = logging.getLogger(__name__)


class BackgroundSaver:
    """Writes checkpoints in a thread; made once, by all ranks together.

    Args:
        device: Where training computes; copies off a CUDA device go to pinned memory.
        timeout_seconds: How long a collective of the save waits for another rank.
    """

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self._device = device
        self._writers, self._voters = own_ranks(timeout_seconds), own_ranks(timeout_seconds)
        self.buffers = HostBuffers(pinned=device.type == "cuda")
        self._pool: ThreadPoolExecutor | None = None
        self._pending: tuple[Path, Future[None]] | None = None

    @property
    def pending(self) -> Path | None:
        """The folder that is being written, or was and nobody has asked how it went."""
        return self._pending[0] if self._pending else None

    def save(self, folder: Path, **parts: Any) -> None:
        """Begin to write a checkpoint and return once everything it will hold is copied; collective.

        What is refused, and memory that is not there, is an error at once. On a CUDA device the copies are queued
        behind the work of the current stream, and what comes later on it waits for them; the host does not.
        The layout ``full`` is gathered here, tensor by tensor, to the host of rank 0: a thread may not use the groups
        that training uses.

        Args:
            folder: Where it becomes visible; as in :func:`lit_fsdp.checkpoint.store.save_checkpoint`.
            **parts: The fields of :class:`~lit_fsdp.checkpoint.snapshot.Snapshot`; extra files are read now.

        Raises:
            CheckpointError: On every rank; also if the save before this one has failed.
        """
        self.wait()
        folder = Path(folder)
        snapshot = Snapshot(**parts)
        part = agreed(folder, lambda: self._take(snapshot), self._voters)
        if snapshot.layout == "full":
            held: dict[str, torch.Tensor] = {}
            self._voters.run(f"gathering {folder}", lambda: self._gather(part, held))
            part = replace(part, tensors=held)
        copied = torch.cuda.Event() if self._device.type == "cuda" else None
        if copied is not None:
            copied.record()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "checkpoint-save", initializer=self._enter_thread)
        self._pending = folder, self._pool.submit(self._write, folder, part, copied)

    def poll(self) -> bool:
        """Whether nothing is being written any more; collective while something is.

        Raises:
            CheckpointError: On every rank at once, whichever rank's thread was the first to fail.
        """
        if self._pending is None:
            return True
        future = self._pending[1]
        failed = future.done() and future.exception() is not None
        ended, failures = self._voters.add([float(future.done()), float(failed)], f"writing {self.pending}")
        if not failures and ended < self._voters.size:
            return False
        return self.wait()

    def wait(self) -> bool:
        """True, once the thread of this rank has ended; not collective, but its end is the same on every rank.

        Raises:
            CheckpointError: The save failed on any rank; told once.
        """
        if self._pending is None:
            return True
        future = self._pending[1]
        try:
            future.result()
        finally:
            if future.done():  # not so after Ctrl-C: it is still being written
                self._pending = None
        return True

    def close(self) -> None:
        """Wait, end the thread and give the memory back; an error that nobody has seen is logged."""
        try:
            self.wait()
        except Exception as error:
            _log.error("not saved: %s", error)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self.buffers.clear()

    def _take(self, snapshot: Snapshot) -> Part:
        part = take(snapshot, self._voters.rank)
        files = {name: _content(value) for name, value in part.files.items()}
        if snapshot.layout == "full":
            return replace(part, files=files)
        local = {name: local_part(tensor) for name, tensor in part.tensors.items()}
        hosts = self.buffers.fit({name: shape_of(tensor) for name, tensor in local.items()})
        for name, tensor in local.items():
            hosts[name].copy_(tensor, non_blocking=True)
        placed = {name: in_place_of(tensor, hosts[name]) for name, tensor in part.tensors.items()}
        return replace(part, files=files, tensors=placed)

    def _gather(self, part: Part, held: dict[str, torch.Tensor]) -> None:
        """Copy whole tensors to the host of rank 0; after a failure there the others still find it gathering."""
        failure: BaseException | None = None
        if self._voters.is_first:
            try:
                held.update(self.buffers.fit({name: shape_of(tensor) for name, tensor in part.tensors.items()}))
            except BaseException as error:
                failure = error
        for name in file_order(part.specs):
            tensor = part.tensors[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self._voters.is_first and failure is None:
                try:
                    held[name].copy_(whole.detach(), non_blocking=True)
                except BaseException as error:
                    failure = error
        if failure is not None:
            raise failure

    def _write(self, folder: Path, part: Part, copied: torch.cuda.Event | None) -> None:
        if copied is not None:
            copied.synchronize()
        write_part(folder, part, self._writers)

    def _enter_thread(self) -> None:
        if self._device.type == "cuda":  # a new thread begins on device 0
            torch.cuda.set_device(self._device)


def own_ranks(timeout_seconds: float) -> Ranks:
    """All ranks in a new gloo group; collective. Without a process group, this process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds)))


def _content(value: bytes | Path) -> bytes:
    if isinstance(value, bytes):
        return value
    with naming(Path(value)):
        return Path(value).read_bytes()
