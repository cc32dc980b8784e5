"""The mixin for Lightning strategies that all engines share: setup, audit, dtype contract, steps."""

import logging
import os
import re
import socket
import threading
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric
from transformers import PreTrainedModel

from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.state import local_part
from lit_fsdp.config.strategy import (
    StrategyConfig,
    check_accumulation,
    check_quantized,
    mesh_shape,
)
from lit_fsdp.errors import ConfigError, ContractError, require
from lit_fsdp.host import FIRST, end_with_first, threads_of_rank
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.models.attention import by_sample
from lit_fsdp.models.parts import RowParts, context_method, share_longest
from lit_fsdp.parallel.activation import prepare_blocks, recompute_by_unit, recomputes, resolve_gradient_checkpointing
from lit_fsdp.parallel.alike import check_alike, kinds_of, options_of, tensors_of
from lit_fsdp.parallel.debug import write_rank
from lit_fsdp.parallel.expert_units import check_experts, divide_experts
from lit_fsdp.parallel.foreign import (
    ForeignParts,
    attributes_of,
    check_callbacks,
    check_embeddings,
    check_finders,
    check_hooks,
    check_unsharded,
    restore_attributes,
)
from lit_fsdp.parallel.forward import RedirectedForward
from lit_fsdp.parallel.grads import GuardedSteps
from lit_fsdp.parallel.materialize import QUIET_SECONDS, Materializer, Reader, check_memory, reset_parameters_reader
from lit_fsdp.parallel.mesh import CONTEXT, SHARD, build_context_mesh, build_expert_groups, build_mesh
from lit_fsdp.parallel.norms import STRATEGIES, warn_of_local_norms
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
from lit_fsdp.parallel.trim import Trimmer
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
from lit_fsdp.signals import SIGNAL_FLAGS

_log = logging.getLogger(__name__)
_LOST_CONTACT = re.compile("lost contact|gloo|NCCL|ProcessGroup|Timed out waiting|TCPStore")
_CLOSED = re.compile("Connection (closed|reset|refused)|Broken pipe")
_FREE_CHOICES = "process_group_backend timeout_seconds state_dict verbose contract nonfinite_gradients".split()
"""Arguments in which the strategies of two Trainers that share a module may differ."""


_PACKAGES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")


def _is_lost(error: BaseException) -> bool:
    """Whether other ranks cannot be reached; connections of loggers and callbacks do not count."""
    text = f"{type(error).__name__}: {error}"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_ours = not frames or frames[-1].f_code.co_filename.startswith(_PACKAGES)
    return bool(_LOST_CONTACT.search(text) or (is_ours and _CLOSED.search(text)))


class EngineStrategy(ForeignParts):
    """The engine-independent half of a strategy; built by :func:`lit_fsdp.fsdp_strategy`."""

    cluster_environment: Any
    shard_group: dist.ProcessGroup | None  # ranks of one sharded copy; None: each rank has a whole copy
    has_copies: bool  # replicas must make the same decisions
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
        # modules that run backward on a sum divide it by this first, to avoid overflow
        self.loss_divisor = 1024.0 if is_fp16 else 1.0
        self._root = None
        self._owner: Any = None
        self._ties = {}
        self._attributes: dict[str, tuple[type, dict[str, Any]]] = {}
        self.plan: UnitPlan | None = None
        self.audit: dict[str, Any] = {}
        self.contract = DtypeContract(config)
        self.checkpoint_files: dict[str, bytes] = {}
        self.replicated: list[nn.Parameter] = []
        self.context: RowParts | None = None  # of the ranks with parts of the same rows
        self.context_mesh: DeviceMesh | None = None  # dp_replicate, dp_shard, context
        self.expert_group: dist.ProcessGroup | None = None  # of the ranks that divide experts
        self.expert_mesh: DeviceMesh | None = None  # of the ranks with the same experts
        STRATEGIES.add(self)
        super().__init__(
            process_group_backend=config.process_group_backend, timeout=timedelta(seconds=config.timeout_seconds)
        )
        if config.is_sharded:
            self._forward_redirection: Any = self._step_inside

    @abstractmethod
    def _shard(self, module: nn.Module, plan: UnitPlan, materializer: Materializer) -> nn.Module:
        """Fill and wrap the module; return the root that is called in every step."""

    def reshard(self) -> None:
        """Free gathered parameters: optimizers update shards, and gathered copies would miss these updates."""

    @abstractmethod
    def _no_sync(self) -> AbstractContextManager[Any]:
        """A context in which backward passes do not reduce gradients."""

    def _start_process_group(self) -> None:
        super().setup_environment()  # type: ignore[misc]

    @property
    def precision_plugin(self) -> Any:
        """The plugin that clips gradients; only the strategy sets dtypes."""
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        given = "32-true" if plugin is None else plugin.precision
        require(given == "32-true", "Trainer(precision=...)", given, "unset; use only fsdp_strategy(precision=...)")

    def check_environment(self, trainer: Any, module: Any, verb: str) -> None:
        """Refuse settings that fail on these ranks and devices, or with this Trainer; needs no process group."""
        config = self.config
        mesh_shape(config, self.num_nodes, self.num_nodes * self.num_processes, self.path)
        check_device(config, self.root_device.type, self.path)
        check_finders(trainer.callbacks, module)
        check_callbacks(config, trainer, verb, is_ours=hasattr(module, "read_tensor"))
        if config.context_config.degree > 1:
            self._check_context(module)
        if config.expert_parallel > 1 and (model := self._transformer(module)) is not None:
            self._check_experts(model)
        if verb == "fit":
            self._check_accumulation(trainer)
        # the root expects one backward pass, followed by the step
        wrong = config.engine == "fsdp1" and verb == "fit" and not module.automatic_optimization
        given = f"fsdp1 with manual optimization ({type(module).__name__})"
        require(not wrong, f"{self.path}.engine", given, "fsdp2 | ddp | single")

    def _check_context(self, module: Any) -> str:
        """The context-parallel attention method; refuses a module that would compute whole rows on every rank."""
        path = f"{self.path}.context_parallel"
        given = f"above 1 for {type(module).__name__}"
        allowed = "1, or a module that splits its batches with strategy.context"
        fix = "call strategy.context.inputs in its steps and set cuts_rows = True; see docs/own-module.md"
        require(getattr(module, "cuts_rows", False), path, given, allowed, fix)
        if (model := self._transformer(module)) is None:
            return "ulysses" if (method := self.config.context_config.method) == "auto" else method
        by_sample(model, True)
        return context_method(model, self.config.context_config, path)

    @staticmethod
    def _transformer(module: Any) -> Any:
        """The Transformers model in a LightningModule; None if ``configure_model`` creates it."""
        models = (m for m in module.modules() if isinstance(m, PreTrainedModel))
        return module.build().model if hasattr(module, "build") else next(models, None)

    def _check_experts(self, model: nn.Module) -> None:
        shards = mesh_shape(self.config, self.num_nodes, self.num_nodes * self.num_processes)[1]
        check_experts(model, self.config.expert_parallel, shards, f"{self.path}.expert_parallel")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of Lightning's distributed sampler: ranks of a context group get the same rows."""
        given, degree = super().distributed_sampler_kwargs, self.config.context_config.degree  # type: ignore[misc]
        return {name: value // degree for name, value in given.items()}

    def _check_accumulation(self, trainer: Any) -> None:
        schedules = (c.scheduling.values() for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler))
        steps = max(trainer.accumulate_grad_batches, *(n for counts in schedules for n in counts), 1)
        check_accumulation(self.config, steps, self.path, "use larger batches without accumulate_grad_batches")

    def _configure_launcher(self) -> None:
        """Let Lightning's launcher start further processes after this process has passed all checks."""
        super()._configure_launcher()  # type: ignore[misc]
        end_with_first(self._is_running)
        if self._launcher is not None and _IS_INTERACTIVE and not self.cluster_environment.creates_processes_externally:
            given, allowed = f"{self.num_nodes * self.num_processes} from a notebook or an interactive shell", "1"
            fix = "set devices=1, or run the script or recipe from a cell: !lit-fsdp fit --config NAME"
            require(self.num_nodes * self.num_processes == 1, "Trainer(devices=...)", given, allowed, fix)
            self._launcher = None  # Lightning refuses it in a notebook, though it would start no other process
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
        """Start the process group (of one rank for ``single``), resolve ``precision: auto``, and build the mesh."""
        trainer = self.lightning_module.trainer
        self.check_environment(trainer, self.lightning_module, trainer.state.fn)
        seconds, environment = self.config.timeout_seconds, self.cluster_environment
        text = f"{socket.gethostname()} still waits for all {self.num_nodes * self.num_processes} ranks to meet at "
        text += f"{environment.main_address}:{environment.main_port}, at most {seconds:.0f} s"
        timer = threading.Timer(QUIET_SECONDS, _log.warning, (text,))
        timer.daemon = True
        timer.start()
        try:
            with SIGNAL_FLAGS.meeting():
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
        device, timeout = self.root_device.type, timedelta(seconds=seconds)
        self.mesh = build_mesh(device, replicas, shards, timeout)
        if (degree := self.config.context_config.degree) > 1:
            self.context_mesh = build_context_mesh(device, replicas, shards, degree, timeout)
            method = self._check_context(self.lightning_module)
            self.context = RowParts(self.context_mesh.get_group(CONTEXT), method)
        if (degree := self.config.expert_parallel) > 1:
            self.expert_group, self.expert_mesh = build_expert_groups(device, replicas, shards, degree, timeout)
        self.shard_group, self.has_copies = self.mesh.get_group(SHARD) if shards > 1 else None, replicas > 1

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; our modules count its targets before, while no device waits for the count."""
        counted = getattr(self.lightning_module, "counted", None)
        if counted is not None and is_accelerator(self.root_device):
            batch = counted(batch)
        return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]

    def setup(self, trainer: Any) -> None:
        """Shard the LightningModule (once), check the contract, build the optimizers."""
        self.accelerator.setup(trainer)  # type: ignore[attr-defined]
        module = self.lightning_module
        if trainer.state.fn == "fit":
            self._check_accumulation(trainer)  # a data module may have set it
            self._check_hyperparameters()
            if self.config.is_sharded and dist.get_rank() == 0:
                flat = self.config.engine == "fsdp1" and self.shard_group is not None
                warn_of_local_norms([module, *trainer.callbacks], flat)
        if self._owner is not module:
            is_ours = hasattr(module, "read_tensor")
            self.contract.is_error = (self.config.contract or ("error" if is_ours else "warn")) == "error"
            if isinstance(module.forward, RedirectedForward):
                self._take_over(module.forward)
            else:
                self._setup_module(module, is_ours)
            self._owner = module
        self._to_device(module)
        restore_attributes(module, self._attributes)  # moves make new DTensors, too
        self.reshard()
        self.model = self._root
        self.barrier()  # type: ignore[attr-defined]
        self._check_parameters("after setup")
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
        # FSDP1's own units have this rank's shards
        check_alike("comparing parameters", tensors_of(module, not manual or config.engine != "fsdp1"))
        check_unsharded(module, config, self.mesh.ndim, self.path)
        if config.is_sharded:
            check_hooks(module)
        if config.is_sharded or self.world_size > 1:
            check_embeddings(module)
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
            self._layer_sync = None  # else Lightning would replace layers of the sharded model at the end
        if self.context is not None:
            self._check_context(module)  # configure_model may have created the model
            share_longest(module)
        if self.expert_group is not None:
            self._check_experts(module)
            divide_experts(module, self.expert_group, self.mesh.size(self.mesh.ndim - 1))
        plan = self.plan = self._prepare(module)
        self._ties = tied_names(module)
        recompute = recompute_by_unit(plan)
        seed = self.broadcast(torch.initial_seed())  # type: ignore[attr-defined]  # replicas would differ
        reader: Reader = getattr(module, "read_tensor", None) or reset_parameters_reader(seed)
        where = torch.device("cpu") if config.offloads else self.root_device
        if is_ours:
            is_known = getattr(module.configure_optimizers, "__module__", "").startswith(
                "lit_fsdp."
            )  # not a subclass's
            trained = module.config.optim if is_known and module.trainer.state.fn == "fit" else None
            shards = self.mesh.size(self.mesh.ndim - 1) if config.is_sharded else 1
            check_memory(module.model, shards, where, self.num_processes, trained)
        materializer = Materializer(module, reader, where)
        if not config.cpu_ram_efficient_loading:
            materializer.fill_all()
        if not manual:  # torch shards dim 0, which scalars lack, and DDP skips parameters that are frozen by now
            params = module.parameters()
            self.replicated = [p for p in params if not (p.dim() if config.is_sharded else p.requires_grad)]
        self._attributes = attributes_of(module)
        self._root = self._shard(module, plan, materializer)
        if config.is_sharded:
            module.forward = RedirectedForward(self, module)
            fp32 = {plan.modules[unit.name] for unit in plan.units if unit.keeps_fp32}
            for unit, owners in owners_by_unit(module, plan).items():
                self._watch_unit(unit, owners, "fp32" if unit in fp32 else config.precision_config.row.compute)
        if not is_ours:  # ours get token IDs
            self._cast_for_layers(module, plan)
        if chosen := config.precision_config.buffer_dtype:  # opt-in, because rotary frequencies lose positions in bf16
            for buffer in (buffer for buffer in module.buffers() if buffer.is_floating_point()):
                buffer.data = buffer.data.to(TORCH_DTYPES[chosen])
        shards, packed = self.mesh.size(self.mesh.ndim - 1), packed_weights(module)
        self.audit = {
            **audit(plan, config, (self.world_size // shards, shards), recompute),
            "num_params_on_this_rank": sum(local_part(p).numel() * packed.get(id(p), 1) for p in module.parameters()),
        }
        different = units_already_wrapped(module).keys() ^ plan.modules.keys()
        if config.is_sharded and different:
            raise ContractError(f"FSDP units differ from the plan: {sorted(different)}")
        if config.verbose:
            write_rank(Path(module.trainer.default_root_dir) / "debug", module, self._root, self.mesh)

    def _prepare(self, module: Any) -> UnitPlan:
        config, precision = self.config, self.config.precision_config
        compute = TORCH_DTYPES[precision.row.compute]
        if not config.wrap_config.manual:  # else already sharded: the contract checks the dtypes as they are
            self.contract.frozen = cast_parameters(module, config)
            layers = quantized_layers(module)
            self.contract.packed = {f"{name}.weight": dtype_name(layer.weight.dtype) for name, layer in layers.items()}
            if layers:
                check_quantized(config, self.path)
            for layer in layers.values():
                cast_inputs(layer, compute)  # the dtype in which it then computes
        if precision.mode == "fp8":
            apply_float8(module, precision.fp8_skip, f"{self.path}.precision")
        plan = plan_for(module, config, self.path)
        path = f"{self.path}.activation_checkpointing"
        activation = resolve_gradient_checkpointing(module, config.activation_config, path)
        prepare_blocks(plan.blocks, activation, config.compile, path)
        if self.root_device.type == "cpu":
            Trimmer().add_to(block for block in plan.blocks if recomputes(block) != "no")
        for unit in plan.units:
            if unit.keeps_fp32:
                cast_outputs(plan.modules[unit.name], compute)
        if config.engine == "fsdp2" and not module.automatic_optimization:
            inner = {p for unit in plan.modules.values() for p in unit.parameters()}
            left = (n for n, p in module.named_parameters() if p.requires_grad and p.dim() and p not in inner)
            name = next(left, "")  # the root is gathered once per step, not once per backward pass
            given, allowed = f"False with the parameter {name}", "all of them in child modules with a forward, or ddp"
            require(not name, f"{type(module).__name__}.automatic_optimization", given, allowed)
        return plan

    def _to_device(self, module: nn.Module) -> None:
        """Move the module to the device, as Lightning moves it to the CPU after a fit; offloaded shards stay there."""
        if not self.config.offloads:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                module.to(self.root_device)
            return
        for tensor in [*module.buffers(), *self.replicated]:
            tensor.data = tensor.data.to(self.root_device)
        for child in module.modules():
            if isinstance(child, _DeviceDtypeModuleMixin):
                child._device = self.root_device  # the device of its steps' inputs
            elif isinstance(child, Metric):
                child._apply(lambda t: t if isinstance(t, nn.Parameter) else t.to(self.root_device))

    def _take_over(self, redirected: RedirectedForward) -> None:
        """Reuse a module that the strategy of another Trainer has sharded, which cannot be undone."""
        before = redirected.strategy
        ours, theirs = ({**vars(s.config), "number of ranks": s.world_size} for s in (self, before))
        given = {name: value for name, value in ours.items() if value != theirs[name] and name not in _FREE_CHOICES}
        sharded_with = {name: theirs[name] for name in given}
        allowed = f"{sharded_with}, the values with which another Trainer sharded this module"
        fix = "create a new module and load a checkpoint with lit_fsdp.load_weights(module, path)"
        require(not given, self.path, given, allowed, fix)
        for name in "plan audit mesh replicated _root _attributes _ties _used _noted".split():  # used by hooks
            setattr(self, name, getattr(before, name))
        self._plugin.autocast, redirected.strategy = before._plugin.autocast, self
        self.contract.frozen, self.contract.packed = before.contract.frozen, before.contract.packed

    def _step_inside(self, root: nn.Module, module: Any, step: str, *args: Any, **kwargs: Any) -> Any:
        """Run a step; called by Lightning for each of its steps."""
        return module.forward.run(getattr(module, step), *args, **kwargs)

    def _sync_buffers(self) -> None:
        """Broadcast the floating-point buffers of checkpoints, such as running statistics, from rank 0."""
        for child in self.lightning_module.modules() if self.world_size > 1 else ():
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_floating_point() and name not in child._non_persistent_buffers_set:
                    dist.broadcast(buffer, src=0)

    def on_train_start(self) -> None:
        """Check that all ranks have the same state and number of steps, and sync their buffers; collective."""
        module, trainer = self.lightning_module, self.lightning_module.trainer
        numbers = {"train": "num_training_batches", "test": "num_test_batches", "predict": "num_predict_batches"}
        of = numbers.get(trainer.state.stage.value, "num_val_batches")
        if trainer.training:
            if self.config.is_sharded:
                check_hooks(module)  # those of on_fit_start and configure_optimizers
            options = options_of(self.optimizers, self.lr_scheduler_configs)
            check_alike("comparing the ranks", tensors_of(module, is_whole=False) | options)
        # ranks with more batches than others would wait for them forever
        if self.config.is_sharded or trainer.training:
            found = Ranks().run("counting batches", lambda: getattr(trainer, of))
            allowed = "the same on every rank, with a custom sampler (use_distributed_sampler=False)"
            allowed += "" if trainer.training else "; or engine ddp"
            require(found.count(found[0]) == len(found), f"trainer.{of}", " and ".join(map(str, found)), allowed)
        self._sync_buffers()
        for text in idle_schedulers(trainer, self.lr_scheduler_configs) if trainer.training else ():
            if dist.get_rank() == 0:
                _log.warning("%s", text)
        if of == "num_training_batches":
            self.check_state()

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def average_alone(self) -> None:
        """Average gradients that no engine reduces, after a backward pass on top of equal gradients; collective."""
        alone = [p for p in self.replicated if p.requires_grad] if self.world_size > 1 else []
        has_grad = self._on_any_rank([p.grad is not None for p in alone]).tolist() if alone else []
        for param, has in zip(alone, has_grad, strict=True):
            if has:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad.div_(self.world_size))

    def block_backward_sync(self) -> Any:
        """The context for all micro-batches of a global batch except the last."""
        self._check_accumulation(self.lightning_module.trainer)  # a callback may have changed it
        return nullcontext() if self.config.sync_each_micro_batch else self._no_sync()

    def on_exception(self, exception: BaseException) -> None:
        """Add a note on the raising rank and whether it lost contact with others, which decides the exit code."""
        is_failure = isinstance(exception, Exception) and not isinstance(exception, ConfigError)
        if is_failure and not hasattr(exception, "exit_code") and dist.is_initialized() and dist.get_world_size() > 1:
            where = f"rank {dist.get_rank()} ({socket.gethostname()})"
            lost = f"{where} lost contact: another rank failed, was killed, hangs or is cut off; see its own log"
            exception.add_note(lost if _is_lost(exception) else f"this was raised on {where}")
        super().on_exception(exception)  # type: ignore[misc]
