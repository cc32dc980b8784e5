"""The checkpoint half of a strategy, the same for all engines: DTensors under the model's own names."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lit_fsdp.checkpoint import run_folder, store
from lit_fsdp.checkpoint.importing import read_lightning_file
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.state import refused as refused_in
from lit_fsdp.checkpoint.store import BackgroundSaver
from lit_fsdp.checkpoint.verify import sound_checkpoint
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.models.optimizers import is_packed
from lit_fsdp.parallel.precision import DtypeContract, moments

_log = logging.getLogger(__name__)


class Checkpoints:
    """Saving and loading, the part of :class:`lit_fsdp.parallel.base.EngineStrategy` about checkpoints."""

    config: StrategyConfig
    contract: DtypeContract
    mesh: DeviceMesh
    root_device: torch.device
    lightning_module: Any
    optimizers: list[Any]
    checkpoint_files: dict[str, Path]
    verify_on_load = True
    """Whether every file's hash is compared before a checkpoint is loaded; sizes always are."""
    fallback_checkpoints: Sequence[Path] = ()
    """What the next load may take, in this order, where the checkpoint it is given is damaged."""
    damaged_checkpoints: Mapping[Path, str] = MappingProxyType({})
    """What the last load passed over, with the reason."""
    loaded_checkpoint: Path | None = None
    """The one that was loaded last."""
    saves_on_signal = False
    """Whether the save under way has no other reason than a signal; its manifest says so."""
    background: BackgroundSaver | None = None
    _in_background = False
    _root: nn.Module | None
    _ties: dict[str, str]
    _sync_buffers: Callable[[], None]
    _rng_after_load: dict[str, Any] | None = None
    _rng_before_window: dict[str, Any] | None = None

    def open_background(self) -> BackgroundSaver:
        """What saves in the background from now on, made at the first call; collective."""
        if self.background is None:
            self.background = BackgroundSaver(self.root_device, self.config.timeout_seconds)
        return self.background

    @contextlib.contextmanager
    def saving_in_background(self) -> Iterator[None]:
        """Inside, :meth:`save_checkpoint` returns once everything is copied; elsewhere, once the folder is there."""
        self._in_background = True
        try:
            yield
        finally:
            self._in_background = False

    def teardown(self) -> None:
        """Let a save in the background end before anything it needs goes away."""
        if self.background is not None:
            self.background.close()
            self.background = None  # another fit makes one of its own
        super().teardown()  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers under the module's own names, sharded ones as DTensors; ties once.

        Of a module with ``saved_names`` only these: what is frozen there can be read again from where it came.
        """
        return self._saved_part(self._whole_state())

    def _whole_state(self) -> dict[str, Any]:
        state = dcp_state.get_model_state_dict(self._state_owner())
        return {name: tensor for name, tensor in state.items() if name not in self._ties}

    def _saved_part(self, state: dict[str, Any]) -> dict[str, Any]:
        saved = getattr(self.lightning_module, "saved_names", None)
        return state if saved is None else {name: tensor for name, tensor in state.items() if name in saved}

    def optimizer_state(self, optimizer: Any, is_template: bool = False) -> dict[str, Any]:
        """``state`` by parameter name (DTensors) and ``param_groups`` by parameter name.

        Before its first step an optimizer has no state; ``is_template`` gives it one to load into.
        """
        own = getattr(optimizer, "_optimizer", optimizer)
        is_new = self.reduce_boolean_decision(not own.state) and not is_template  # type: ignore[attr-defined]
        found = dcp_state.get_optimizer_state_dict(self._state_owner(), own)
        if is_new:  # torch has taken a step, which would count in every later one
            own.state.clear()
            found["state"] = {}
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one complete checkpoint folder, in place of an older one of that name, or raise on every rank.

        A save that is still going on in the background is finished first.
        """
        if storage_options is not None:
            raise TypeError("storage_options: a checkpoint is a folder on a file system; drop this argument")
        if self.background is not None:
            self.background.wait()
        path = Path(self.broadcast(str(filepath)))  # type: ignore[attr-defined]
        self._sync_buffers()
        checkpoint = dict(checkpoint)
        tensors = {f"model/{name}": tensor for name, tensor in checkpoint.pop("state_dict").items()}
        groups = []
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            groups.append({"param_groups": state["param_groups"]})
            tensors.update(_flat_optimizer(state, index))
        module = self.lightning_module
        describe, files = getattr(module, "checkpoint_manifest", None), getattr(module, "checkpoint_files", None)
        manifest = {
            "global_step": checkpoint.get("global_step"),
            "epoch": checkpoint.get("epoch"),
            "engine": self.config.engine,
            "sharding": self.config.sharding,
            "mesh": list(self.mesh.mesh.shape),
            "precision": self.contract.report()["declared"],
            "tied": self._ties,
            "on_signal": self.saves_on_signal,
            **(describe() if describe else {}),
            **self._data_position(checkpoint.get("global_step")),
        }
        extra: Mapping[str, Any] = {**(files() if files else {}), **self.checkpoint_files}
        state = {**checkpoint, "optimizer_states": groups}
        rng = self._rng_before_window or self._rng_state()
        parts: dict[str, Any] = {"tensors": tensors, "state": state, "manifest": manifest, "files": extra}
        background = self.background if self._in_background else None
        store.save_checkpoint(path, layout=self.config.state_dict, rank_state=rng, background=background, **parts)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors into the sharded model and optimizers; the rest, no pickle, is for Lightning to restore."""
        given = Path(self.broadcast(str(checkpoint_path)))  # type: ignore[attr-defined]
        if self.broadcast(given.is_file()):  # type: ignore[attr-defined]
            return self._load_file(given)
        path = self._sound(given)
        ranks, what = Ranks(), f"reading {path}"
        state, saved = ranks.own(what, lambda: (store.load_state(path), set(read_manifest(path).tensors)))
        rng = ranks.own(what, lambda: store.load_state(path, ranks.rank))
        owner = self._state_owner()
        whole = self._whole_state()
        model = self._saved_part(whole)
        templates = {f"model/{name}": tensor for name, tensor in model.items()}
        optimizers: list[tuple[Any, dict[str, Any]]] = []
        for index, optimizer in enumerate(self.optimizers):
            has_state = any(name.startswith(_optim_prefix(index)) for name in saved)
            found = (
                self.optimizer_state(optimizer, is_template=True) if has_state else {"state": {}, "param_groups": []}
            )
            names = {name.rpartition("/")[0] for name in saved}  # parameters that were never used have none
            found["state"] = {n: entry for n, entry in found["state"].items() if f"{_optim_prefix(index)}{n}" in names}
            optimizers.append((optimizer, found))
            templates.update(_flat_optimizer(found, index))
        skip = set() if self.optimizers else {name for name in saved if not name.startswith("model/")}
        if not self.lightning_module.strict_loading:
            templates = {name: tensor for name, tensor in templates.items() if name in saved}
            skip |= saved - templates.keys()
        store.load_tensors(path, templates, skip)
        is_whole = len(model) == len(whole)
        if self.config.engine == "fsdp1":  # which warns of each parameter that it is not given
            model = {**whole, **model}
        model.update({again: model[first] for again, first in self._ties.items() if first in model})
        strict = dcp_state.StateDictOptions(strict=is_whole and self.lightning_module.strict_loading)
        dcp_state.set_model_state_dict(owner, model, options=strict)
        for (optimizer, found), groups in zip(optimizers, state.get("optimizer_states", []), strict=False):
            if found["state"]:
                # an imported checkpoint brings none: what the recipe says holds
                found["param_groups"] = groups["param_groups"] or found["param_groups"]
                partial = dcp_state.StateDictOptions(strict=False)
                dcp_state.set_optimizer_state_dict(owner, optimizer, found, options=partial)
            else:  # SGD without momentum has no tensors, but a learning rate
                _restore_groups(optimizer, groups["param_groups"])
        self._check_parameters("after resume", self.optimizers)
        self._rng_after_load = rng
        if not self.config.is_sharded:
            state["state_dict"] = model  # where Lightning's WeightAveraging looks for its averages
        return state

    def _load_file(self, path: Path) -> dict[str, Any]:
        """Load the one file that Lightning's own strategies write; each rank reads its rows of it."""
        content = Ranks().own(f"reading {path}", lambda: dict(read_lightning_file(path)))
        owner, strict = self._state_owner(), self.lightning_module.strict_loading
        whole = dcp_state.StateDictOptions(full_state_dict=True, strict=strict)
        dcp_state.set_model_state_dict(owner, dict(content.pop("state_dict")), options=whole)
        for optimizer, saved in zip(self.optimizers, content.get("optimizer_states", []), strict=False):
            inner = getattr(optimizer, "_optimizer", optimizer)
            params = [param for group in saved["param_groups"] for param in group["params"]]
            here = [name for group in self.optimizer_state(inner)["param_groups"] for name in group["params"]]
            if len(params) != len(here):
                text = "%s: its optimizer has %d parameters, %d are here: not loaded"
                _log.warning(text, path, len(params), len(here))
                continue
            if not saved["state"]:
                _restore_groups(inner, saved["param_groups"])
                continue
            names = dict(zip(params, here, strict=True))  # numbered, in the order of the optimizer
            names.update({param: param for param in params if isinstance(param, str)})
            groups = [{**group, "params": [names[p] for p in group["params"]]} for group in saved["param_groups"]]
            state: Any = {"state": {names[p]: entry for p, entry in saved["state"].items()}, "param_groups": groups}
            lenient = dcp_state.StateDictOptions(full_state_dict=True, strict=False)  # unused ones have no state
            dcp_state.set_optimizer_state_dict(owner, inner, state, options=lenient)
        self._check_parameters("after resume", self.optimizers)
        return content

    def check_hyperparameters(self, trainer: Any) -> None:
        """Compare what ``save_hyperparameters`` has kept with what a checkpoint can hold, before the first step.

        Raises:
            ConfigError: There is something else, such as a class or an object; names its key.
        """
        for owner in (self.lightning_module, trainer.datamodule) if trainer.checkpoint_callbacks else ():
            found = dict(getattr(owner, "hparams", {}))
            refused = {key: why for key in found if (why := refused_in({key: found[key]}))}
            allowed = "plain Python data, NumPy data and tensors: a checkpoint holds no pickle"
            fix = f"write save_hyperparameters(ignore={list(refused)})"
            require(not refused, f"{type(owner).__name__}.hparams", "; ".join(refused.values()), allowed, fix)

    def _data_position(self, step: int | None) -> dict[str, Any]:
        """Of a data module that knows it; the order of any other is its own business."""
        trainer = self.lightning_module.trainer
        describe = getattr(getattr(trainer, "datamodule", None), "checkpoint_manifest", None)
        return describe(step) if describe is not None and step is not None and trainer.state.fn == "fit" else {}

    def _sound(self, checkpoint_path: Any) -> Path:
        """The checkpoint to load: the one given, or the first sound one among those that may take its place."""
        asked = (str(checkpoint_path), [str(path) for path in self.fallback_checkpoints], self.verify_on_load)
        first, others, verify = self.broadcast(asked)  # type: ignore[attr-defined]
        path, damaged = sound_checkpoint(Path(first), [Path(path) for path in others], Ranks(), verify)
        self.fallback_checkpoints, self.damaged_checkpoints, self.loaded_checkpoint = (), damaged, path
        if damaged and dist.get_rank() == 0:
            _log.error("%s", "\n".join(damaged.values()))
            _log.warning("going on from %s instead of %s (resume.fallback)", path, first)
        return path

    def _check_parameters(self, when: str, optimizers: Sequence[Any] = ()) -> None:
        named = list(self.lightning_module.named_parameters())
        self.contract.check_parameters(f"parameters {when}", named)
        for optimizer in optimizers:
            found = moments(optimizer, {id(param): name for name, param in named})
            self.contract.check(f"optimizer state {when}", found, self.contract.row.param)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint folder, on rank 0; a warning if that fails."""
        if dist.get_rank() == 0:
            try:
                run_folder.remove(Path(filepath))
            except (CheckpointError, OSError) as error:
                _log.warning("%s", error)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Restore the RNG of the checkpoint just before the first batch after a resume.

        A checkpoint inside an accumulation starts that global batch again, so with its RNG.
        """
        if (saved := self._rng_after_load) is not None:
            _set_rng_states(saved)
            if self.root_device.type == "cuda" and "device" in saved:
                torch.cuda.set_rng_state(saved["device"], self.root_device)
            self._rng_after_load = None
        if self._rng_before_window is None and self.lightning_module.trainer.accumulate_grad_batches > 1:
            self._rng_before_window = self._rng_state()

    def _rng_state(self) -> dict[str, Any]:
        own = {"device": torch.cuda.get_rng_state(self.root_device)} if self.root_device.type == "cuda" else {}
        return _collect_rng_states(include_cuda=False) | own

    def _state_owner(self) -> nn.Module:
        assert self._root is not None
        return self._root if self.config.engine == "fsdp1" else self.lightning_module


def _restore_groups(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    """Of an optimizer that was saved without state; what it has since, as after Lightning's finders, is forgotten."""
    optimizer.state.clear()
    for group, before in zip(optimizer.param_groups, saved, strict=False):
        group.update({key: value for key, value in before.items() if key != "params"})


def _optim_prefix(index: int) -> str:
    return "optim/" if index == 0 else f"optim{index}/"


def _flat_optimizer(state: Mapping[str, Any], index: int) -> dict[str, torch.Tensor]:
    """``optim/<parameter>/<key>`` → tensor; numbers among the state become 0-dim tensors."""
    found: dict[str, torch.Tensor] = {}
    for name, entry in state["state"].items():
        for key, value in entry.items():
            plain = value if torch.is_tensor(value) else torch.tensor(value)
            found.update(_unpacked(f"{_optim_prefix(index)}{name}/{key}", plain))
    return found


@torch.no_grad()
def _unpacked(name: str, value: Any) -> dict[str, torch.Tensor]:
    """A moment as it is saved: as it is, or of torchao's 8-bit ones codes and scales, in the memory that they have.

    Not as the numbers that these stand for: packed again they would give other scales.
    """
    local: Any = value.to_local() if isinstance(value, DTensor) else value
    is_packed_here: bool = is_traceable_wrapper_subclass(local)
    if not is_packed_here:
        return {name: value}
    codes, scale = local.codes, local.scale
    by_rows = scale.numel() % codes.shape[0] == 0
    scale = scale.view(codes.shape[0], -1) if by_rows else scale
    if isinstance(value, DTensor):
        blocks = value.numel() // local.block_size
        rows = value.shape[0]
        shape = torch.Size((rows, blocks // rows) if by_rows else (blocks,))
        codes, scale = _sharded_as(value, codes, value.shape), _sharded_as(value, scale, shape)
    return {f"{name}.codes": codes, f"{name}.scale": scale}


def _sharded_as(other: DTensor, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, other.device_mesh, other.placements, run_check=False, shape=shape, stride=stride)


def check_packed_state(optimizer: torch.optim.Optimizer, offloads: bool, names: Mapping[int, str]) -> None:
    """Refuse 8-bit state of torchao that ranks would keep in different ways, which no checkpoint could hold.

    ``names`` of parameters by ``id``; codes could not be loaded into shards that are offloaded.

    Raises:
        ConfigError: Offload, or shards of which some are whole blocks and some are not.
    """
    if not type(optimizer).__module__.startswith("torchao."):
        return
    field, kind, block = "model.optim.class_path", type(optimizer).__name__, int(optimizer.block_size)  # type: ignore[attr-defined]
    require(not offloads, field, f"{kind} with cpu_offload", "shards on the device", "drop cpu_offload")
    for param in (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)):
        ranks, rows = param.device_mesh.size(param.device_mesh.ndim - 1), param.shape[0]
        per_row, chunk = param.numel() // rows, -(-rows // ranks)
        sizes = {max(0, min(chunk, rows - rank * chunk)) * per_row for rank in range(ranks)}
        packed = {is_packed(size, block) for size in sizes}
        alike = packed == {False} or (packed == {True} and (len(sizes) == 1 or per_row % block == 0))
        given = f"{kind}, with {sorted(sizes)} elements of {names.get(id(param), 'a parameter')} on the ranks"
        allowed = (
            f"at least 4096 and a multiple of {block} on every rank, or on none: that decides what is kept in 8 bits"
        )
        require(alike, field, given, allowed, "take another number of ranks, or torch.optim.AdamW")
