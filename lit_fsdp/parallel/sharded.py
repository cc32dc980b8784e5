"""What both engines share: set-up in one order, the audit of the live units, the dtype contract.

A mixin in front of a Lightning strategy; it does not import Lightning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lit_fsdp.config.mesh import mesh_shape
from lit_fsdp.config.sharding import StrategyConfig
from lit_fsdp.errors import ConfigError, ContractError
from lit_fsdp.parallel.casting import cast_buffers
from lit_fsdp.parallel.contact import ContactWithRanks
from lit_fsdp.parallel.devices import check_device
from lit_fsdp.parallel.kept_memory import KeptMemory
from lit_fsdp.parallel.live_units import engines_already_there, read_live_units, units_already_wrapped
from lit_fsdp.parallel.materialize import Materializer, Reader, reset_parameters_reader
from lit_fsdp.parallel.mesh import SHARD, build_mesh
from lit_fsdp.parallel.precision import TORCH_DTYPES, DtypeContract
from lit_fsdp.parallel.prepare import prepare, recompute_by_unit
from lit_fsdp.parallel.rank_log import RankLog, whole_shapes
from lit_fsdp.parallel.refusals import refuse_callbacks
from lit_fsdp.parallel.saving import ShardedCheckpoints, Storage
from lit_fsdp.parallel.stepping import StepGuard, build_guard
from lit_fsdp.parallel.units import UnitPlan, audit, tied_names

_PATH = "trainer.strategy.init_args"


class ShardedStrategy(ShardedCheckpoints, ContactWithRanks):
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
        self._plugin.guard = build_guard(config)
        self._root: nn.Module | None = None
        self._kept_memory = KeptMemory()
        self._owner: Any = None
        self._broadcast_done: dict[Any, Any] = {}
        self._ties: dict[str, str] = {}
        self._rng_after_load: dict[str, Any] | None = None
        self._rng_before_window: dict[str, Any] | None = None
        self.plan: UnitPlan | None = None
        self.audit: dict[str, Any] = {}
        self.fp32_units: set[str] = set()
        row = config.precision_config.row
        gathered = row.compute if config.is_sharded else row.param  # autocast leaves parameters as they are
        self.contract = DtypeContract(row, config.precision_config.mode, gathered)
        self.checkpoint_files: dict[str, Path] = {}
        self.rank_log: RankLog | None = None
        super().__init__(  # type: ignore[call-arg]
            process_group_backend=config.process_group_backend, timeout=timedelta(seconds=config.timeout_seconds)
        )

    @property
    def loss_divisor(self) -> float:
        """What a module that runs backward on sums divides by beforehand, so that nothing overflows in fp16."""
        return 1024.0 if self._plugin.guard.loss_scale is not None else 1.0

    @property
    def guard(self) -> StepGuard:
        """Counts skipped steps and, for fp16, holds the loss scale."""
        return self._plugin.guard

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
        if fitting:
            self.check_hyperparameters(trainer)
        if self._owner is not self.lightning_module:
            self._setup_module(self.lightning_module)
        self.model = self._root
        self.barrier()  # type: ignore[attr-defined]
        self.contract.check_parameters(self.lightning_module.named_parameters(), "after set-up")
        self.contract.check_buffers(self.lightning_module.named_buffers(), self.config.precision_config.buffer_dtype)
        if fitting:
            self.setup_optimizers(trainer)  # type: ignore[attr-defined]
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def _setup_module(self, module: Any) -> None:
        if units_already_wrapped(module) and not self.config.wrap_config.manual:
            raise ConfigError(
                "wrap",
                "a model that is already wrapped",
                "a model without FSDP units, or wrap: manual",
                "remove wrap() or fully_shard() from the LightningModule, or set wrap: manual",
            )
        others = engines_already_there(module) - {self.config.engine}
        if others:
            raise ConfigError("wrap", f"manual with units of {', '.join(others)}", self.config.engine, "change engine")
        plan = prepare(module, self.config, _PATH)
        self.fp32_units = {unit.name for unit in plan.units if unit.keeps_fp32}
        self._ties = tied_names(module)
        reader: Reader = getattr(module, "read_tensor", None) or reset_parameters_reader(torch.initial_seed())
        recompute = recompute_by_unit(plan)
        materializer = Materializer(module, reader, self._rest_device())
        if not self.config.cpu_ram_efficient_loading:
            for child in list(module.modules()):
                materializer.fill(child)
        shapes = {} if self.config.wrap_config.manual else whole_shapes(module)
        self._root = self._shard(module, plan, materializer)
        self._broadcast_done.clear()
        self._to_device(module)
        if self.config.precision_config.buffer_dtype is not None:
            cast_buffers(module, TORCH_DTYPES[self.config.precision_config.buffer_dtype])
        self.plan, self._owner = plan, module
        shards = self.mesh.size(self.mesh.ndim - 1)
        self.audit = {
            **audit(plan, shards, recompute),
            "engine": self.config.engine,
            "sharding": self.config.sharding,
            "replicate_degree": self.world_size // shards,
            "replaced": self.config.replaced,
        }
        self._check_units()
        if self.config.verbose:
            self.rank_log = RankLog(Path(module.trainer.default_root_dir), self.mesh, self.root_device)
            self.rank_log.set_up(module, shapes, self.realised_units())
        if self.contract.watching:
            self.contract.watch(plan.modules, self.fp32_units)

    def _rest_device(self) -> torch.device:
        """Where sharded parameters live between steps."""
        return torch.device("cpu") if self.config.offloads else self.root_device

    def _to_device(self, module: nn.Module) -> None:
        """Move what is there already; offloaded shards stay on the host."""
        if self.config.offloads:
            for child in module.modules():
                for name, buffer in child._buffers.items():
                    child._buffers[name] = None if buffer is None else buffer.to(self.root_device)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            module.to(self.root_device)

    def _broadcast(self, module: nn.Module) -> None:
        """Move what is already loaded to the device and make it rank 0's, one unit at a time."""
        inside = set()
        if self.config.wrap_config.manual:  # FSDP1's parameters there are this rank's shards
            inside = {inner for unit in read_live_units(module, _PATH).modules.values() for inner in unit.modules()}
        for child in module.modules():
            for tensors in (child._parameters, child._buffers) if child not in inside else ():
                for name, tensor in tensors.items():
                    if tensor is None or tensor.is_meta or isinstance(tensor, DTensor):
                        continue
                    tensor.data = tensor.data.to(self.root_device)
                    if self.config.sync_module_states and (id(tensor), name) not in self._broadcast_done:
                        dist.broadcast(tensor.data, src=0)
                        self._broadcast_done[(id(tensor), name)] = tensor

    def _check_units(self) -> None:
        """Compare the units of the live model, and what this rank holds of it, with the plan."""
        assert self.plan is not None
        found, planned = set(self.realised_units()), {unit.name for unit in self.plan.units}
        if self.config.is_sharded and found != planned:
            raise ContractError(f"FSDP units differ from the plan: {sorted(found ^ planned)}")
        local = sum(_local_numel(p) for p in self.lightning_module.parameters())
        ranks = self.mesh.size(self.mesh.ndim - 1)
        self.audit["num_params_on_this_rank"] = local
        if ranks > 1 and self.plan.num_params and local >= self.plan.num_params:
            raise ContractError(f"not sharded: this rank holds {local:,} of {self.plan.num_params:,} parameters")

    def _configure_launcher(self) -> None:
        """Check what only the Trainer knows before its launcher starts further processes, and not in each of them."""
        super()._configure_launcher()  # type: ignore[misc]
        launcher: Any = self._launcher
        if launcher is None:
            return
        launch = launcher.launch

        @functools.wraps(launch)
        def launch_checked(function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            self._check_environment(trainer)
            self.choose_port()
            return launch(function, *args, trainer=trainer, **kwargs)

        launcher.launch = launch_checked

    def _check_environment(self, trainer: Any = None) -> None:
        mesh_shape(self.config, self.num_nodes, self.num_nodes * self.num_processes, _PATH)
        check_device(self.config, self.root_device.type, _PATH)
        if self.config.is_sharded:
            refuse_callbacks((trainer or self.lightning_module.trainer).callbacks, self.config.engine)

    num_processes: int
    _launcher: Any

    def _build_mesh(self) -> None:
        replicas, shards = mesh_shape(self.config, self.num_nodes, self.world_size)
        timeout = timedelta(seconds=self.config.timeout_seconds)
        self.mesh = build_mesh(self.root_device.type, replicas, shards, timeout)
        self._plugin.shard_group = self.mesh.get_group(SHARD) if shards > 1 else None
        self._plugin.has_copies, self._plugin.comm_device = replicas > 1, self.root_device

    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        raise AssertionError("each engine has its own")  # pragma: no cover

    def realised_units(self) -> list[str]:
        """Names of the modules that really are FSDP units, the root as ``""``."""
        raise AssertionError("each engine has its own")  # pragma: no cover

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around all micro-batches of a global batch but the last.

        By default gradients are reduced in each of them: holding them back keeps whole gradients in memory.
        """
        if self.config.sync_each_micro_batch:
            yield
        else:
            with self._no_sync():
                yield

    def _no_sync(self) -> AbstractContextManager[Any]:
        raise AssertionError("each engine has its own")  # pragma: no cover

    def on_exception(self, exception: BaseException) -> None:
        """Name the rank that ended the run, unless somebody asked for the end."""
        if isinstance(exception, Exception) and not hasattr(exception, "exit_code"):
            if self.rank_log is not None:
                self.rank_log.failed(exception)
            self.explain(exception)
        super().on_exception(exception)

    # -- the contract in the first step

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward pass; until the first optimizer step the dtypes of reductions are recorded."""
        with self.contract.watch_reductions():
            return super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Optimizer step; after the first one the dtypes of gradients and moments are compared."""
        result = super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        self._rng_before_window = None
        if self.root_device.type == "cpu":
            self._kept_memory.stepped()
        if self.contract.watching:
            named = list(self.lightning_module.named_parameters())
            self.contract.check_parameters(named, "after the first step")
            self.contract.check_gradients(named)
            self.contract.check_optimizer(optimizer, {id(p): n for n, p in named})
            self.contract.finish_first_step()
        if self.rank_log is not None:
            self.rank_log.step(self.lightning_module.trainer.global_step + 1, self.lightning_module)
        return result


def _local_numel(param: torch.Tensor) -> int:
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.numel()
