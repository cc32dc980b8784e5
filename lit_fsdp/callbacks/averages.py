"""An exponential moving average of the trained weights; each rank stores the averages of its shards."""

import logging
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Replicate

from lit_fsdp.checkpoint.state import local_part
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.parallel.base import EngineStrategy

_log = logging.getLogger(__name__)


class _Averages(torch.optim.Optimizer):
    """Averages as optimizer state, which torch saves, loads and reshards with every engine."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})
        for param in params:
            if param.numel():  # FSDP1 expects no state of parameters on other ranks
                self.state[param]["average"] = param.detach().clone().float()

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's part of each parameter and of its average, in fp32."""
        return [(local_part(param.detach()), local_part(entry["average"])) for param, entry in self.state.items()]

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy in place; torch would cast to the dtype of the parameters."""
        (saved,), (here,) = state_dict["param_groups"], self.param_groups
        for key, param in zip(saved["params"], here["params"], strict=True):
            if param in self.state:
                local_part(self.state[param]["average"]).copy_(local_part(state_dict["state"][key]["average"]))


class EMAWeights(Callback):
    """Keeps an exponential moving average of the trained weights, in fp32, sharded over the ranks.

    The first update copies the weights; each later one computes ``average = decay * average + (1 - decay) * weights``,
    like :func:`torch.optim.swa_utils.get_ema_avg_fn`. The model keeps the live weights, also after training;
    checkpoints contain the averages too, which ``lit-fsdp export --ema`` writes, and a resume restores both. Buffers
    and frozen weights are not averaged.

    Args:
        decay: Weight of the old average in an update, from 0 to below 1.
        every_steps: Optimizer steps between updates.
        start_step: Optimizer steps before the first update; 0: ``every_steps``.
        validate: Whether the validations of ``fit`` use the averages after the first update.

    Raises:
        ConfigError: A value is out of range, averaging would never start, or the strategy is not from
            ``fsdp_strategy``.
    """

    def __init__(self, decay: float = 0.999, every_steps: int = 1, start_step: int = 0, validate: bool = True) -> None:
        require(0 <= decay < 1, "EMAWeights.decay", decay, "0 <= decay < 1")
        require(every_steps >= 1, "EMAWeights.every_steps", every_steps, "at least 1")
        require(start_step >= 0, "EMAWeights.start_step", start_step, "at least 0")
        self.decay, self.every_steps, self.start_step, self.validate = decay, every_steps, start_step, validate
        self.num_updates = 0
        self._trainer: Any = None
        self._averages: _Averages | None = None
        self._live: list[tuple[torch.Tensor, torch.Tensor]] = []  # during a validation with the averages
        self._seen_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse settings under which averaging never starts."""
        if stage == "fit":
            strategy, last, first = trainer.strategy, trainer.max_steps, self.start_step or self.every_steps
            allowed = "a strategy of lit_fsdp.fsdp_strategy()"
            require(isinstance(strategy, EngineStrategy), "trainer.strategy", type(strategy).__name__, allowed)
            given, allowed = f"first averages after step {first}", f"at most trainer.max_steps, {last}"
            require(last < 0 or first <= last, "EMAWeights.start_step", given, allowed)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Allocate the averages before a checkpoint is restored."""
        self._trainer, self._averages = trainer, _Averages([p for p in pl_module.parameters() if p.requires_grad])
        self.num_updates, self._seen_step = 0, trainer.global_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the first step of this run."""
        self._seen_step = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Update after an optimizer step."""
        assert self._averages is not None
        step, seen, self._seen_step = trainer.global_step, self._seen_step, trainer.global_step
        begin, every = self.start_step, self.every_steps
        if step < begin or (step - begin) // every <= (seen - begin) // every:  # it may count several optimizers
            return
        for name, param in pl_module.named_parameters():
            known = not param.requires_grad or not param.numel() or param in self._averages.state
            given, allowed = f"{name}, which became trainable after the start", "weights trained from the first step"
            require(known, "EMAWeights", given, allowed)
        trainer.strategy.reshard()  # type: ignore[attr-defined]
        for live, average in self._averages.pairs():
            average.lerp_(live.float(), 1 - self.decay if self.num_updates else 1.0)
        self.num_updates += 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if there are no averages."""
        if not self.num_updates:
            _log.warning("EMAWeights: training ended before the first averages (start_step %d)", self.start_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap in the averages."""
        if self.validate and self.num_updates and trainer.state.fn == "fit":
            assert self._averages is not None
            trainer.strategy.reshard()  # type: ignore[attr-defined]
            for live, average in self._averages.pairs():
                self._live.append((live, live.clone()))
                live.copy_(average)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights."""
        if self._live:
            trainer.strategy.reshard()  # type: ignore[attr-defined]
        for weight, live in self._live:
            weight.copy_(live)
        self._live = []

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the weights before anything is saved."""
        self.on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The averages by name as DTensors, including the last step."""
        if self._averages is None:
            return {}
        if self._live:
            raise CheckpointError("a validation is using the averages instead of the weights: save after it has ended")
        strategy, weights = self._trainer.strategy, {}
        if self._trainer.global_step > self._seen_step:  # a callback before this one saves, as on a signal
            self.on_train_batch_end(self._trainer, self._trainer.lightning_module)
        if self.num_updates:
            for name, entry in strategy.optimizer_state(self._averages)["state"].items():
                weights[name] = average = entry["average"]
                if not isinstance(average, DTensor):
                    everywhere = [Replicate()] * strategy.mesh.ndim
                    weights[name] = DTensor.from_local(average, strategy.mesh, everywhere, run_check=False)
        return {"num_updates": self.num_updates, "weights": weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore saved averages."""
        self.num_updates, saved = state_dict["num_updates"], state_dict["weights"]
        if not saved:
            return
        strategy = self._trainer.strategy
        here = strategy.optimizer_state(self._averages)
        if odd := sorted(here["state"].keys() ^ saved.keys()):
            raise CheckpointError(f"EMAWeights: the checkpoint has averages of other weights: {', '.join(odd[:5])}")
        for name, entry in here["state"].items():
            local_part(entry["average"]).copy_(local_part(saved[name]))
        strategy.set_optimizer_state(self._averages, here, StateDictOptions(strict=False))
