"""What is done for modules, optimizers, loaders and callbacks that are not ours."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.data import DataLoader

from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.config.strategy import OTHER_OPTIMIZER, StrategyConfig, check_optimizer
from lit_fsdp.data.batches import Resumable
from lit_fsdp.errors import ContractError, require
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.parallel.alike import check_alike, ending_together
from lit_fsdp.parallel.checkpointing import check_packed_state
from lit_fsdp.parallel.precision import TORCH_DTYPES, cast_inputs
from lit_fsdp.parallel.trial import refusal_of
from lit_fsdp.parallel.units import UnitPlan, units_already_wrapped
from lit_fsdp.parallel.watching import WatchedSteps

_log = logging.getLogger(__name__)
_WHOLE_WEIGHTS = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging", "ModelPruning")
"""Callbacks of Lightning that average or sort whole weights, but a rank has only shards."""


def check_finders(callbacks: Iterable[Any], module: Any) -> None:
    """Refuse Lightning's callbacks that look for a batch size, and for the learning rate of a module of ours."""
    found = {cls.__name__ for callback in callbacks for cls in type(callback).__mro__}
    given, fix = "BatchSizeFinder", "drop it; lit-fsdp plan --gpu tells which data.micro_batch_size fits"
    require(given not in found, "trainer.callbacks", given, "a batch size that is given", fix)
    given, fix = "LearningRateFinder", "drop it, and try some values of model.optim.lr in short runs"
    is_ours = hasattr(module, "read_tensor")
    require(not is_ours or given not in found, "trainer.callbacks", given, "a learning rate that is given", fix)


def check_callbacks(config: StrategyConfig, trainer: Any, verb: str) -> None:
    """Refuse callbacks of Lightning that need whole weights, or whose average begins after the last step."""
    for callback in trainer.callbacks if config.is_sharded else ():
        name = next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in _WHOLE_WEIGHTS), "")
        given, allowed = f"{name} with engine {config.engine}", "what does without whole weights, or ddp or single"
        ours = "{class_path: lit_fsdp.EMAWeights, init_args: {decay: 0.999}}, in Python lit_fsdp.EMAWeights(0.999)"
        require(not name, "trainer.callbacks", given, allowed, f"in a recipe {ours}" if "Averaging" in name else "")
    for callback in trainer.callbacks if verb == "fit" and trainer.max_steps > 0 else ():
        given = f"{type(callback).__name__}, whose first update comes after the last of {trainer.max_steps} steps"
        fix = "let it begin earlier: until then it gives the weights that training began with, and to the end here"
        require(_ever_averages(callback, trainer), "trainer.callbacks", given, "averages of what is trained", fix)


def check_unsharded(module: Any, config: StrategyConfig, num_axes: int, path: str) -> None:
    """Refuse a module that somebody has sharded already, unless ``wrap: manual`` and this engine's units say so.

    A unit has ``num_axes`` axes of the mesh; under tensor parallelism it has more.
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
    given, allowed = f"the DTensor {name}, as of a tp_plan", "plain parameters, which the strategy shards by itself"
    require(name is None, type(module).__name__, given, allowed, "drop tp_plan, parallelize_module or the like")


class ForeignParts(WatchedSteps):
    """The part of :class:`lit_fsdp.parallel.base.EngineStrategy` about what is not ours."""

    in_recipe = False  # where the arguments come from, for the paths in errors
    shard_group: dist.ProcessGroup | None
    _host_group: Any = None
    _plugin: Any

    @property
    def path(self) -> str:
        """Where the arguments stand, for errors."""
        return "trainer.strategy.init_args" if self.in_recipe else "fsdp_strategy"

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


def _ever_averages(callback: Any, trainer: Any) -> bool:
    """Whether an average of Lightning is updated within ``max_steps``; True for other callbacks."""
    steps, should = trainer.max_steps, getattr(callback, "should_update", None)
    epochs = steps if trainer.max_epochs in (None, -1) else min(steps, trainer.max_epochs)
    return (
        should is None
        or any(should(step_idx=step) for step in range(steps))
        or any(should(epoch_idx=epoch) for epoch in range(epochs))
    )
