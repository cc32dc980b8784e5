"""Support for foreign modules, optimizers, dataloaders and callbacks."""

import functools
import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader

from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.config.run import STRATEGY
from lit_fsdp.config.strategy import OTHER_OPTIMIZER, StrategyConfig, check_optimizer
from lit_fsdp.data.batches import Resumable
from lit_fsdp.errors import ContractError, require
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.models.attention import source_of
from lit_fsdp.parallel.alike import check_alike, ending_together
from lit_fsdp.parallel.checkpointing import check_packed_state
from lit_fsdp.parallel.precision import TORCH_DTYPES, cast_inputs
from lit_fsdp.parallel.trial import refusal_of
from lit_fsdp.parallel.units import UnitPlan, clean_name, packed_weights, units_already_wrapped
from lit_fsdp.parallel.watching import WatchedSteps

_log = logging.getLogger(__name__)
_DIMENSIONS = re.compile(r"\.(ndim|dim\(\)|ndimension\(\))")
_WHOLE_WEIGHTS = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning")
"""Lightning callbacks that average or sort whole weights, while a rank has only shards."""


def check_finders(callbacks: Iterable[Any], module: Any) -> None:
    """Refuse Lightning's batch size finder, and for our modules its learning rate finder and ``BackboneFinetuning``."""
    found = {cls.__name__ for callback in callbacks for cls in type(callback).__mro__}
    given, fix = "BatchSizeFinder", "remove it; lit-fsdp plan --gpu prints the data.micro_batch_size that fits"
    require(given not in found, "trainer.callbacks", given, "an explicit batch size", fix)
    given, fix = "LearningRateFinder", "remove it, and try several values of model.optim.lr in short runs"
    is_ours = hasattr(module, "read_tensor")
    require(not is_ours or given not in found, "trainer.callbacks", given, "an explicit learning rate", fix)
    given, fix = "BackboneFinetuning", "remove it; model.freeze freezes weights by name, and model.lora trains adapters"
    is_split = hasattr(module, "backbone") or not is_ours
    allowed = f"other callbacks, as {type(module).__name__} has no attribute backbone"
    require(is_split or given not in found, "trainer.callbacks", given, allowed, fix)


def check_callbacks(config: StrategyConfig, trainer: Any, verb: str, is_ours: bool) -> None:
    """Refuse Lightning callbacks that need whole weights, start averaging after the last step, or save on one rank.

    During their setup, modules of ours (``is_ours``) have no weights yet, whatever the engine.
    """
    for callback in trainer.callbacks if config.is_sharded or is_ours else ():
        name = next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in _WHOLE_WEIGHTS), "")
        given, allowed = f"{name} with engine {config.engine}", "callbacks that work on shards, or ddp or single"
        if is_ours:
            given, allowed = f"{name}, which copies or changes weights before they are loaded", "other callbacks"
        ours = "{class_path: lit_fsdp.EMAWeights, init_args: {decay: 0.999}}, in Python lit_fsdp.EMAWeights(0.999)"
        require(not name, "trainer.callbacks", given, allowed, f"in a recipe {ours}" if "Averaging" in name else "")
    for callback in trainer.callbacks if verb == "fit" and trainer.max_steps > 0 else ():
        given = f"{type(callback).__name__}, whose first update comes after the last of {trainer.max_steps} steps"
        fix = "start averaging earlier: until its first update, the callback returns the initial weights"
        require(_ever_averages(callback, trainer), "trainer.callbacks", given, "averages of trained weights", fix)
    for callback in trainer.callbacks if verb == "fit" else ():
        has_option = getattr(callback, "save_on_exception", False)
        given = type(callback).__name__ + (" with save_on_exception" if has_option else "")
        given += f" on {trainer.world_size} ranks: the save of a rank that fails waits for the other ranks"
        fix = "set checkpoint.every_steps instead, in Python lit_fsdp.Checkpoint(every_steps=50); resume from the last"
        is_alone = trainer.world_size == 1 or not (has_option or isinstance(callback, OnExceptionCheckpoint))
        require(is_alone, "trainer.callbacks", given, "saves in which all ranks take part", fix)


def check_unsharded(module: Any, config: StrategyConfig, num_axes: int, path: str) -> None:
    """Refuse a module that is already sharded, unless with ``wrap: manual`` and units of this engine.

    The mesh of a unit has ``num_axes`` dimensions; with tensor parallelism it has more.
    """
    manual, units = config.wrap_config.manual, units_already_wrapped(module)
    fits = manual or not units
    require(fits, f"{path}.wrap", "a model that is already wrapped", "a plain model, or wrap: manual")
    kinds = FSDPModule if config.engine == "fsdp1" else FullyShardedDataParallel
    alike = not any(isinstance(inner, kinds) for inner in module.modules())
    require(alike, f"{path}.wrap", "manual with units of another engine", config.engine)
    inside = {id(p) for unit in units.values() if manual for p in unit.parameters()}
    found = ((n, p) for n, p in module.named_parameters() if isinstance(p, DTensor))
    name = next((n for n, p in found if id(p) not in inside or p.device_mesh.ndim != num_axes), None)
    given, allowed = f"the DTensor {name}, for example from a tp_plan", "plain parameters; the strategy shards them"
    require(name is None, type(module).__name__, given, allowed, "remove tp_plan, parallelize_module or similar")


def check_hooks(module: nn.Module) -> None:
    """Refuse hooks on parameters that no engine would call, because backward passes see gathered tensors."""
    for name, param in module.named_parameters():
        later = None if isinstance(param, DTensor) else param._post_accumulate_grad_hooks  # fsdp2 calls those of shards
        hooks = [*(param._backward_hooks or {}).values(), *(later or {}).values()]
        foreign = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("lit_fsdp.")]
        given = f"a hook on the parameter {clean_name(name)}, which sharded parameters do not call"
        fix = "change gradients in on_after_backward or on_before_optimizer_step, where a rank has its shards"
        require(not foreign, type(module).__name__, given, "no such hooks, or engine: ddp", fix)


def check_embeddings(module: nn.Module) -> None:
    """Refuse embeddings whose forward changes their weights, which are gathered copies or differ between ranks."""
    for name, child in module.named_modules():
        fits = not isinstance(child, (nn.Embedding, nn.EmbeddingBag)) or child.max_norm is None
        given = f"max_norm of the embedding {clean_name(name)}, whose forward changes the weights of one rank"
        fix = "leave max_norm out and scale the weights in on_train_batch_end"
        require(fits, type(module).__name__, given, "max_norm=None, or engine: single", fix)


def attributes_of(module: nn.Module) -> dict[str, tuple[type, dict[str, Any]]]:
    """Class and attributes of each parameter by name, which new parameters of a sharded module would lack."""
    found: dict[str, tuple[type, dict[str, Any]]] = {}
    packed = packed_weights(module)  # classes of bitsandbytes, whose attributes are part of the data
    for name, param in module.named_parameters():
        if id(param) in packed:
            continue
        is_plain = issubclass(type(param), (nn.Parameter, DTensor))  # attributes of other subclasses can be the data
        found[clean_name(name)] = type(param), dict(vars(param)) if is_plain else {}
    return found


def restore_attributes(module: nn.Module, before: dict[str, tuple[type, dict[str, Any]]]) -> None:
    """Give parameters the attributes of :func:`attributes_of`; warns if a class of its own is lost."""
    lost = []
    for name, param in module.named_parameters():
        kind, attributes = before.get(clean_name(name), (nn.Parameter, {}))
        for attribute in attributes.keys() - vars(param).keys():
            setattr(param, attribute, attributes[attribute])
        if issubclass(kind, nn.Parameter) and kind is not nn.Parameter and type(param) is not kind:
            lost.append(f"{clean_name(name)} is no longer a {kind.__name__}")
    if lost and dist.get_rank() == 0:
        text = "sharding makes new parameters: %s; mark parameters by an attribute instead, which is kept"
        _log.warning(text, " and ".join([*lost[:2], *([f"{len(lost) - 2} more"] if lost[2:] else [])]))


class ForeignParts(WatchedSteps):
    """The part of :class:`lit_fsdp.parallel.base.EngineStrategy` for foreign parts of a run."""

    in_recipe = False  # whether a recipe gave the arguments, for paths in errors
    shard_group: dist.ProcessGroup | None
    _host_group: Any = None
    _plugin: Any

    @property
    def path(self) -> str:
        """Path of the arguments, for errors."""
        return STRATEGY if self.in_recipe else "fsdp_strategy"

    def process_dataloader(self, dataloader: object) -> object:
        """Give each loader its own generator, so that it does not draw from the global one, which a resume restores."""
        if isinstance(dataloader, DataLoader) and dataloader.generator is None:
            dataloader.generator = torch.Generator().manual_seed(torch.initial_seed())
        loader = super().process_dataloader(dataloader)  # type: ignore[misc]
        trainer = self.lightning_module.trainer
        apart = not (self.config.is_sharded or trainer.training)  # replicas do not wait for each other in evaluation
        if self.world_size == 1 or apart or isinstance(loader, Resumable):  # ours are the same on all ranks
            return loader
        is_endless = sized_len(loader) is None
        field = f"{trainer.state.stage.dataloader_prefix}_dataloader"
        check_alike("looking for lengths", {field: "no length" if is_endless else "a length"})
        if is_endless and self._host_group is None and is_accelerator(self.root_device):
            self._host_group = self.meet_on_hosts()
        device = self.root_device if self._host_group is None else torch.device("cpu")
        return ending_together(loader, self._host_group, device) if is_endless else loader

    def _broadcast(self, module: nn.Module) -> None:
        """Move loaded tensors to the device and broadcast them from rank 0, one tensor at a time."""
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
        """Cast the inputs of layers (not the batch) that no engine casts: in the root, or with low_precision."""
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

    def _check_optimized(self) -> None:
        """Refuse an optimizer that fails in step 1, or whose tensors are not parameters and would train nothing."""
        module, engine, is_split = self.lightning_module, self.config.engine, self.shard_group is not None
        for index, optimizer in enumerate(self.optimizers):
            name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            if is_split:
                check_optimizer(name, engine, f"{self.path}.engine")
            if type(optimizer) is torch.optim.Muon and is_split and dist.get_rank() == 0:
                text = "torch.optim.Muon on shards makes updates that differ by up to 30 % from those of one process; "
                _log.warning("%suse lit_fsdp.MuonWithAdamW with use_muon in its groups for whole matrices", text)
            if self.config.is_sharded:
                check_packed_state(optimizer, self.config.offloads, self._names)
            if engine == "fsdp1" and is_split and not hasattr(module, "read_tensor"):
                self._check_groups(index, optimizer)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            strays = [f"a tensor of shape {tuple(p.shape)}" for p in params if id(p) not in self._names]
            if strays and self.config.is_sharded:
                text = f"optimizer {index} updates {strays[0]} that is not a parameter of the sharded model: create "
                raise ContractError(text + "it in configure_optimizers from self.parameters()")
            if not module.automatic_optimization:  # its author may call methods other than step
                continue
            flat, saves = engine == "fsdp1" and is_split, bool(module.trainer.checkpoint_callbacks)
            why = max(Ranks().run("trying the optimizer", functools.partial(refusal_of, optimizer, flat, saves)))
            given, allowed = f"{name} with {self.path}.engine: {engine}", f"an optimizer that works with it ({why})"
            require(not why, "model.optim.class_path", given, allowed, OTHER_OPTIMIZER)

    def _check_groups(self, index: int, optimizer: Any) -> None:
        """Refuse groups by dimensions under fsdp1, whose shards have one; warn of other groups without parameters."""
        groups = enumerate(optimizer.param_groups)
        own = next((number for number, group in groups if not group["params"]), -1)
        empty = min(Ranks().run("comparing groups", lambda: own))  # on some ranks only: of empty shards
        if empty < 0:
            return
        why = "in configure_optimizers, parameters are this rank's shards, of one dimension each"
        by_dims = _DIMENSIONS.search(source_of(type(self.lightning_module).configure_optimizers))
        given = f"fsdp1 with group {empty} of optimizer {index}, which has no parameters"
        fix = f"select parameters by name, or set {self.path}.engine: fsdp2"
        require(not by_dims, f"{self.path}.engine", given, f"groups with parameters: {why}", fix)
        if dist.get_rank() == 0:
            _log.warning("group %d of optimizer %d has no parameters; on fsdp1, %s", empty, index, why)

    def on_train_end(self) -> None:
        """Warn about averaging callbacks of Lightning that still have the initial weights."""
        for callback in self.lightning_module.trainer.callbacks:
            average = getattr(callback, "_average_model", None)
            if average is not None and not getattr(average, "n_averaged", True):  # that of SWA is a plain module
                text = "%s has not averaged yet: the model and its checkpoints have the initial weights; "
                text += "the weights of the last step are current_model_state of a checkpoint"
                _log.warning(text, type(callback).__name__)


def _ever_averages(callback: Any, trainer: Any) -> bool:
    """Whether an averaging callback of Lightning updates within ``max_steps``; True for other callbacks."""
    steps, should = trainer.max_steps, getattr(callback, "should_update", None)
    epochs = steps if trainer.max_epochs in (None, -1) else min(steps, trainer.max_epochs)
    return (
        should is None
        or any(should(step_idx=step) for step in range(steps))
        or any(should(epoch_idx=epoch) for epoch in range(epochs))
    )
