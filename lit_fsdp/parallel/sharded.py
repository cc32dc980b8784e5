"""What both engines share: set-up in one order, checkpoints of DTensors under the model's own names, the contract.

A mixin in front of a Lightning strategy. It imports neither Lightning nor the checkpoint package; the storage
functions are handed in by the factory.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor

from lit_fsdp.config.sharding import StrategyConfig, mesh_shape
from lit_fsdp.errors import ConfigError, ContractError
from lit_fsdp.parallel.activation import apply_activation_checkpointing, is_checkpointed
from lit_fsdp.parallel.grad_norm import clip_by_norm, clip_by_value
from lit_fsdp.parallel.materialize import Materializer, Reader, reset_parameters_reader
from lit_fsdp.parallel.mesh import SHARD, build_mesh
from lit_fsdp.parallel.precision import TORCH_DTYPES, DtypeContract, cast_parameters
from lit_fsdp.parallel.units import UnitPlan, audit, plan_units, tied_names


class Storage(Protocol):
    """The functions of ``lit_fsdp.checkpoint`` that a strategy needs."""

    save: Callable[..., None]
    load_tensors: Callable[..., None]
    load_state: Callable[..., dict[str, Any]]
    load_rank_state: Callable[..., dict[str, Any] | None]
    tensor_names: Callable[[Path], set[str]]
    remove: Callable[[Path], None]


class ClipsShardedGradients:
    """Gradient clipping for a Lightning precision plugin, equal to the unsharded result."""

    shard_group: dist.ProcessGroup | None = None
    last_grad_norm: torch.Tensor | None = None

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Scale all gradients so that their common 2-norm is at most ``clip_val``."""
        self.last_grad_norm = clip_by_norm(_grads(optimizer), clip_val, self.shard_group)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clamp every gradient element to ``[-clip_val, clip_val]``."""
        clip_by_value(_grads(optimizer), clip_val)


class ShardedStrategy:
    """The engine-independent half of a strategy.

    Args:
        config: The factory's checked arguments.
        storage: Where checkpoints are written to and read from.
    """

    precision_class: Callable[[], Any]
    lightning_module: Any
    root_device: torch.device
    num_nodes: int
    world_size: int

    def __init__(self, config: StrategyConfig, storage: Storage) -> None:
        self.config, self._storage = config, storage
        self._plugin = self.precision_class()
        self._root: nn.Module | None = None
        self._owner: Any = None
        self._broadcast_done: dict[Any, Any] = {}
        self._ties: dict[str, str] = {}
        self._rng_after_load: dict[str, Any] | None = None
        self.plan: UnitPlan | None = None
        self.audit: dict[str, Any] = {}
        self.contract = DtypeContract(config.precision_config.row, config.precision_config.mode)
        self.checkpoint_files: dict[str, Path] = {}
        super().__init__()

    @property
    def precision_plugin(self) -> Any:
        """The plugin that clips; dtypes are the strategy's alone."""
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None and plugin.precision != "32-true":
            raise ConfigError(
                "trainer.precision",
                plugin.precision,
                "nothing: precision is the strategy's (mixed, low_precision, fp32)",
                "drop trainer.precision and write precision: mixed in the strategy (fsdp_strategy(precision=...))",
            )

    def setup(self, trainer: Any) -> None:
        """Shard the LightningModule (once), check the contract, build the optimizers."""
        self.accelerator.setup(trainer)  # type: ignore[attr-defined]
        fitting = trainer.state.fn == "fit"
        if self._owner is not self.lightning_module:
            self._setup_module(self.lightning_module)
        self.model = self._root
        self.barrier()  # type: ignore[attr-defined]
        self.contract.check_parameters(self.lightning_module.named_parameters(), "after set-up")
        if fitting:
            self.setup_optimizers(trainer)  # type: ignore[attr-defined]
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def _setup_module(self, module: Any) -> None:
        if any(hasattr(m, "_fsdp_wrapped_module") or hasattr(m, "_get_fsdp_state") for m in module.modules()):
            raise ConfigError(
                "wrap",
                "a model that is already wrapped",
                "a model without FSDP units; the strategy wraps by itself",
                "remove wrap() or fully_shard() from the LightningModule",
            )
        cast_parameters(module, TORCH_DTYPES[self.config.precision_config.row.param])
        plan = plan_units(module, self.config.wrap_config, "trainer.strategy.init_args.wrap")
        apply_activation_checkpointing(plan.blocks, self.config.activation_config)
        self._ties = tied_names(module)
        reader: Reader = getattr(module, "read_tensor", None) or reset_parameters_reader(torch.initial_seed())
        names = {unit.name for unit in plan.units[:-1] if is_checkpointed(plan.modules[unit.name])}
        self._root = self._shard(module, plan, Materializer(module, reader, self.root_device))
        self._broadcast_done.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # moving what is there already
            module.to(self.root_device)
        self.plan, self._owner = plan, module
        self.audit = audit(plan, self.mesh.size(self.mesh.ndim - 1), names)
        self._check_units()
        if self.contract.watching:
            self.contract.watch({name: m for name, m in plan.modules.items() if m in set(plan.blocks)})

    def _broadcast(self, module: nn.Module) -> None:
        """Move what is already loaded to the device and make it rank 0's, one unit at a time."""
        for child in module.modules():
            for tensors in (child._parameters, child._buffers):
                for name, tensor in tensors.items():
                    if tensor is None or tensor.is_meta or isinstance(tensor, DTensor):
                        continue
                    tensor.data = tensor.data.to(self.root_device)
                    if (id(tensor), name) not in self._broadcast_done:
                        dist.broadcast(tensor.data, src=0)
                        self._broadcast_done[(id(tensor), name)] = tensor

    def _check_units(self) -> None:
        """Compare the units of the live model, and what this rank holds of it, with the plan."""
        assert self.plan is not None
        found, planned = set(self.realised_units()), {unit.name for unit in self.plan.units}
        if found != planned:
            raise ContractError(f"FSDP units differ from the plan: {sorted(found ^ planned)}")
        local = sum(_local_numel(p) for p in self.lightning_module.parameters())
        ranks = self.mesh.size(self.mesh.ndim - 1)
        self.audit["num_params_on_this_rank"] = local
        if ranks > 1 and self.plan.num_params and local >= self.plan.num_params:
            raise ContractError(f"not sharded: this rank holds {local:,} of {self.plan.num_params:,} parameters")

    def _check_environment(self) -> None:
        mesh_shape(self.config, self.num_nodes, self.num_nodes * self.num_processes)

    num_processes: int

    def _build_mesh(self) -> None:
        replicas, shards = mesh_shape(self.config, self.num_nodes, self.world_size)
        self.mesh = build_mesh(self.root_device.type, replicas, shards)
        self._plugin.shard_group = self.mesh.get_group(SHARD) if shards > 1 else None

    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        raise AssertionError("each engine has its own")  # pragma: no cover

    def realised_units(self) -> list[str]:
        """Names of the modules that really are FSDP units, the root as ``""``."""
        raise AssertionError("each engine has its own")  # pragma: no cover

    # -- the contract in the first step

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward pass; until the first optimizer step the dtypes of reductions are recorded."""
        with self.contract.watch_reductions():
            return super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Optimizer step; after the first one the dtypes of gradients and moments are compared."""
        result = super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        if self.contract.watching:
            named = list(self.lightning_module.named_parameters())
            self.contract.check_parameters(named, "after the first step")
            self.contract.check_gradients(named)
            self.contract.check_optimizer(optimizer, {id(p): n for n, p in named})
            self.contract.finish_first_step()
        return result

    # -- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Parameters and persistent buffers under the module's own names, sharded ones as DTensors; ties once."""
        state = dcp_state.get_model_state_dict(self._state_owner())
        return {name: tensor for name, tensor in state.items() if name not in self._ties}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """``state`` by parameter name (DTensors) and ``param_groups`` by parameter name."""
        return dcp_state.get_optimizer_state_dict(self._state_owner(), getattr(optimizer, "_optimizer", optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one complete checkpoint folder, or raise on every rank; nothing is overwritten."""
        if storage_options is not None:
            raise TypeError("storage_options: a checkpoint is a folder on a file system; drop this argument")
        path = Path(self.broadcast(str(filepath)))  # type: ignore[attr-defined]
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
            **(describe() if describe else {}),
        }
        extra: Mapping[str, Any] = {**(files() if files else {}), **self.checkpoint_files}
        state = {**checkpoint, "optimizer_states": groups}
        self._storage.save(
            path, tensors, state, manifest, self.config.state_dict, files=extra, rank_state=rng_state(self.root_device)
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors into the sharded model and optimizers; the rest is returned for Lightning to restore.

        Nothing is unpickled, whatever ``weights_only`` says.
        """
        path = Path(self.broadcast(str(checkpoint_path)))  # type: ignore[attr-defined]
        state = self._storage.load_state(path)
        saved = self._storage.tensor_names(path)
        owner = self._state_owner()
        model = self.lightning_module_state_dict()
        templates = {f"model/{name}": tensor for name, tensor in model.items()}
        optimizers: list[tuple[Any, dict[str, Any]]] = []
        for index, optimizer in enumerate(self.optimizers):
            has_state = any(name.startswith(_optim_prefix(index)) for name in saved)
            found = self.optimizer_state(optimizer) if has_state else {"state": {}, "param_groups": []}
            optimizers.append((optimizer, found))
            templates.update(_flat_optimizer(found, index))
        skip = () if self.optimizers else tuple(n for n in saved if not n.startswith("model/"))
        self._storage.load_tensors(path, templates, skip)
        model.update({again: model[first] for again, first in self._ties.items() if first in model})
        strict = dcp_state.StateDictOptions(strict=self.lightning_module.strict_loading)
        dcp_state.set_model_state_dict(owner, model, options=strict)
        for (optimizer, found), groups in zip(optimizers, state.get("optimizer_states", []), strict=False):
            if found["state"]:
                found["param_groups"] = groups["param_groups"]
                dcp_state.set_optimizer_state_dict(owner, optimizer, found)
        self._check_after_load()
        self._rng_after_load = self._storage.load_rank_state(path, dist.get_rank())
        return state

    def _check_after_load(self) -> None:
        named = list(self.lightning_module.named_parameters())
        self.contract.check_parameters(named, "after resume")
        for optimizer in self.optimizers:
            self.contract.check_optimizer(optimizer, {id(p): n for n, p in named}, "after resume")

    optimizers: list[Any]

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint folder, on rank 0."""
        if dist.get_rank() == 0:
            self._storage.remove(Path(filepath))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Restore the RNG of the checkpoint just before the first batch after a resume."""
        if self._rng_after_load is not None:
            restore_rng(self._rng_after_load, self.root_device)
            self._rng_after_load = None

    def _state_owner(self) -> nn.Module:
        assert self._root is not None
        return self._root if self.config.engine == "fsdp1" else self.lightning_module


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of torch's, NumPy's and Python's random generators on this rank."""
    algorithm, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": (str(algorithm), [int(k) for k in keys], int(position), int(has_gauss), float(cached)),
        "python": random.getstate(),
    }


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to what :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["device"] is not None:
        torch.cuda.set_rng_state(state["device"], device)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _grads(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (p.grad for p in group["params"] if p.grad is not None)


def _local_numel(param: torch.Tensor) -> int:
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.numel()


def _optim_prefix(index: int) -> str:
    return "optim/" if index == 0 else f"optim{index}/"


def _flat_optimizer(state: Mapping[str, Any], index: int) -> dict[str, torch.Tensor]:
    """``optim/<parameter>/<key>`` → tensor; numbers among the state become 0-dim tensors."""
    return {
        f"{_optim_prefix(index)}{name}/{key}": value if torch.is_tensor(value) else torch.tensor(value)
        for name, entry in state["state"].items()
        for key, value in entry.items()
    }
