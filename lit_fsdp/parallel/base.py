"""What all engines share, a mixin in front of a Lightning strategy: set-up, audit, dtype contract, steps."""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader
from torchmetrics import Metric
from transformers import PreTrainedModel

from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.config.strategy import (
    OTHER_OPTIMIZER,
    StrategyConfig,
    check_accumulation,
    check_optimizer,
    check_quantized,
    mesh_shape,
)
from lit_fsdp.data.batches import Resumable
from lit_fsdp.errors import ConfigError, ContractError, require
from lit_fsdp.host import FIRST, end_with_first, threads_of_rank
from lit_fsdp.metrics.hardware import is_accelerator, to_device
from lit_fsdp.models.attention import by_sample
from lit_fsdp.models.parts import RowParts, context_method
from lit_fsdp.parallel.activation import prepare_blocks, recompute_by_unit, resolve_gradient_checkpointing
from lit_fsdp.parallel.alike import check_alike, ending_together, kinds_of, options_of, tensors_of
from lit_fsdp.parallel.checkpointing import Checkpoints, check_packed_state
from lit_fsdp.parallel.debug import write_rank
from lit_fsdp.parallel.expert_units import build_expert_groups, check_experts, divide_experts
from lit_fsdp.parallel.grads import GuardedSteps
from lit_fsdp.parallel.materialize import Materializer, Reader, reset_parameters_reader
from lit_fsdp.parallel.norms import STRATEGIES, warn_of_lightnings
from lit_fsdp.parallel.precision import (
    TORCH_DTYPES,
    DtypeContract,
    apply_float8,
    cast_inputs,
    cast_outputs,
    cast_parameters,
    check_device,
    dtype_name,
    settle_precision,
)
from lit_fsdp.parallel.schedules import idle_schedulers
from lit_fsdp.parallel.trial import refusal_of
from lit_fsdp.parallel.units import (
    UnitPlan,
    audit,
    clean_name,
    owners_by_unit,
    packed_weights,
    plan_for,
    quantized_layers,
    tied_names,
    units_already_wrapped,
)

REPLICATE, SHARD = "dp_replicate", "dp_shard"
_log = logging.getLogger(__name__)
_QUIET_SECONDS = 15.0
_LOST_CONTACT = re.compile(
    "lost contact|gloo|NCCL|ProcessGroup|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|TCPStore"
)
_FREE_CHOICES = "process_group_backend timeout_seconds state_dict verbose contract nonfinite_gradients".split()
"""Arguments in which the strategies of two Trainers that share a module may differ."""
_WHOLE_WEIGHTS = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning")
"""Callbacks of Lightning that average or sort whole weights, but a rank has only shards."""


def build_mesh(device_type: str, replicate_degree: int, shard_degree: int, timeout: timedelta) -> DeviceMesh:
    """A 1-D ``(dp_shard)`` mesh, or ``(dp_replicate, dp_shard)``; neighboring ranks, of a node, form a shard group."""
    if replicate_degree == 1:
        return init_device_mesh(device_type, (shard_degree,), mesh_dim_names=(SHARD,))
    ranks = torch.arange(replicate_degree * shard_degree).reshape(replicate_degree, shard_degree)
    # made here, as the groups that torch makes wait for its own default timeout
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(along.tolist(), timeout=timeout)[0] for along in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))


def check_finders(callbacks: Iterable[Any], module: Any) -> None:
    """Refuse Lightning's callbacks that look for a batch size, and for the learning rate of a module of ours."""
    found = {cls.__name__ for callback in callbacks for cls in type(callback).__mro__}
    given, fix = "BatchSizeFinder", "drop it; lit-fsdp plan --gpu tells which data.micro_batch_size fits"
    require(given not in found, "trainer.callbacks", given, "a batch size that is given", fix)
    given, fix = "LearningRateFinder", "drop it, and try some values of model.optim.lr in short runs"
    is_ours = hasattr(module, "read_tensor")
    require(not is_ours or given not in found, "trainer.callbacks", given, "a learning rate that is given", fix)


class RedirectedForward:
    """The ``forward`` of a sharded module: through the root, which calls it again for its own forward or for a step."""

    def __init__(self, strategy: EngineStrategy, module: nn.Module) -> None:
        self.strategy, self.forward = strategy, module.forward
        self._method: Callable[..., Any] | None = None
        self._is_inside = False
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._method is not None:
            method, self._method = self._method, None
            return method(*args, **kwargs)
        if self._is_inside:
            return self.forward(*args, **kwargs)
        return self.run(self.forward, *args, **kwargs)

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function of the module between the root's hooks; without a backward pass, free what they gathered."""
        before, self._is_inside, self._method = self._is_inside, True, method
        root: Any = self.strategy._root
        try:
            with self.strategy.precision_plugin.forward_context():
                result = root(*args, **kwargs)
        finally:
            self._is_inside, self._method = before, None
        if not torch.is_grad_enabled():
            self.strategy.reshard()
        return result


class EngineStrategy(Checkpoints):
    """The engine-independent half of a strategy; built by :func:`lit_fsdp.fsdp_strategy`."""

    cluster_environment: Any
    shard_group: dist.ProcessGroup | None  # of the ranks that together hold one copy; None: each holds all of it
    has_copies: bool  # which must decide alike
    in_recipe = False  # where the arguments come from, for the paths in errors
    num_nodes: int
    num_processes: int
    world_size: int
    _launcher: Any
    lr_scheduler_configs: list[Any]
    _layer_sync: Any  # of Trainer(sync_batchnorm=True)

    def __init__(self, config: StrategyConfig) -> None:
        self.config = config
        is_fp16 = config.precision_config.row.compute == "fp16"
        self._plugin = GuardedSteps(config.nonfinite_gradients, is_fp16, self)
        # by what a module that runs backward on sums divides beforehand, so that nothing overflows
        self.loss_divisor = 1024.0 if is_fp16 else 1.0
        self._root = None
        self._owner: Any = None
        self._ties = {}
        self.plan: UnitPlan | None = None
        self.audit: dict[str, Any] = {}
        self.contract = DtypeContract(config)
        self.checkpoint_files: dict[str, bytes] = {}
        self.replicated: list[nn.Parameter] = []
        self._names: dict[int, str] = {}
        self._used: set[str] = set()
        self._noted: dict[int, torch.Tensor] = {}
        self._host_group: Any = None
        self.context: RowParts | None = None  # of the ranks that hold parts of the same rows
        self.expert_group: dist.ProcessGroup | None = None  # of the ranks that divide experts
        self.expert_mesh: DeviceMesh | None = None  # of the ranks that hold the same experts
        STRATEGIES.add(self)
        super().__init__(  # type: ignore[call-arg]
            process_group_backend=config.process_group_backend, timeout=timedelta(seconds=config.timeout_seconds)
        )
        if config.is_sharded:
            self._forward_redirection: Any = self._step_inside

    @abstractmethod
    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        """Wrap the module, filled by then; the root that is called in every step."""

    def reshard(self) -> None:
        """Free what is still gathered: optimizers are made of shards, and copies would not see what these move."""

    @abstractmethod
    def _no_sync(self) -> AbstractContextManager[Any]:
        """A context in which a backward pass reduces nothing."""

    def _start_process_group(self) -> None:
        super().setup_environment()  # type: ignore[misc]

    @property
    def path(self) -> str:
        """Where the arguments stand, for errors."""
        return "trainer.strategy.init_args" if self.in_recipe else "fsdp_strategy"

    @property
    def precision_plugin(self) -> Any:
        """The plugin that clips; dtypes are the strategy's alone."""
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        given = "32-true" if plugin is None else plugin.precision
        require(given == "32-true", "Trainer(precision=...)", given, "nothing beside fsdp_strategy(precision=...)")

    def check_environment(self, trainer: Any, module: Any, verb: str) -> None:
        """Refuse what goes wrong on these ranks and devices, or with this Trainer; needs no process group."""
        config = self.config
        mesh_shape(config, self.num_nodes, self.num_nodes * self.num_processes, self.path)
        check_device(config, self.root_device.type, self.path)
        check_finders(trainer.callbacks, module)
        for callback in trainer.callbacks if config.is_sharded else ():
            name = next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in _WHOLE_WEIGHTS), "")
            given, allowed = f"{name} with engine {config.engine}", "what does without whole weights, or ddp or single"
            ours = "{class_path: lit_fsdp.EMAWeights, init_args: {decay: 0.999}}, in Python lit_fsdp.EMAWeights(0.999)"
            require(not name, "trainer.callbacks", given, allowed, f"in a recipe {ours}" if "Averaging" in name else "")
        for callback in trainer.callbacks if verb == "fit" and trainer.max_steps > 0 else ():
            given = f"{type(callback).__name__}, whose first update comes after the last of {trainer.max_steps} steps"
            fix = "let it begin earlier: until then it gives the weights that training began with, and to the end here"
            require(_ever_averages(callback, trainer), "trainer.callbacks", given, "averages of what is trained", fix)
        if config.context_config.degree > 1:
            self._check_context(module)
        if config.expert_parallel > 1 and (model := self._transformer(module)) is not None:
            self._check_experts(model)
        if verb == "fit":
            self._check_accumulation(trainer)
        # the root counts on one backward pass, after which the step comes
        wrong = config.engine == "fsdp1" and verb == "fit" and not module.automatic_optimization
        given = f"fsdp1 with manual optimization ({type(module).__name__})"
        require(not wrong, f"{self.path}.engine", given, "fsdp2 | ddp | single")

    def _check_context(self, module: Any) -> str:
        """How attention meets; refuses a module that would compute all of a row on every rank."""
        path = f"{self.path}.context_parallel"
        given = f"above 1 for {type(module).__name__}"
        allowed = "1, or a module that cuts its batches by strategy.context"
        fix = "call strategy.context.inputs in its steps, and say so: cuts_rows = True; see docs/own-module.md"
        require(getattr(module, "cuts_rows", False), path, given, allowed, fix)
        if (model := self._transformer(module)) is None:
            return "ulysses" if (method := self.config.context_config.method) == "auto" else method
        by_sample(model, True)
        return context_method(model, self.config.context_config, path)

    @staticmethod
    def _transformer(module: Any) -> Any:
        """The model of transformers in a LightningModule; None if it comes in ``configure_model``."""
        models = (m for m in module.modules() if isinstance(m, PreTrainedModel))
        return module.build().model if hasattr(module, "build") else next(models, None)

    def _check_experts(self, model: nn.Module) -> None:
        shards = mesh_shape(self.config, self.num_nodes, self.num_nodes * self.num_processes)[1]
        check_experts(model, self.config.expert_parallel, shards, f"{self.path}.expert_parallel")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How Lightning deals rows out: ranks of a context group get the same."""
        given, degree = super().distributed_sampler_kwargs, self.config.context_config.degree  # type: ignore[misc]
        return {name: value // degree for name, value in given.items()}

    def _check_accumulation(self, trainer: Any) -> None:
        schedules = (c.scheduling.values() for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler))
        steps = max(trainer.accumulate_grad_batches, *(n for counts in schedules for n in counts), 1)
        check_accumulation(self.config, steps, self.path, "larger batches without accumulate_grad_batches")

    def _configure_launcher(self) -> None:
        """Let Lightning's launcher start further processes once this one has found nothing to refuse."""
        super()._configure_launcher()  # type: ignore[misc]
        end_with_first(self._is_running)
        if self._launcher is None:
            return
        launch = self._launcher.launch

        def launch_checked(function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            self.check_environment(trainer, self.lightning_module, trainer.state.fn)
            if not self.cluster_environment.creates_processes_externally:
                os.environ[FIRST] = str(os.getpid())
            return launch(function, *args, trainer=trainer, **kwargs)

        self._launcher.launch = launch_checked

    def _is_running(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    def setup_environment(self) -> None:
        """Start the process group (of one for ``single``), settle ``precision: auto``, and build the mesh."""
        trainer = self.lightning_module.trainer
        self.check_environment(trainer, self.lightning_module, trainer.state.fn)
        seconds, environment = self.config.timeout_seconds, self.cluster_environment
        text = f"{socket.gethostname()} still waits for all {self.num_nodes * self.num_processes} ranks to meet at "
        text += f"{environment.main_address}:{environment.main_port}, at most {seconds:.0f} s"
        timer = threading.Timer(_QUIET_SECONDS, _log.warning, (text,))
        timer.daemon = True
        timer.start()
        try:
            self._start_process_group()
        finally:
            timer.cancel()
        if threads := threads_of_rank(self.num_processes, self.config.offloads):
            torch.set_num_threads(threads)
        if self.plan is None:
            on_all: Callable[[bool], bool] = self.reduce_boolean_decision  # type: ignore[attr-defined]
            self.config = settle_precision(self.config, self.root_device.type, on_all)
            self.contract = DtypeContract(self.config)
        replicas, shards = mesh_shape(self.config, self.num_nodes, self.world_size)
        self.mesh = build_mesh(self.root_device.type, replicas, shards, timedelta(seconds=seconds))
        if (degree := self.config.context_config.degree) > 1:
            options: Any = {"timeout": timedelta(seconds=seconds)}
            along = torch.arange(self.world_size).view(-1, degree).tolist()
            group: Any = dist.new_subgroups_by_enumeration(along, **options)[0]
            self.context = RowParts(group, self._check_context(self.lightning_module))
        if (degree := self.config.expert_parallel) > 1:
            of_experts = build_expert_groups(
                self.root_device.type, replicas, shards, degree, timedelta(seconds=seconds)
            )
            self.expert_group, self.expert_mesh = of_experts
        self.shard_group, self.has_copies = self.mesh.get_group(SHARD) if shards > 1 else None, replicas > 1

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; a module of ours counts its targets before, while nothing waits for that."""
        counted = getattr(self.lightning_module, "counted", None)
        if counted is not None and is_accelerator(self.root_device):
            batch = counted(batch)
        return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]

    def process_dataloader(self, dataloader: object) -> object:
        """Give each loader a generator of its own; they would draw from the global one, which a resume goes on with."""
        if isinstance(dataloader, DataLoader) and dataloader.generator is None:
            dataloader.generator = torch.Generator().manual_seed(torch.initial_seed())
        loader = super().process_dataloader(dataloader)  # type: ignore[misc]
        trainer = self.lightning_module.trainer
        apart = not (self.config.is_sharded or trainer.training)  # copies that evaluate do not wait for each other
        if self.world_size == 1 or apart or isinstance(loader, Resumable):  # as ours, which are alike
            return loader
        is_endless = sized_len(loader) is None
        field = f"{trainer.state.stage.dataloader_prefix}_dataloader"
        check_alike("looking for lengths", {field: "no length" if is_endless else "a length"})
        if is_endless and self._host_group is None and is_accelerator(self.root_device):
            self._host_group = self.meet_on_hosts()
        device = self.root_device if self._host_group is None else torch.device("cpu")
        return ending_together(loader, self._host_group, device) if is_endless else loader

    def setup(self, trainer: Any) -> None:
        """Shard the LightningModule (once), check the contract, build the optimizers."""
        self.accelerator.setup(trainer)  # type: ignore[attr-defined]
        module = self.lightning_module
        if trainer.state.fn == "fit":
            self._check_accumulation(trainer)  # which a data module may have settled
            self._check_hyperparameters()
            if self.config.is_sharded and dist.get_rank() == 0:
                warn_of_lightnings([module, *trainer.callbacks])
        if self._owner is not module:
            is_ours = hasattr(module, "read_tensor")
            self.contract.is_error = (self.config.contract or ("error" if is_ours else "warn")) == "error"
            if isinstance(module.forward, RedirectedForward):
                self._take_over(module.forward)
            else:
                self._setup_module(module, is_ours)
            self._owner = module
        self._to_device(module)
        self.reshard()
        self.model = self._root
        self.barrier()  # type: ignore[attr-defined]
        self._check_parameters("after set-up")
        self.contract.check("buffers", module.named_buffers(), self.config.precision_config.buffer_dtype)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)  # type: ignore[attr-defined]
            self._names = {id(p): clean_name(name) for name, p in module.named_parameters()}
            check_alike("comparing optimizers", kinds_of(self.optimizers, self.lr_scheduler_configs))
            self._check_optimized()
            self.check_files()
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def _setup_module(self, module: Any, is_ours: bool) -> None:
        config, manual = self.config, self.config.wrap_config.manual
        # FSDP1's own units hold this rank's shards
        check_alike("comparing parameters", tensors_of(module, not manual or config.engine != "fsdp1"))
        units = units_already_wrapped(module)
        fits = manual or not units
        require(fits, f"{self.path}.wrap", "a model that is already wrapped", "a plain model, or wrap: manual")
        kinds = FSDPModule if config.engine == "fsdp1" else FullyShardedDataParallel
        alike = not any(isinstance(inner, kinds) for inner in module.modules())
        require(alike, f"{self.path}.wrap", "manual with units of another engine", config.engine)
        inside = {id(p) for unit in units.values() if manual for p in unit.parameters()}
        axes = self.mesh.ndim  # of a unit; under tensor parallelism too it has more
        found = ((n, p) for n, p in module.named_parameters() if isinstance(p, DTensor))
        name = next((n for n, p in found if id(p) not in inside or p.device_mesh.ndim != axes), None)
        given, allowed = f"the DTensor {name}, as of a tp_plan", "plain parameters, which the strategy shards by itself"
        require(name is None, type(module).__name__, given, allowed, "drop tp_plan, parallelize_module or the like")
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
            self._layer_sync = None  # or Lightning would put other layers into a sharded model at the end
        if self.context is not None:
            self._check_context(module)  # whose model may have come in configure_model
        if self.expert_group is not None:
            self._check_experts(module)
            divide_experts(module, self.expert_group, self.mesh.size(self.mesh.ndim - 1))
        plan = self.plan = self._prepare(module)
        self._ties = tied_names(module)
        recompute = recompute_by_unit(plan)
        seed = self.broadcast(torch.initial_seed())  # type: ignore[attr-defined]  # replicas would differ
        reader: Reader = getattr(module, "read_tensor", None) or reset_parameters_reader(seed)
        materializer = Materializer(module, reader, torch.device("cpu") if config.offloads else self.root_device)
        if not config.cpu_ram_efficient_loading:
            materializer.fill_all()
        if not manual:  # torch splits dim 0, which these have not, and DDP passes over what is frozen by now
            params = module.parameters()
            self.replicated = [p for p in params if not (p.dim() if config.is_sharded else p.requires_grad)]
        self._root = self._shard(module, plan, materializer)
        if config.is_sharded:
            module.forward = RedirectedForward(self, module)
            fp32 = {plan.modules[unit.name] for unit in plan.units if unit.keeps_fp32}
            for unit, owners in owners_by_unit(module, plan).items():
                self._watch_unit(unit, owners, "fp32" if unit in fp32 else config.precision_config.row.compute)
        if not is_ours:  # which is given token ids
            self._cast_for_layers(module, plan)
        if chosen := config.precision_config.buffer_dtype:  # as rotary frequencies lose positions in bf16
            for buffer in (buffer for buffer in module.buffers() if buffer.is_floating_point()):
                buffer.data = buffer.data.to(TORCH_DTYPES[chosen])
        shards, packed = self.mesh.size(self.mesh.ndim - 1), packed_weights(module)
        self.audit = {
            **audit(plan, shards, recompute),
            "num_params_on_this_rank": sum(_local(p).numel() * packed.get(id(p), 1) for p in module.parameters()),
            "engine": config.engine,
            "sharding": config.sharding,
            "replicate_degree": self.world_size // shards,
            "context_parallel": config.context_config.degree,
            "expert_parallel": config.expert_parallel,
            "replaced": config.replaced,
        }
        different = units_already_wrapped(module).keys() ^ plan.modules.keys()
        if config.is_sharded and different:
            raise ContractError(f"FSDP units differ from the plan: {sorted(different)}")
        if config.verbose:
            write_rank(Path(module.trainer.default_root_dir) / "debug", module, self._root, self.mesh)

    def _prepare(self, module: Any) -> UnitPlan:
        config, precision = self.config, self.config.precision_config
        compute = TORCH_DTYPES[precision.row.compute]
        if not config.wrap_config.manual:  # sharded already: the contract compares what is there
            self.contract.frozen = cast_parameters(module, config)
            layers = quantized_layers(module)
            self.contract.packed = {f"{name}.weight": dtype_name(layer.weight.dtype) for name, layer in layers.items()}
            if layers:
                check_quantized(config, self.path)
            for layer in layers.values():
                cast_inputs(layer, compute)  # in which it computes then
        if precision.mode == "fp8":
            apply_float8(module, precision.fp8_skip, f"{self.path}.precision")
        plan = plan_for(module, config, self.path)
        path = f"{self.path}.activation_checkpointing"
        activation = resolve_gradient_checkpointing(module, config.activation_config, path)
        prepare_blocks(plan.blocks, activation, config.compile, path)
        for unit in plan.units:
            if unit.keeps_fp32:
                cast_outputs(plan.modules[unit.name], compute)
        if config.engine == "fsdp2" and not module.automatic_optimization:
            inner = {p for unit in plan.modules.values() for p in unit.parameters()}
            left = (n for n, p in module.named_parameters() if p.requires_grad and p.dim() and p not in inner)
            name = next(left, "")  # the root is gathered once per step, not once per backward pass
            given, allowed = f"False with the parameter {name}", "all in child modules with a forward, or engine ddp"
            require(not name, f"{type(module).__name__}.automatic_optimization", given, allowed)
        return plan

    def _to_device(self, module: nn.Module) -> None:
        """Move what is there, also after a fit, at whose end Lightning moves it back; offloaded shards stay behind."""
        if not self.config.offloads:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                module.to(self.root_device)
            return
        for tensor in [*module.buffers(), *self.replicated]:
            tensor.data = tensor.data.to(self.root_device)
        for child in module.modules():
            if isinstance(child, _DeviceDtypeModuleMixin):
                child._device = self.root_device  # where its steps find their inputs
            elif isinstance(child, Metric):
                child._apply(lambda t: t if isinstance(t, nn.Parameter) else t.to(self.root_device))

    def _broadcast(self, module: nn.Module) -> None:
        """Move what is already loaded to the device and make it rank 0's, one unit at a time."""
        units = units_already_wrapped(module).values() if self.config.wrap_config.manual else ()
        inside = {inner for unit in units for inner in unit.modules()}  # FSDP1's parameters are this rank's shards
        for child in module.modules():
            for tensor in [*child._parameters.values(), *child._buffers.values()] if child not in inside else ():
                if tensor is None or tensor.is_meta or isinstance(tensor, DTensor):
                    continue
                tensor.data = tensor.data.to(self.root_device)
                if self.config.sync_module_states:
                    dist.broadcast(tensor.data, src=0)

    def _cast_for_layers(self, module: nn.Module, plan: UnitPlan) -> None:
        """Cast what is given to layers that no engine casts for, not the batch: in the root, or low_precision."""
        row, units = self.config.precision_config.row, plan.modules.values()
        mixes = row.compute != row.param
        if row.compute == "fp32" or (mixes and not self.config.is_sharded):
            return
        inside = {inner for unit in units for inner in unit.modules()} if mixes else set()
        for child in module.modules():
            own = any(p is not None and p.dim() for p in child._parameters.values())
            if child is not module and child not in inside and (own or is_parametrized(child)):
                cast_inputs(child, TORCH_DTYPES[row.compute])
        if mixes:
            self._plugin.autocast = (self.root_device.type, TORCH_DTYPES[row.compute])
            for unit in units:
                unit.forward = torch.autocast(self.root_device.type, enabled=False)(unit.forward)

    def _take_over(self, entrance: RedirectedForward) -> None:
        """Go on with a module that the strategy of another Trainer has sharded, which nothing can undo."""
        before = entrance.strategy
        ours, theirs = ({**vars(s.config), "number of ranks": s.world_size} for s in (self, before))
        given = {name: value for name, value in ours.items() if value != theirs[name] and name not in _FREE_CHOICES}
        sharded_with = {name: theirs[name] for name in given}
        allowed = f"{sharded_with}, with which another Trainer has sharded this module"
        fix = "make a new module, into which lit_fsdp.load_weights(module, path) brings a checkpoint"
        require(not given, self.path, given, allowed, fix)
        for name in ("plan", "audit", "mesh", "replicated", "_root", "_ties", "_used", "_noted"):  # known to hooks
            setattr(self, name, getattr(before, name))
        self._plugin.autocast, entrance.strategy = before._plugin.autocast, self
        self.contract.frozen, self.contract.packed = before.contract.frozen, before.contract.packed

    def _step_inside(self, root: nn.Module, module: Any, step: str, *args: Any, **kwargs: Any) -> Any:
        """What Lightning calls for each of its steps."""
        return module.forward.run(getattr(module, step), *args, **kwargs)

    def _check_optimized(self) -> None:
        """Refuse an optimizer that fails in step 1, or of tensors that are no parameters: it would train nothing."""
        module, engine, is_split = self.lightning_module, self.config.engine, self.shard_group is not None
        for index, optimizer in enumerate(self.optimizers):
            name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            if is_split:
                check_optimizer(name, engine, f"{self.path}.engine")
            if type(optimizer) is torch.optim.Muon and is_split and dist.get_rank() == 0:
                text = "of shards torch.optim.Muon makes updates that are up to 30 % apart from those of one process; "
                _log.warning("%slit_fsdp.MuonWithAdamW, with use_muon in its groups, takes whole matrices", text)
            if self.config.is_sharded:
                check_packed_state(optimizer, self.config.offloads, self._names)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            strays = [f"a tensor of shape {tuple(p.shape)}" for p in params if id(p) not in self._names]
            if strays and self.config.is_sharded:
                text = f"optimizer {index} moves {strays[0]} that is no parameter of the sharded model: make it in "
                raise ContractError(text + "configure_optimizers, of self.parameters()")
            if not module.automatic_optimization:  # whose author may call other methods than step
                continue
            flat, saves = engine == "fsdp1" and is_split, bool(module.trainer.checkpoint_callbacks)
            why = max(Ranks().run("trying the optimizer", functools.partial(refusal_of, optimizer, flat, saves)))
            given, allowed = f"{name} with {self.path}.engine: {engine}", f"an optimizer that works there ({why})"
            require(not why, "model.optim.class_path", given, allowed, OTHER_OPTIMIZER)

    def _watch_unit(self, unit: nn.Module, owners: list[tuple[str, nn.Module]], dtype: str) -> None:
        """Note which parameters of a unit, those of ``owners``, a backward pass uses, and at first their dtypes."""

        def hook(module: nn.Module, args: Any) -> None:  # fsdp2 keeps the gathered tensors, fsdp1 makes new ones
            named = [(f"{n}.{a}" if n else a, p) for n, owner in owners for a, p in owner._parameters.items()]
            gathered = [(name, p) for name, p in named if p is not None and not isinstance(p, DTensor)]
            if self.contract.watching:
                split = [(name, p) for name, p in gathered if p.dim()]
                self.contract.check_parameters("gathered parameters in the forward", split, dtype)
            for name, param in gathered:
                if not param.requires_grad:
                    continue

                def note(_: torch.Tensor, name: str = name) -> None:
                    self._used.add(name)

                if not param.is_leaf:
                    param.register_hook(note)
                elif self._noted.get(id(param)) is not param:
                    self._noted[id(param)] = param
                    param.register_post_accumulate_grad_hook(note)

        unit.register_forward_pre_hook(hook)

    def used_params(self, optimizer: Any) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """The parameters, None for those of others, and for each 0 where no rank has a gradient; collective."""
        if not self.config.is_sharded:  # engines put zeros there, and the optimizer would decay the parameter
            return [], torch.empty(0, device=self.root_device)
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        # in an order that all ranks share, whatever their optimizers hold
        params = [held.get(key) for key in self._names]
        return params, self._on_any_rank([p is not None and self._has_grad(p) for p in params])

    def have_gradients(self, params: list[torch.Tensor]) -> list[bool]:
        """Which of these parameters would have a gradient in one process; collective."""
        found = self._on_any_rank([p.grad is not None for p in params] + [self._has_grad(p) for p in params])
        return [bool(there and used) for there, used in found.view(2, -1).T.tolist()]

    def _has_grad(self, param: torch.Tensor) -> bool:
        return self._names[id(param)] in self._used or (param.grad is not None and bool(_local(param.grad).any()))

    def _on_any_rank(self, flags: list[bool]) -> torch.Tensor:
        found = to_device(flags, torch.uint8, self.root_device)
        if self.world_size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found

    def _sync_buffers(self) -> None:
        """Make the floating-point buffers of a checkpoint, such as running statistics, those of rank 0."""
        for child in self.lightning_module.modules() if self.world_size > 1 else ():
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_floating_point() and name not in child._non_persistent_buffers_set:
                    dist.broadcast(buffer, src=0)

    def on_train_start(self) -> None:
        """Train or evaluate a model as a checkpoint would hold it, in as many steps on every rank; collective."""
        module, trainer = self.lightning_module, self.lightning_module.trainer
        numbers = {"train": "num_training_batches", "test": "num_test_batches", "predict": "num_predict_batches"}
        of = numbers.get(trainer.state.stage.value, "num_val_batches")
        if trainer.training:
            options = options_of(self.optimizers, self.lr_scheduler_configs)
            check_alike("comparing the ranks", tensors_of(module, is_whole=False) | options)
        # ranks with more batches than others would wait for these for good
        if self.config.is_sharded or trainer.training:
            found = Ranks().run("counting batches", lambda: getattr(trainer, of))
            allowed = "as many on every rank, by a sampler of your own (use_distributed_sampler=False)"
            allowed += "" if trainer.training else "; or engine ddp"
            require(found.count(found[0]) == len(found), f"trainer.{of}", " and ".join(map(str, found)), allowed)
        self._sync_buffers()
        for text in idle_schedulers(trainer, self.lr_scheduler_configs) if trainer.training else ():
            if dist.get_rank() == 0:
                _log.warning("%s", text)
        if of == "num_training_batches":
            self.check_state()

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_end(self) -> None:
        """Say where averages of Lightning are still the weights that training began with."""
        for callback in self.lightning_module.trainer.callbacks:
            average = getattr(callback, "_average_model", None)
            if average is not None and not average.n_averaged:
                text = (
                    "%s has averaged nothing yet: the model has the weights that training began with, and so have its "
                )
                text += "checkpoints, where those of the last step are current_model_state"
                _log.warning(text, type(callback).__name__)

    def average_alone(self) -> None:
        """Average the gradients that no engine reduces, after a backward pass added to equal ones; collective."""
        alone = [p for p in self.replicated if p.requires_grad] if self.world_size > 1 else []
        has_grad = self._on_any_rank([p.grad is not None for p in alone]).tolist() if alone else []
        for param, has in zip(alone, has_grad, strict=True):
            if has:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad.div_(self.world_size))

    def block_backward_sync(self) -> Any:
        """Around all micro-batches of a global batch but the last."""
        self._check_accumulation(self.lightning_module.trainer)  # which a callback may have changed
        return nullcontext() if self.config.sync_each_micro_batch else self._no_sync()

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward pass; until the first optimizer step the dtypes of reductions are recorded."""
        with self.contract.watch_reductions():
            return super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Optimizer step; after the first one the dtypes of gradients and moments are compared."""
        result = super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        self._rng_before_window = None
        if self.config.is_sharded:
            held = (self._names[id(p)] for group in optimizer.param_groups for p in group["params"])
            self._used.difference_update(held)
        if self.contract.watching:
            named = self.lightning_module.named_parameters()
            grads = [(name, param.grad) for name, param in named if param.grad is not None]
            self.contract.check("gradients", grads, self.contract.row.param)
            self._check_parameters("after the first step", [optimizer])
            self.contract.watching = False
        return result

    def on_exception(self, exception: BaseException) -> None:
        """Note on which rank it was raised and whether others were lost, which decides the exit code."""
        is_failure = isinstance(exception, Exception) and not isinstance(exception, ConfigError)
        if is_failure and not hasattr(exception, "exit_code") and dist.is_initialized() and dist.get_world_size() > 1:
            where = f"rank {dist.get_rank()} ({socket.gethostname()})"
            is_lost = _LOST_CONTACT.search(f"{type(exception).__name__}: {exception}")
            lost = f"{where} lost contact: another rank failed, was killed, hangs or is cut off; see its own log"
            exception.add_note(lost if is_lost else f"this was raised on {where}")
        super().on_exception(exception)  # type: ignore[misc]


def _ever_averages(callback: Any, trainer: Any) -> bool:
    """Whether an average of Lightning is updated within ``max_steps``; True for other callbacks."""
    steps, should = trainer.max_steps, getattr(callback, "should_update", None)
    epochs = steps if trainer.max_epochs in (None, -1) else min(steps, trainer.max_epochs)
    return (
        should is None
        or any(should(step_idx=step) for step in range(steps))
        or any(should(epoch_idx=epoch) for epoch in range(epochs))
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
