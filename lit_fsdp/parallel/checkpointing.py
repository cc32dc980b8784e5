"""Saving and loading checkpoints in a strategy, for all engines: DTensors under the model's own names."""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from lit_fsdp.checkpoint import run_folder, store
from lit_fsdp.checkpoint.importing import read_lightning_file
from lit_fsdp.checkpoint.manifest import Manifest, checked_extra, read_manifest
from lit_fsdp.checkpoint.ranks import Ranks, meet_on_hosts
from lit_fsdp.checkpoint.safetensors_file import spec_of
from lit_fsdp.checkpoint.state import Sharded, decode, local_part, with_sharded, without_sharded
from lit_fsdp.checkpoint.state import refused as refused_in
from lit_fsdp.checkpoint.store import BackgroundSaver
from lit_fsdp.checkpoint.verify import sound_checkpoint
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.models.optimizers import is_packed
from lit_fsdp.parallel.precision import DtypeContract

_log = logging.getLogger(__name__)
_DIFFERS, _OWN = "lit_fsdp.differs", "state-by-rank"  # state key of rank-dependent parts, and the tensor with them


class Checkpoints:
    """Saving and loading: the checkpoint part of :class:`lit_fsdp.parallel.base.EngineStrategy`."""

    config: StrategyConfig
    contract: DtypeContract
    mesh: DeviceMesh
    root_device: torch.device
    lightning_module: Any
    optimizers: list[Any]
    checkpoint_files: dict[str, bytes]
    verify_on_load = True  # by hashes; sizes are always verified
    fallback_checkpoints: Sequence[Path] = ()  # for the next load, in this order, if its checkpoint is damaged
    damaged_checkpoints: Mapping[Path, str] = MappingProxyType({})  # skipped by the last load, with the reason
    loaded_checkpoint: Path | None = None
    is_saving = False  # for the progress
    saves_on_signal = False  # the save is only due to a signal, as recorded in the manifest
    background: BackgroundSaver | None = None
    _in_background = False
    _hosts_apart = ""  # the reason if hosts cannot connect
    _root: nn.Module | None
    _ties: dict[str, str]
    _files: dict[str, bytes] | None = None  # files of the module, built on rank 0 before the first step
    _sync_buffers: Callable[[], None]
    _check_parameters: Callable[..., None]
    _rng_after_load: dict[str, Any] | None = None
    _rng_before_window: dict[str, Any] | None = None

    def meet_on_hosts(self) -> dist.ProcessGroup | None:
        """See :func:`lit_fsdp.checkpoint.ranks.meet_on_hosts`; warns once if hosts cannot connect."""
        if self._hosts_apart:
            return None
        group, self._hosts_apart = meet_on_hosts(self.config.timeout_seconds)
        if self._hosts_apart and dist.get_rank() == 0:
            text = "the hosts cannot connect by gloo, so training waits for saves and for loaders without a length; "
            text += "set GLOO_SOCKET_IFNAME to the network interface that they share (%s)"
            _log.warning(text, self._hosts_apart)
        return group

    def open_background(self) -> BackgroundSaver | None:
        """Return the background saver, created at the first call; None if hosts cannot connect; collective."""
        if self.background is None and (group := self.meet_on_hosts()) is not None:
            self.background = BackgroundSaver(self.root_device, group)
        return self.background

    @contextlib.contextmanager
    def saving_in_background(self) -> Iterator[None]:
        """Make :meth:`save_checkpoint` return once everything is copied, not only once the folder is complete."""
        self._in_background = True
        try:
            yield
        finally:
            self._in_background = False

    def teardown(self) -> None:
        """Finish a background save before its resources are released."""
        if self.background is not None:
            self.background.close()
            self.background = None  # another fit creates its own
        super().teardown()  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers (or ``saved_names``) under their own names, sharded ones as DTensors."""
        return self._saved_part(self._whole_state())

    def _saved_part(self, state: dict[str, Any]) -> dict[str, Any]:
        saved = getattr(self.lightning_module, "saved_names", None)
        return {name: tensor for name, tensor in state.items() if saved is None or name in saved}

    def _whole_state(self) -> dict[str, Any]:
        state = dcp_state.get_model_state_dict(self._state_owner())
        return {name: tensor for name, tensor in state.items() if name not in self._ties}

    def optimizer_state(self, optimizer: Any, is_template: bool = False) -> dict[str, Any]:
        """Optimizer state by parameter name; empty before the first step, unless ``is_template`` creates it to load."""
        own = getattr(optimizer, "_optimizer", optimizer)
        if is_template:  # torch creates no state if gradients exist, such as after an interrupted fit
            own.zero_grad()
        is_new = self.reduce_boolean_decision(not own.state) and not is_template  # type: ignore[attr-defined]
        found = dcp_state.get_optimizer_state_dict(self._state_owner(), own)
        if is_new:  # torch took a step, which would count in all later steps
            own.state.clear()
            found["state"] = {}
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one complete checkpoint folder, replacing an older one of that name, or raise on every rank."""
        if storage_options is not None:
            raise TypeError("storage_options: a checkpoint is a folder on a file system; drop this argument")
        self.is_saving = True
        try:
            if self.background is not None:
                self.background.wait()
            self._save(Path(self.broadcast(str(filepath))), checkpoint)  # type: ignore[attr-defined]
        finally:
            self.is_saving = False

    def _save(self, path: Path, checkpoint: dict[str, Any]) -> None:
        self._sync_buffers()
        tensors, state = self._parted(checkpoint)
        module, step = self.lightning_module, checkpoint.get("global_step")
        # other data modules manage their own order
        locate = getattr(module.trainer.datamodule, "checkpoint_manifest", None)
        position = locate(step) if locate and step is not None and module.trainer.state.fn == "fit" else {}
        manifest = {
            "global_step": step,
            "epoch": checkpoint.get("epoch"),
            "engine": self.config.engine,
            "sharding": self.config.sharding,
            "mesh": list(self.mesh.mesh.shape),
            "precision": self.contract.report()["declared"],
            "tied": self._ties,
            "on_signal": self.saves_on_signal,
            **self._described(),
            **position,
        }
        store.save_checkpoint(
            path,
            tensors=tensors,
            state=state,
            manifest=manifest,
            layout=self.config.state_dict,
            files={**(self._built_files() if self._files is None else self._files), **self.checkpoint_files},
            rank_state=self._rng_before_window or self._rng_state(),
            background=self.background if self._in_background else None,
        )

    def _parted(self, checkpoint: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Split a checkpoint into tensors and the remaining state, with rank-dependent parts named; collective."""
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        tensors = {f"model/{name}": tensor for name, tensor in checkpoint["state_dict"].items()}
        groups = []
        for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
            groups.append({"param_groups": optimizer["param_groups"]})
            tensors.update(_flat_optimizer(optimizer, index))
        state, sharded = Ranks().own("looking for what to save", lambda: without_sharded(rest))
        state["optimizer_states"] = groups
        state[_DIFFERS], own = store.own_parts(state)
        if own:
            sharded[_OWN] = self._row(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        return {**tensors, **sharded}, state

    def _row(self, own: torch.Tensor) -> DTensor:
        """A matrix in which each rank has the row of its rank."""
        row = own.to(self.root_device)[None]
        return DTensor.from_local(row, self.mesh, [Shard(0)] * self.mesh.ndim, run_check=False)

    def check_state(self) -> None:
        """Refuse, before the first step, state of callbacks and modules that no checkpoint can store; collective."""
        trainer = self.lightning_module.trainer
        if not trainer.checkpoint_callbacks:
            return
        optimizers, self.optimizers = self.optimizers, []  # their state is known, but empty before a step
        made: list[dict[str, Any]] = []

        def make() -> str:
            try:
                made.append(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))
            except Exception as error:  # from a user's hook, which may require a step
                return repr(error)
            return ""

        try:
            failed = [text for text in Ranks().run("creating the state to save", make) if text]
        finally:
            self.optimizers = optimizers
        if failed:
            _log.warning("the contents of checkpoints cannot be checked before the first step: %s", failed[0])
            return
        tensors, _ = self._parted(made[0])
        specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
        store.check_alike(Path(trainer.default_root_dir), specs, self.config.state_dict)

    def _target(self, manifest: Manifest, sharded: Sharded, like: DTensor | None) -> torch.Tensor:
        """A tensor to load a DTensor of the state into: with its saved placements, or like parameters on a new mesh."""
        spec = manifest.tensors[sharded.name]
        dtype, mesh = getattr(torch, spec.dtype), None if like is None else like.device_mesh
        if mesh is None:
            return torch.empty(spec.shape, dtype=dtype, device=self.root_device)
        is_same = manifest.extra.get("mesh") == list(self.mesh.mesh.shape) and len(sharded.dims) == mesh.ndim
        dims = sharded.dims if is_same else [*[None] * (mesh.ndim - 1), 0 if spec.shape else None]
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return empty_dtensor(spec.shape, dtype=dtype, device_mesh=mesh, placements=placements)

    def _has_own(self, manifest: Manifest, differs: Mapping[str, bool], restores: bool) -> bool:
        """Whether each rank resumes with its own saved state; refuses, or warns of, state that fits no rank."""
        ranks, here = manifest.world_size, dist.get_world_size()
        callbacks = self.lightning_module.trainer.callbacks if restores else ()
        keys = tuple(f"callbacks.{one.state_key}." for one in callbacks)
        names = sorted(name for name in differs if not name.startswith("callbacks.") or f"{name}.".startswith(keys))
        saved = [manifest.extra.get(key) for key in ("engine", "sharding", "mesh")]
        layout = [self.config.engine, self.config.sharding, list(self.mesh.mesh.shape)]
        if saved != layout and (parts := [name for name in names if differs[name]]):
            raise CheckpointError(
                f"{manifest.folder}: cannot distribute tensors that each of {ranks} ranks saved separately: "
                f"{', '.join(parts[:5])}\n  saved with engine, sharding, mesh: {saved}; here: {layout}\n"
                "  fix: resume with the saved layout, drop that callback, or let it keep DTensors, which are resharded"
            )
        if ranks != here and names:
            text = "%s: differed between the %d ranks that saved it; all %d ranks resume with that of rank 0: %s"
            _log.warning(text, manifest.folder, ranks, here, ", ".join(names))
        return ranks == here and bool(differs)

    def _described(self) -> dict[str, Any]:
        return dict(getattr(self.lightning_module, "checkpoint_manifest", dict)())

    def _built_files(self) -> dict[str, bytes]:
        return dict(getattr(self.lightning_module, "checkpoint_files", dict)())

    def check_files(self) -> None:
        """Build on rank 0 the files that every save adds to tensors and state, or raise on every rank; collective."""
        ranks, self._files = Ranks(), None

        def build() -> None:
            checked_extra({"global_step": 0, **self._described()})
            self._files = self._built_files()

        if self.lightning_module.trainer.checkpoint_callbacks:
            ranks.first("building the files of checkpoints", build)
            self._files = self._files or {}  # other ranks write no files

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors into the sharded model and optimizers; return the remaining state (no pickle) to Lightning."""
        given = Path(self.broadcast(str(checkpoint_path)))  # type: ignore[attr-defined]
        if self.broadcast(given.is_file()):  # type: ignore[attr-defined]
            return self._load_file(given)
        path = self._sound(given)
        ranks, what = Ranks(), f"reading {path}"
        state, manifest = ranks.own(what, lambda: (store.load_state(path), read_manifest(path)))
        saved = set(manifest.tensors)
        self._rng_after_load = ranks.own(what, lambda: store.load_state(path, ranks.rank))
        whole = self._whole_state()
        model = self._saved_part(whole)
        templates = {f"model/{name}": tensor for name, tensor in model.items()}
        names = {name.rpartition("/")[0] for name in saved}  # unused parameters have no state
        optimizers: list[dict[str, Any]] = []
        for index, optimizer in enumerate(self.optimizers):
            found = self.optimizer_state(optimizer, is_template=True)
            found["state"] = {n: entry for n, entry in found["state"].items() if f"optim{index or ''}/{n}" in names}
            optimizers.append(found)
            templates.update(_flat_optimizer(found, index))
        skip = set() if self.optimizers else {name for name in saved if name.startswith("optim")}
        targets: dict[str, torch.Tensor] = {}
        differs, restores = state.pop(_DIFFERS, {}), self.lightning_module.trainer.state.fn == "fit"
        if not restores:  # callbacks are restored only in fit
            state["callbacks"] = {}
            skip |= {name for name in saved if name.startswith("state/callbacks/")}
        has_own = ranks.own(what, lambda: self._has_own(manifest, differs, restores))
        if has_own:
            targets[_OWN] = self._row(torch.empty(manifest.tensors[_OWN].shape[1], dtype=torch.uint8))
        else:
            skip.add(_OWN)
        like = next((tensor for tensor in whole.values() if isinstance(tensor, DTensor)), None)

        def target(sharded: Sharded) -> torch.Tensor:
            return targets.setdefault(sharded.name, self._target(manifest, sharded, like))

        state = ranks.own(what, lambda: with_sharded(state, target))
        if restores:
            self._check_restored(path, state)
        templates |= targets
        strict = self.lightning_module.strict_loading
        if not strict:
            templates = {name: tensor for name, tensor in templates.items() if name in saved}
            skip |= saved - templates.keys()
        store.load_tensors(path, templates, skip)
        if has_own:
            row = bytes(targets[_OWN].to_local().cpu().numpy())  # type: ignore[attr-defined]
            own = ranks.own(what, lambda: with_sharded(decode(json.loads(row)), target))
            state |= {**own, "callbacks": {**state.get("callbacks", {}), **own.get("callbacks", {})}}
        strict = strict and len(model) == len(whole)
        if self.config.engine == "fsdp1":  # it warns about each missing parameter
            model = {**whole, **model}
        model.update({again: model[first] for again, first in self._ties.items() if first in model})
        options = dcp_state.StateDictOptions(strict=strict)
        dcp_state.set_model_state_dict(self._state_owner(), model, options=options)
        for optimizer, found, before in zip(
            self.optimizers, optimizers, state.get("optimizer_states", []), strict=False
        ):
            # imported checkpoints have none: the recipe's options apply
            found["param_groups"] = before["param_groups"] or found["param_groups"]
            self.set_optimizer_state(optimizer, found, dcp_state.StateDictOptions(strict=False))
        self._check_parameters("after resume", self.optimizers)
        if not self.config.is_sharded:
            state["state_dict"] = model  # Lightning's WeightAveraging reads its averages here
        return state

    def _check_restored(self, path: Path, state: Mapping[str, Any]) -> None:
        """Refuse a state that a callback of Lightning cannot restore; warn of a step that Lightning skips."""
        configs, saved = getattr(self, "lr_scheduler_configs", []), state.get("callbacks", {})
        progress = state.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
        is_end = progress.get("is_last_batch", False) and not path.name.startswith(".")  # a finder's temporary one
        by_epoch = any(config.reduce_on_plateau and config.interval == "epoch" for config in configs)
        if is_end and by_epoch and Ranks().rank == 0:
            # findings/a-resumed-plateau-misses-the-epoch-of-its-checkpoint.sh
            text = "Lightning skips the step of ReduceLROnPlateau for the epoch of the checkpoint, so the learning "
            _log.warning("%srate may fall later than without the interruption", text)
        for callback in self.lightning_module.trainer.callbacks:
            if not isinstance(callback, BaseFinetuning):
                continue
            groups = saved.get(callback.state_key, {}).get("internal_optimizer_metadata", {})
            for index, optimizer in enumerate(self.optimizers):
                now, before = len(optimizer.param_groups), len(groups.get(index, ()))
                if before > now:
                    name = type(callback).__name__
                    text = f"{path}: {name} had added {before - now} group(s) of parameters, which cannot be restored"
                    fix = f"resume a checkpoint from before, or omit {name} and unfreeze in configure_optimizers"
                    raise CheckpointError(f"{text}\n  fix: {fix}")

    def _load_file(self, path: Path) -> dict[str, Any]:
        """Load a single file written by Lightning's own strategies; each rank reads its rows."""
        content = Ranks().own(f"reading {path}", lambda: dict(read_lightning_file(path)))
        whole = dcp_state.StateDictOptions(full_state_dict=True, strict=self.lightning_module.strict_loading)
        dcp_state.set_model_state_dict(self._state_owner(), dict(content.pop("state_dict")), options=whole)
        for optimizer, saved in zip(self.optimizers, content.get("optimizer_states", []), strict=False):
            params = [param for group in saved["param_groups"] for param in group["params"]]
            here = [name for group in self.optimizer_state(optimizer)["param_groups"] for name in group["params"]]
            if len(params) != len(here):
                raise CheckpointError(f"{path}: its optimizer has {len(params)} parameters, the run's {len(here)}")
            # saved by name, or numbered in the order of the optimizer
            names = {p: p if isinstance(p, str) else name for p, name in zip(params, here, strict=True)}
            groups = [{**group, "params": [names[p] for p in group["params"]]} for group in saved["param_groups"]]
            state = {"state": {names[p]: entry for p, entry in saved["state"].items()}, "param_groups": groups}
            lenient = dcp_state.StateDictOptions(full_state_dict=True, strict=False)  # unused parameters have no state
            self.set_optimizer_state(optimizer, state, lenient)
        self._check_parameters("after resume", self.optimizers)
        return content

    def _check_hyperparameters(self) -> None:
        """Refuse, before the first step, hyperparameters that no checkpoint can store."""
        trainer = self.lightning_module.trainer
        for owner in (self.lightning_module, trainer.datamodule) if trainer.checkpoint_callbacks else ():
            found = dict(getattr(owner, "hparams", {}))
            refused = {key: why for key in found if (why := refused_in({key: found[key]}))}
            fix = f"write save_hyperparameters(ignore={list(refused)})"
            given, allowed = "; ".join(refused.values()), "plain Python data, NumPy data and tensors"
            require(not refused, f"{type(owner).__name__}.hparams", given, allowed, fix)

    def set_optimizer_state(self, optimizer: Any, saved: Any, options: dcp_state.StateDictOptions) -> None:
        """Load a state from :meth:`optimizer_state` into an optimizer."""
        if saved["state"]:
            dcp_state.set_optimizer_state_dict(self._state_owner(), optimizer, saved, options=options)
            return
        # SGD without momentum has no tensors, but a learning rate; newer state, such as that of Lightning's finders, is
        # discarded
        optimizer.state.clear()
        for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=False):
            group.update({key: value for key, value in before.items() if key != "params"})

    def _sound(self, checkpoint_path: Path) -> Path:
        """The checkpoint to load: the given path, or the first undamaged fallback."""
        choices = ([str(path) for path in self.fallback_checkpoints], self.verify_on_load)
        others, verify = self.broadcast(choices)  # type: ignore[attr-defined]
        path, damaged = sound_checkpoint(checkpoint_path, [Path(other) for other in others], Ranks(), verify)
        self.fallback_checkpoints, self.damaged_checkpoints, self.loaded_checkpoint = (), damaged, path
        if damaged and dist.get_rank() == 0:
            _log.error("%s", "\n".join(damaged.values()))
            _log.warning("resuming from %s instead of %s (resume.fallback)", path, checkpoint_path)
        return path

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint folder, if there is one, on rank 0; failures are logged as warnings."""
        if dist.get_rank() == 0 and os.path.lexists(filepath):  # OnExceptionCheckpoint may have saved none
            try:
                run_folder.remove(Path(filepath))
            except (CheckpointError, OSError) as error:
                _log.warning("%s", error)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Restore the checkpoint's RNG just before the first batch after a resume, which starts a global batch."""
        saved, self._rng_after_load = self._rng_after_load, None
        if saved is not None:
            _set_rng_states(saved)
            if is_accelerator(self.root_device) and "device" in saved:
                torch.get_device_module(self.root_device).set_rng_state(saved["device"], self.root_device)
        if self._rng_before_window is None and self.lightning_module.trainer.accumulate_grad_batches > 1:
            self._rng_before_window = self._rng_state()

    def _rng_state(self) -> dict[str, Any]:
        device, states = self.root_device, _collect_rng_states(include_cuda=False)
        own = {"device": torch.get_device_module(device).get_rng_state(device)} if is_accelerator(device) else {}
        return states | own

    def _state_owner(self) -> nn.Module:
        assert self._root is not None
        return self._root if self.config.engine == "fsdp1" else self.lightning_module


def _flat_optimizer(state: Mapping[str, Any], index: int) -> dict[str, torch.Tensor]:
    """Map ``optim/<parameter>/<key>`` (second optimizer: ``optim1/``) to tensors; numbers become 0-dim tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, entry in state["state"].items():
        for key, value in entry.items():
            plain = value if torch.is_tensor(value) else torch.tensor(value)
            found.update(_unpacked(f"optim{index or ''}/{name}/{key}", plain))
    return found


@torch.no_grad()
def _unpacked(name: str, value: Any) -> dict[str, torch.Tensor]:
    """A moment in its saved form; torchao's 8-bit moments are saved as codes and scales to avoid repacking errors."""
    local: Any = local_part(value)
    if not hasattr(local, "codes"):
        return {name: value}
    codes, scale = local.codes, local.scale
    by_rows = scale.numel() % codes.shape[0] == 0
    scale = scale.view(codes.shape[0], -1) if by_rows else scale
    if isinstance(value, DTensor):
        blocks, rows = value.numel() // local.block_size, value.shape[0]
        shape = torch.Size((rows, blocks // rows) if by_rows else (blocks,))
        like = value.device_mesh, value.placements
        codes = DTensor.from_local(codes, *like, run_check=False, shape=value.shape, stride=value.stride())
        stride = torch.empty(shape, device="meta").stride()
        scale = DTensor.from_local(scale, *like, run_check=False, shape=shape, stride=stride)
    return {f"{name}.codes": codes, f"{name}.scale": scale}


def check_packed_state(optimizer: Any, offloads: bool, names: Mapping[int, str]) -> None:
    """Refuse 8-bit state of torchao that no checkpoint can store: offloaded, or packed on some ranks only."""
    if not type(optimizer).__module__.startswith("torchao."):
        return
    field, kind, block = "model.optim.class_path", type(optimizer).__name__, int(optimizer.block_size)
    require(not offloads, field, f"{kind} with cpu_offload", "shards on the device")
    for param in (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)):
        ranks, rows = param.device_mesh.size(param.device_mesh.ndim - 1), param.shape[0]
        per_row, chunk = param.numel() // rows, -(-rows // ranks)
        sizes = {max(0, min(chunk, rows - rank * chunk)) * per_row for rank in range(ranks)}
        packed = {is_packed(size, block) for size in sizes}
        alike = packed == {False} or (packed == {True} and (len(sizes) == 1 or per_row % block == 0))
        given = f"{kind}, with {sorted(sizes)} elements of {names.get(id(param), 'a parameter')} on the ranks"
        allowed = f"at least 4096 and a multiple of {block} on every rank or on none, so another number of ranks"
        require(alike, field, given, allowed)
