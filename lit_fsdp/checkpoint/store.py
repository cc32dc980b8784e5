"""Save and load complete checkpoints, collectively on all ranks, synchronously or in the background of training."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint import state as state_json
from lit_fsdp.checkpoint.manifest import Layout, Manifest, TensorSpec, checked_extra, read_manifest
from lit_fsdp.checkpoint.ranks import Ranks, reason
from lit_fsdp.checkpoint.safetensors_file import read_tensor, spec_of
from lit_fsdp.checkpoint.state import local_part
from lit_fsdp.checkpoint.storage import (
    STATE,
    Named,
    Planner,
    Reader,
    Snapshot,
    Writer,
    gather_whole,
    make_room,
    parts_of,
)
from lit_fsdp.checkpoint.verify import refuse, verify
from lit_fsdp.errors import CheckpointError
from lit_fsdp.metrics.hardware import is_accelerator

_log = logging.getLogger(__name__)
# A single process without a process group is expected. Set once, because all threads share the filters.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

Module = TypeVar("Module", bound=nn.Module)


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    state: Any,
    manifest: Mapping[str, Any],
    layout: Layout,
    files: Mapping[str, bytes | Path] | None = None,
    rank_state: Any = None,
    background: BackgroundSaver | None = None,
) -> None:
    """Write a complete checkpoint at ``folder``, or raise on every rank and leave ``folder`` unchanged; collective.

    Args:
        folder: Final location; replaces an older checkpoint. The same on every rank, on a shared file system.
        tensors: Tensors (equal on all ranks) and DTensors by name; the same names on every rank.
        state: Non-tensor state of rank 0; see :func:`lit_fsdp.checkpoint.state.encode`.
        manifest: ``global_step``, optional ``metrics``, and any JSON keys; used on rank 0.
        layout: One file per rank (``sharded``) or a single file (``full``).
        files: Small files (content, or a file to copy) by path inside the checkpoint; used on rank 0.
        rank_state: State of this rank only, e.g. its random generators.
        background: Writes the checkpoint after the previous save has ended and everything is copied to the host.

    Raises:
        CheckpointError: Any failure on any rank; names rank and file.
    """
    if background is not None:
        background.wait()
    ranks, folder = Ranks(), Path(folder)

    def take() -> Snapshot:
        specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
        if layout == "full":
            make_room(tensors)
        own: dict[str, Any] = {"rank_state": state_json.encode(rank_state)}
        if ranks.is_first:
            own |= {"state": state_json.encode(state), "extra": checked_extra(manifest)}
            own["files"] = {name: _content(name, value) for name, value in (files or {}).items()}
        parts, chunks = parts_of(tensors, layout, ranks.rank, ranks.size)
        return Snapshot(folder=folder, layout=layout, specs=specs, tensors=parts, chunks=chunks, **own)

    snapshot = ranks.own(f"checking what to save at {folder}", take)
    check_alike(folder, snapshot.specs, layout)
    if background is None:
        _write(snapshot, ranks)
    else:
        background.begin(snapshot, ranks)


def check_alike(folder: Path, specs: Mapping[str, TensorSpec], layout: Layout) -> None:
    """Raise CheckpointError on every rank unless all have tensors of the same names, shapes and dtypes; collective."""
    ranks, what = Ranks(), f"checking what to save at {folder}"
    if len(set(ranks.run(what, lambda: _digest((str(folder), layout, sorted(specs.items())))))) > 1:
        held = ranks.run(what, lambda: set(specs.items()))
        names = ", ".join(sorted({name for one in held for name, _ in one ^ held[0]})[:5])
        raise CheckpointError(f"{folder}: tensor names, shapes or dtypes to save differ between ranks: {names}")


def own_parts(state: Any) -> tuple[dict[str, bool], bytes]:
    """Return entries of ``state`` that differ between ranks (and if they are arrays), and this rank's part; collective.

    The JSON bytes have the same length on every rank, and are empty if all states are equal. A callback without state
    on some ranks, for example because only rank 0 saves, does not count as a difference.
    """
    ranks, what = Ranks(), "comparing the states of the ranks"
    parts = ranks.own(what, lambda: state_json.parts(state_json.encode(state)))
    texts = {path: sorted(state_json.leaves(value, path)) for path, value in parts.items()}
    if len(set(ranks.run(what, lambda: _digest(sorted(texts.items()))))) == 1:
        return {}, b""
    hashes = {
        path: {name: (_digest(text), state_json.has_parts(text)) for name, text in found}
        for path, found in texts.items()
    }
    differs: dict[str, bool] = {}
    own: dict[str, Any] = {}
    everyone = ranks.run(what, lambda: hashes)
    for path in sorted({path for one in everyone for path in one}):
        held = [one[path] for one in everyone if path in one] + [everyone[0].get(path, {})]
        names = {name for one in held for name in one}
        unlike = {name for name in names if len({other.get(name) for other in held}) > 1}
        differs |= {name: any(one[name][1] for one in held if name in one) for name in sorted(unlike)}
        if unlike and path in parts:
            (own if len(path) == 1 else own.setdefault(path[0], {}))[path[-1]] = parts[path]
    content = json.dumps(own).encode()
    return differs, content.ljust(max(ranks.run(what, lambda: len(content))))


def _digest(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


class BackgroundSaver:
    """Write checkpoints in a thread, one at a time; the threads of all ranks use a separate ``group``.

    Copies from an accelerator use pinned memory.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._writers = Ranks(group)
        pins = is_accelerator(device)
        options = StagingOptions(
            use_pinned_memory=pins, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pins
        )
        self._stager = DefaultStager(options)  # reuses its host memory between saves
        self._pool = futures.ThreadPoolExecutor(1, "checkpoint-save")
        self._pending: list[futures.Future[None]] = []

    def begin(self, snapshot: Snapshot, ranks: Ranks) -> None:
        """Copy (``full``: gather to rank 0, as the thread must not use training's groups), and start the thread."""

        def copy() -> Any:
            if snapshot.layout == "sharded":
                return self._stager.stage(dict(snapshot.tensors))
            whole: dict[str, torch.Tensor] = {}

            def keep(wholes: Named) -> None:
                whole.update((name, tensor.detach().to("cpu", copy=True)) for name, tensor in wholes)

            gather_whole(snapshot.tensors, snapshot.specs, keep if ranks.is_first else None)
            return whole

        copied = replace(snapshot, tensors=ranks.own(f"copying {snapshot.folder}", copy), in_background=True)
        self._pending = [self._pool.submit(_write, copied, self._writers)]

    def then(self, act: Callable[[], object]) -> None:
        """Let the thread call ``act`` after the last save if it succeeds; errors of ``act`` are logged as warnings."""
        before = self._pending[:1]  # empty after :meth:`wait`

        def after() -> None:
            if not any(save.exception() for save in before):  # already finished: there is only one thread
                try:
                    act()
                except (CheckpointError, OSError) as error:
                    _log.warning("%s", error)

        self._pending.append(self._pool.submit(after))

    def wait(self) -> None:
        """Wait for the thread; a failed save on any rank raises CheckpointError on all ranks, once."""
        futures.wait(self._pending)  # Ctrl-C leaves it pending
        ended, self._pending = self._pending, []
        for future in ended:
            future.result()

    def close(self) -> None:
        """Wait, end the thread and free the memory; an unreported error is logged."""
        try:
            self.wait()
        except Exception as error:
            _log.error("checkpoint not saved: %s", error)
        self._pool.shutdown()
        self._stager.close()


def load_tensors(folder: Path, into: Mapping[str, torch.Tensor], skip: Collection[str] = ()) -> None:
    """Load into ``into`` in place, from either layout and any number of ranks or sharding; collective.

    File sizes are compared with the manifest; :func:`verify_files` compares hashes. DTensors may have any mesh, with
    ``Shard`` and ``Replicate`` placements; tensors of the checkpoint named in ``skip`` are ignored.

    Raises:
        CheckpointError: Names, shapes or dtypes differ (the first ten are listed), or a file cannot be read.
    """
    ranks, folder = Ranks(), Path(folder)

    def prepare() -> Reader:
        manifest = read_manifest(folder)
        _check_targets(manifest, into, set(skip))
        return Reader(manifest)

    what = f"reading {folder}"
    reader = ranks.own(what, prepare)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    local = {name: local_part(tensor) for name, tensor in into.items()}
    here = {name: tensor for name, tensor in into.items() if local[name].numel()}
    with _together(what, ranks):
        dcp.load(here, storage_reader=reader, planner=planner)


def load_weights(module: Module, path: Path | str, ema: bool = False) -> Module:
    """Load the weights of a checkpoint into a plain module, in one process, and return the module.

    If needed, this calls ``configure_model``, where a module builds its layers and reads the base of adapters. With
    ``strict_loading = False``, parameters that are missing in the checkpoint stay unchanged. With ``ema``, the averages
    of :class:`lit_fsdp.EMAWeights` are loaded instead of the weights.

    Raises:
        CheckpointError: The path is not a checkpoint, or it is damaged.
        ConfigError: The checkpoint has other adapters, adapters on another base model, or no averages for ``ema``.
        RuntimeError: Names or shapes differ; all are listed.
    """
    state = whole_model(path, ema)
    configure: Any = getattr(module, "configure_model", None)
    if configure is not None and state.keys() - module.state_dict().keys():
        configure()
    check: Any = getattr(module, "check_checkpoint", None)
    if check is not None:
        check(read_manifest(path))
    saved: Any = getattr(module, "saved_names", None)
    strict = getattr(module, "strict_loading", True)
    on_meta = any(param.is_meta for param in module.parameters())
    found = module.load_state_dict(state, strict=strict and saved is None, assign=on_meta)
    wrong = {*found.unexpected_keys, *(saved or set()).intersection(found.missing_keys)}
    if strict and wrong:
        raise RuntimeError(f"{path}: does not fit: {', '.join(sorted(wrong))}")
    return module


def whole_model(path: Path | str, ema: bool = False) -> dict[str, torch.Tensor]:
    """Return the verified model tensors of a checkpoint by module name, tied tensors under each of their names."""
    manifest = read_manifest(path)
    refuse(manifest.folder, verify(manifest.folder))
    manifest = manifest.averaged("ema=True") if ema else manifest
    state = {n.removeprefix("model/"): read_tensor(manifest, n) for n in manifest.tensors if n.startswith("model/")}
    ties = manifest.extra.get("tied", {}).items()
    return state | {again: state[first] for again, first in ties if first in state}  # skips a base stored elsewhere


def load_state(folder: Path, rank: int | None = None) -> Any:
    """Return the verified common non-tensor state of a checkpoint, or that of ``rank`` (None if it saved none)."""
    manifest = read_manifest(folder)
    path = manifest.file(STATE)
    with disk.naming(path):
        content = path.read_bytes()
    if xxhash.xxh3_128_hexdigest(content) != manifest.files[STATE].xxh3:
        raise CheckpointError(f"{path}: xxh3 differs from the manifest; this checkpoint is damaged, use another one")
    try:
        found = json.loads(content)
        ranks = found["ranks"]
        value = found["state"] if rank is None else ranks[rank] if rank < len(ranks) else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: invalid run state ({error!r})") from error
    return state_json.decode(value)


def verify_files(folder: Path) -> None:
    """Raise CheckpointError on every rank unless all files match the manifest; collective."""
    refuse(folder, verify(folder, ranks=Ranks()))


def _write(snapshot: Snapshot, ranks: Ranks) -> None:
    writer, planner = Writer(snapshot), Planner(snapshot)
    try:
        with _together(f"writing {snapshot.folder}", ranks):
            dcp.save(dict.fromkeys(snapshot.chunks), storage_writer=writer, planner=planner, process_group=ranks.group)
    except BaseException:
        writer.discard()
        raise


@contextlib.contextmanager
def _together(what: str, ranks: Ranks) -> Iterator[None]:
    """Convert errors that DCP has gathered from all ranks to project errors."""
    try:
        yield
    except CheckpointException as error:
        failed = {rank: reason(failure) for rank, (failure, _) in error.failures.items()}
        own = error.failures[ranks.rank][0] if ranks.rank in failed else None
        raise ranks.error(what, failed, own) from error
    except RuntimeError as error:
        raise ranks.lost(what, error) from error


def _content(name: str, value: bytes | Path) -> bytes:
    disk.checked_name(name)
    if isinstance(value, bytes):
        return value
    with disk.naming(value):
        return value.read_bytes()


def _check_targets(manifest: Manifest, into: Mapping[str, torch.Tensor], skip: set[str]) -> None:
    wanted = {name: spec_of(tensor) for name, tensor in into.items()}
    saved = {name: spec for name, spec in manifest.tensors.items() if name not in skip or name in wanted}
    missing, surplus = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    unlike = []
    for name in sorted(set(saved) & set(wanted)):
        if saved[name] != wanted[name]:
            unlike.append(f"{name}: {saved[name]} in the checkpoint, {wanted[name]} here")
        elif into[name].is_meta:
            unlike.append(f"{name}: on the meta device here, so there is nothing to load into")
    both = (("missing in the checkpoint", missing), ("only in the checkpoint", surplus))
    if (missing or surplus) and not unlike and all(name.startswith("optim") for name in missing + surplus):
        found = "; ".join(f"{what}: {', '.join(_first(names, 2))}" for what, names in both if names)
        where = " (model.optim, model.freeze of its recipe.yaml)" if "recipe.yaml" in manifest.files else ""
        fix = f"resume with its optimizer and trained parameters{where}, or export it and start a new run"
        raise CheckpointError(f"{manifest.folder}: has other optimizer state ({found})\n  fix: {fix}")
    kinds = [[f"{what}: {name}" for name in names] for what, names in both]
    lines = [line for kind in (*kinds, unlike) for line in _first(kind)]
    if lines:
        if not surplus and not unlike and all(name.startswith("model/") for name in missing):
            lines.append("fix: if on_save_checkpoint drops them, set strict_loading = False in the module")
        raise CheckpointError(f"{manifest.folder}: does not fit:\n" + "\n".join(f"  {line}" for line in lines))


def _first(lines: list[str], most: int = 10) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"... and {len(lines) - most} more"]
