"""What both engines share: set-up in one order, the audit of the live units, the dtype contract.

A mixin in front of a Lightning strategy; it does not import Lightning.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
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
from torch.nn.utils.parametrize import is_parametrized

from lit_fsdp.config.strategy import StrategyConfig, mesh_shape
from lit_fsdp.errors import CheckpointError, ConfigError, ContractError
from lit_fsdp.parallel.casting import cast_buffers, cast_inputs, without_autocast
from lit_fsdp.parallel.contact import ContactWithRanks
from lit_fsdp.parallel.devices import check_device, settle_precision
from lit_fsdp.parallel.kept_memory import KeptMemory
from lit_fsdp.parallel.live_units import engines_already_there, read_live_units, units_already_wrapped
from lit_fsdp.parallel.materialize import Materializer, Reader, reset_parameters_reader
from lit_fsdp.parallel.mesh import SHARD, build_mesh
from lit_fsdp.parallel.precision import TORCH_DTYPES, contract_for, sample_groups, warn_of_standstill
from lit_fsdp.parallel.prepare import plan_for, prepare, recompute_by_unit
from lit_fsdp.parallel.python_words import mute, spoken_to
from lit_fsdp.parallel.rank_log import RankLog, whole_shapes
from lit_fsdp.parallel.redirection import Redirection, redirect_forward, sharded_by
from lit_fsdp.parallel.refusals import refuse_callbacks, refuse_manual_optimization, refuse_root_parameters
from lit_fsdp.parallel.saving import ShardedCheckpoints, Storage
from lit_fsdp.parallel.stepping import StepGuard, build_guard
from lit_fsdp.parallel.units import UnitPlan, audit, owners_by_unit, tied_names

_PATH = "trainer.strategy.init_args"
_log = logging.getLogger(__name__)
_FREE_CHOICES = (
    *("process_group_backend", "timeout_seconds", "state_dict", "verbose"),
    *("nonfinite_gradients", "max_skipped_steps"),
)
"""Arguments in which the strategies of two Trainers that share a module may differ."""


class ShardedStrategy(ShardedCheckpoints, ContactWithRanks):
    """The engine-independent half of a strategy.

    Args:
        config: The factory's checked arguments.
        storage: Where checkpoints are written to and read from.
    """

    precision_class: Callable[[], Any]
    lightning_module: Any
    root_device: torch.device
    in_recipe = False
    """Whether the arguments come from a recipe, by whose paths errors name them."""
    num_nodes: int
    world_size: int
    global_rank: int
    _forward_redirection: Any

    def __init__(self, config: StrategyConfig, storage: Storage) -> None:
        self.config, self._storage = config, storage
        self._plugin = self.precision_class()
        self._plugin.guard = build_guard(config)
        self._plugin.after_backward, self._plugin.before_step = self.after_backward, self._reshard
        self._plugin.around_backward = self._averaging_alone
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
        self.contract = contract_for(config)
        self.checkpoint_files: dict[str, Path] = {}
        self.rank_log: RankLog | None = None
        self.replicated: list[nn.Parameter] = []
        self._names: dict[int, str] = {}
        self._used: set[str] = set()
        self._noted: dict[int, torch.Tensor] = {}
        super().__init__(  # type: ignore[call-arg]
            process_group_backend=config.process_group_backend, timeout=timedelta(seconds=config.timeout_seconds)
        )
        self._forward_redirection = Redirection()

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
                "Trainer(precision=...)",
                plugin.precision,
                "nothing: precision is the strategy's (mixed, low_precision, fp32)",
                "drop it and write fsdp_strategy(precision='mixed')",
            )

    def setup_environment(self) -> None:
        """Start the process group (of one for ``single``), settle ``precision: auto``, and build the mesh."""
        self._check_environment()
        with self.meeting_others():
            super().setup_environment()  # type: ignore[misc]
        if self.plan is None:
            on_all: Callable[[bool], bool] = self.reduce_boolean_decision  # type: ignore[attr-defined]
            self.config = settle_precision(self.config, self.root_device.type, on_all)
            self.contract = contract_for(self.config)
        self._build_mesh()

    def setup(self, trainer: Any) -> None:
        """Shard the LightningModule (once), check the contract, build the optimizers."""
        self.accelerator.setup(trainer)  # type: ignore[attr-defined]
        fitting = trainer.state.fn == "fit"
        if fitting:
            self.check_hyperparameters(trainer)
        if self._owner is not self.lightning_module:
            before = sharded_by(self.lightning_module)
            with spoken_to(self.in_recipe):
                self._setup_module(self.lightning_module) if before is None else self._take_over(before)
        self._reshard()
        self.model = self._root
        self.barrier()  # type: ignore[attr-defined]
        self.contract.check_parameters(self.lightning_module.named_parameters(), "after set-up")
        self.contract.check_buffers(self.lightning_module.named_buffers(), self.config.precision_config.buffer_dtype)
        if fitting:
            self.setup_optimizers(trainer)  # type: ignore[attr-defined]
            named = self.lightning_module.named_parameters()
            self._names = {id(p): name.replace("_fsdp_wrapped_module.", "") for name, p in named}
            self._check_optimized()
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
        if self.config.engine == "fsdp2" and not module.automatic_optimization:
            refuse_root_parameters(owners_by_unit(module, plan).get(module, []), type(module).__name__)
        self.fp32_units = {unit.name for unit in plan.units if unit.keeps_fp32}
        self._ties = tied_names(module)
        reader: Reader = getattr(module, "read_tensor", None) or reset_parameters_reader(torch.initial_seed())
        recompute = recompute_by_unit(plan)
        materializer = Materializer(module, reader, self._rest_device())
        if not self.config.cpu_ram_efficient_loading:
            for child in list(module.modules()):
                materializer.fill(child)
        shapes = {} if self.config.wrap_config.manual else whole_shapes(module)
        most = sum(_most_numel(p, self.mesh.size(self.mesh.ndim - 1)) for p in module.parameters())
        # What no engine reduces: torch splits dim 0, which these have not, and DDP passes over what is frozen by now.
        if not self.config.wrap_config.manual:
            params = module.parameters()
            self.replicated = [p for p in params if (not p.dim() if self.config.is_sharded else not p.requires_grad)]
        self._root = self._shard(module, plan, materializer)
        if self.config.is_sharded:
            redirect_forward(self, self._root, module)
            for unit, owners in owners_by_unit(module, plan).items():
                self._note_use(unit, owners)
        if not hasattr(module, "read_tensor"):  # ours is given token ids
            self._cast_for_layers(module, plan)
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
        self._check_units(most)
        if self.config.is_sharded and len(plan.units) == 1 and dist.get_rank() == 0:
            _log.warning("the whole model is one FSDP unit (by %s): every rank gathers all of it at once", plan.source)
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
            for param in self.replicated:
                param.data = param.data.to(self.root_device)
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

    def _cast_for_layers(self, module: nn.Module, plan: UnitPlan) -> None:
        """Cast what is given to layers that no engine casts for: those in the root, and all under low_precision.

        Not at the root itself: that is the LightningModule, whose input is the batch with its targets and counts. What
        it computes with weights of its own runs under autocast, as in Lightning's ``bf16-mixed``; units do not.
        """
        row, units = self.config.precision_config.row, plan.modules.values()
        if row.compute == "fp32" or (row.compute != row.param and not self.config.is_sharded):
            return
        inside = {inner for unit in units for inner in unit.modules()} if row.compute != row.param else set()
        for child in module.modules():
            own = any(p is not None and p.dim() for p in child._parameters.values())
            if child is not module and child not in inside and (own or is_parametrized(child)):
                cast_inputs(child, TORCH_DTYPES[row.compute])
        if row.compute != row.param:
            self._plugin.autocast = (self.root_device.type, TORCH_DTYPES[row.compute])
            for unit in units:
                without_autocast(unit, self.root_device.type)

    def _take_over(self, before: ShardedStrategy) -> None:
        """Go on with a module that the strategy of another Trainer has sharded, which nothing can undo.

        Raises:
            ConfigError: That strategy had other arguments, or other ranks.
        """
        theirs = dataclasses.replace(before.config, **{name: getattr(self.config, name) for name in _FREE_CHOICES})
        if (theirs, before.world_size) != (self.config, self.world_size):
            fields = (field.name for field in dataclasses.fields(theirs))
            name = next((n for n in fields if getattr(theirs, n) != getattr(self.config, n)), "shard_degree")
            raise ConfigError(
                f"{_PATH}.{name}",
                f"{getattr(self.config, name)} for a module that another Trainer has sharded otherwise",
                f"{getattr(theirs, name)}, on {before.world_size} ranks",
                "make a new module; lit_fsdp.load_weights(module, path) brings a checkpoint into it",
            )
        names = ("plan", "audit", "fp32_units", "mesh", "replicated", "_root", "_ties")
        for name in (*names, "_forward_redirection", "_used", "_noted"):  # the last three are known to hooks
            setattr(self, name, getattr(before, name))
        self._plugin.autocast = getattr(before._plugin, "autocast", None)
        self._owner = self.lightning_module

    def _reshard(self) -> None:
        """Free what is still gathered: optimizers are made of shards, and copies would not see what these move."""

    def _check_optimized(self) -> None:
        """Compare the tensors that the optimizers move with the parameters of the sharded model.

        Raises:
            ContractError: One is none of them, so that training would change nothing.
        """
        for index, optimizer in enumerate(self.optimizers):
            for param in (p for group in optimizer.param_groups for p in group["params"]):
                if self.config.is_sharded and id(param) not in self._names:
                    raise ContractError(
                        f"optimizer {index} moves a tensor of shape {tuple(param.shape)} that is no parameter of the "
                        "sharded model\n"
                        "  fix:     make the optimizer in configure_optimizers, of self.parameters()"
                    )

    def _note_use(self, unit: nn.Module, owners: list[tuple[str, nn.Module]]) -> None:
        """From now on, note which parameters of a unit, by full name, take part in a backward pass.

        Args:
            unit: Gathered when its forward begins.
            owners: The modules, by name, whose parameters it gathers.
        """

        def hook(module: nn.Module, args: Any) -> None:  # fsdp2 keeps the gathered tensors, fsdp1 makes new ones
            for name, attribute, param in ((n, a, p) for n, owner in owners for a, p in owner._parameters.items()):
                if param is None or not param.requires_grad or isinstance(param, DTensor):
                    continue
                note = functools.partial(_add, self._used, f"{name}.{attribute}" if name else attribute)
                if not param.is_leaf:
                    param.register_hook(note)
                elif self._noted.get(id(param)) is not param:
                    self._noted[id(param)] = param
                    param.register_post_accumulate_grad_hook(note)

        getattr(unit, "_fsdp_wrapped_module", unit).register_forward_pre_hook(hook)

    def after_backward(self, optimizer: Any) -> None:
        """Drop the zeros that engines put where no rank has a gradient; collective.

        Plain training has no gradient there, and its optimizer passes such a parameter over instead of decaying it.
        """
        if not self.config.is_sharded:
            return
        params = [p for group in optimizer.param_groups for p in group["params"]]
        names = [self._names.get(id(p), "") for p in params]
        has_grad = [n in self._used or _is_nonzero(p.grad) for n, p in zip(names, params, strict=True)]
        for param, is_used in zip(params, self._on_any_rank(has_grad), strict=True):
            if not is_used:
                param.grad = None
        self._used.difference_update(names)

    def _on_any_rank(self, flags: list[bool]) -> list[bool]:
        found = torch.tensor(flags, dtype=torch.uint8, device=self.root_device)
        if self.world_size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.bool().tolist()

    @contextmanager
    def _averaging_alone(self) -> Iterator[None]:
        """Around a backward pass: average the gradients that no engine reduces; collective."""
        alone = [p for p in self.replicated if p.requires_grad] if self.world_size > 1 else []
        before = [p.grad for p in alone]
        for param in alone:
            param.grad = None
        yield
        has_grad = self._on_any_rank([p.grad is not None for p in alone]) if alone else []
        for param, old, has in zip(alone, before, has_grad, strict=True):
            if has:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(grad.div_(self.world_size))
                param.grad = grad if old is None else old + grad
            else:
                param.grad = old

    def _sync_buffers(self) -> None:
        """Make the floating-point buffers that a checkpoint holds those of rank 0, as DDP does; collective.

        Running statistics differ between ranks, which each see their own rows.
        """
        for child in self.lightning_module.modules() if self.world_size > 1 else ():
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_floating_point() and name not in child._non_persistent_buffers_set:
                    dist.broadcast(buffer, src=0)

    def on_validation_start(self) -> None:
        """Validate the model that a checkpoint would hold."""
        self._sync_buffers()

    def on_test_start(self) -> None:
        """As :meth:`on_validation_start`."""
        self._sync_buffers()

    def on_predict_start(self) -> None:
        """As :meth:`on_validation_start`."""
        self._sync_buffers()

    def _check_units(self, most: int) -> None:
        """Compare the units of the live model, and what this rank holds of it, with the plan."""
        assert self.plan is not None
        found, planned = set(self.realised_units()), {unit.name for unit in self.plan.units}
        if self.config.is_sharded and found != planned:
            raise ContractError(f"FSDP units differ from the plan: {sorted(found ^ planned)}")
        local = sum(_local_numel(p) for p in self.lightning_module.parameters())
        self.audit["num_params_on_this_rank"] = local
        if most < self.plan.num_params <= local:  # one row cannot be split
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
            module = self.lightning_module
            if any(True for _ in module.parameters()) and sharded_by(module) is None:
                with spoken_to(self.in_recipe):
                    plan_for(module, self.config, _PATH)
            self.choose_port()
            return launch(function, *args, trainer=trainer, **kwargs)

        launcher.launch = launch_checked

    def _check_environment(self, trainer: Any = None) -> None:
        with spoken_to(self.in_recipe):
            mesh_shape(self.config, self.num_nodes, self.num_nodes * self.num_processes, _PATH)
            check_device(self.config, self.root_device.type, _PATH)
            trainer = trainer or self.lightning_module.trainer
            if self.config.is_sharded:
                refuse_callbacks(trainer.callbacks, self.config.engine)
            if self.config.is_sharded and trainer.state.fn == "fit":
                refuse_manual_optimization(self.lightning_module, self.config.engine, _PATH)

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
        if isinstance(exception, (ConfigError, CheckpointError)) and dist.is_initialized() and dist.get_rank():
            mute(exception)  # every rank raises it
        elif isinstance(exception, Exception) and not hasattr(exception, "exit_code"):
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
        samples = sample_groups(optimizer) if self.contract.watching else []
        result = super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        self._rng_before_window = None
        if self.root_device.type == "cpu":
            self._kept_memory.stepped()
        if self.contract.watching:
            named = list(self.lightning_module.named_parameters())
            self.contract.check_parameters(named, "after the first step")
            self.contract.check_gradients(named)
            self.contract.check_optimizer(optimizer, {id(p): n for n, p in named})
            if self._plugin.stepped:
                warn_of_standstill(optimizer, samples)
            self.contract.finish_first_step()
        if self.rank_log is not None:
            self.rank_log.step(self.lightning_module.trainer.global_step + 1, self.lightning_module)
        return result


def _is_nonzero(grad: torch.Tensor | None) -> bool:
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local is not None and bool(local.any())


def _add(names: set[str], name: str, _: torch.Tensor) -> None:
    names.add(name)


def _most_numel(param: torch.Tensor, shards: int) -> int:
    """Elements on the rank that holds most of a tensor whose dim 0 is split, rounded up."""
    if isinstance(param, DTensor) or not param.dim():
        return _local_numel(param)
    return param[:1].numel() * -(-param.shape[0] // shards)


def _local_numel(param: torch.Tensor) -> int:
    local = param.to_local() if isinstance(param, DTensor) else param
    return local.numel()
