"""The LightningModule for any transformers causal LM.

The loss of a global batch is (sum over its supervised tokens) / (their number): the method ``training_step`` returns
sums. Just before the optimizer step, one small all-reduce adds up the token counts and the gradients are scaled once.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedTokenizerBase

from lit_fsdp.checkpoint.manifest import Manifest, read_manifest
from lit_fsdp.checkpoint.store import load_weights
from lit_fsdp.config.model import ModelConfig, OptimConfig, schedule_factor
from lit_fsdp.config.sections import build, refuse_positional, takes_fields
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.metrics.hardware import is_accelerator, to_device
from lit_fsdp.metrics.step_metrics import STEP_COUNTS, SumMetric, batch_counts, end_of, eval_means, step_metrics
from lit_fsdp.models.attention import by_sample
from lit_fsdp.models.base import check_base, describe_base
from lit_fsdp.models.build import (
    attention_words,
    build_on_meta,
    build_trainable,
    check_attention,
    kept_with_adapters,
)
from lit_fsdp.models.export_files import model_entry, model_files
from lit_fsdp.models.generate import generate_ids
from lit_fsdp.models.lora import LoraWeights
from lit_fsdp.models.loss import (
    IGNORED,
    NUM_TARGETS,
    ONE_ROW,
    LossPlan,
    TokenLoss,
    causal_lm_forward,
    context_of,
    next_targets,
    plan_loss,
    sample_losses,
    targets_here,
)
from lit_fsdp.models.neftune import embedding_noise
from lit_fsdp.models.optimizers import MuonWithAdamW, ShardAdamW, hidden_matrices, is_decayed, optimizer_class
from lit_fsdp.models.overrides import check_overrides
from lit_fsdp.models.packing import last_hidden_states, model_inputs
from lit_fsdp.models.parts import RowParts
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.tokenizers import load_tokenizer
from lit_fsdp.models.weights import ModelSource, Weights, open_weights
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.grads import scale_grads
from lit_fsdp.parallel.materialize import Materializer, has_meta
from lit_fsdp.parallel.units import clean_name

_log = logging.getLogger(__name__)


class CausalLMModule(LightningModule):
    """A causal language model; its arguments are the keys of a recipe's ``model`` section (``ModelConfig``)."""

    model: nn.Module | None  # the transformers model; None until it is built
    attn_implementation: str  # of the built model
    cuts_rows = True  # supports splitting rows over the ranks of a context group
    is_preference = False  # whether it trains on pairs of a chosen and a rejected completion
    # with adapters: the tensors that a checkpoint saves, without the base; None: all tensors
    saved_names: set[str] | None = None
    _divided_by = 0  # index of the sum in step_totals that divides the loss

    @takes_fields(ModelConfig)
    def __init__(self, *names: Any, **kwargs: Any) -> None:
        self._init_bases()
        refuse_positional("CausalLMModule", ModelConfig, names)
        kwargs = vars(build(ModelConfig, kwargs, "model"))
        self.config = ModelConfig(**kwargs)  # jsonargparse finds the allowed arguments through this call
        require(self.config.name, "model.name", "no value", "a hub name, folder, GGUF file or config", "set model.name")
        self.model = None
        self._weights: Weights | LoraWeights | None = None
        self._adapter_config: dict[str, Any] | None = None
        self._kept_with_adapter: list[str] = []
        self._base: dict[str, Any] | None = None
        self._decayed: set[str] = set()
        self._hidden: set[str] = set()
        self._num_steps = 0
        self._configured: tuple[LambdaLR, list[dict[str, Any]]] | None = None
        self._saved_lr: float | None = None
        self.stop_votes = [0.0, 0.0]
        # summed over all ranks: STEP_COUNTS, then votes to stop (interrupted, terminated)
        self.step_totals = torch.zeros(len(STEP_COUNTS) + 2, dtype=torch.float64)
        self._window: torch.Tensor | None = None
        self._loss_plan: LossPlan | None = None
        self._eval_metrics: Any = SumMetric(3, eval_means)
        self._sets: list[tuple[str, int]] = []
        self._set_metrics: dict[str, Any] = {}

    def _init_bases(self) -> None:
        # Not in __init__: save_hyperparameters() of a base class after this one would look up every argument of the
        # signature in that frame.
        super().__init__()

    @functools.cached_property
    def source(self) -> ModelSource:
        """Source of config, weights and tokenizer; resolved (and converted) on first use."""
        return resolve_model(self.config)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer with its chat template."""
        return load_tokenizer(self.source, self.config)

    @property
    def eval_metric_names(self) -> tuple[str, ...]:
        """Names of the metrics of validation and test, which are logged after ``val_`` or ``test_``."""
        return tuple(self._eval_metrics.names)

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that the model accepts."""
        return self.source.num_embeddings

    def build(self) -> CausalLMModule:
        """Build the model on meta unless it exists; reads no weights and needs no process group."""
        if self.model is None:
            model, self._adapter_config = build_trainable(self.source.hf_config, self.config, self.source.base)
            self._kept_with_adapter = kept_with_adapters(model, self.config, self.source.overlay is not None)
            self._decayed = {f"model.{name}" for name, param in model.named_parameters() if is_decayed(name, param)}
            self._hidden = {f"model.{name}" for name in hidden_matrices(model)}
            if self._adapter_config is not None:
                trained = {name for name, param in model.named_parameters() if param.requires_grad}
                buffers = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
                self.saved_names = {f"model.{name}" for name in trained | buffers | {*self._kept_with_adapter}}
            self._loss_plan = plan_loss(model, self.config.loss)
            self.attn_implementation = str(model.config._attn_implementation)
            if self.config.attn_implementation is None and not self.attn_implementation.startswith("sdpa"):
                text = "model.attn_implementation: %s, as %s does not work with sdpa"
                _log.info(text, self.attn_implementation, self.source.hf_config.model_type)
            self.model = model
        return self

    def configure_model(self) -> None:
        """Build the model on meta; our strategies load its weights later, for others this method loads them."""
        if self._weights is not None:
            return
        strategy: Any = self._trainer.strategy if self._trainer else None  # None under load_weights
        check_attention(self.config.attn_implementation, strategy.root_device.type if strategy else "cpu")
        model: Any = self.build().model
        if isinstance(strategy, EngineStrategy) and strategy.config.compile:  # else each new pack recompiles
            by_sample(model, False)
            self.attn_implementation = str(model.config._attn_implementation)
        if isinstance(strategy, EngineStrategy) and is_accelerator(strategy.root_device) and self.global_rank == 0:
            compute = strategy.config.precision_config.row.compute
            words = attention_words(self.attn_implementation, self.config.attn_implementation, compute)
            _log.info("attention: %s", words)
        if torch.are_deterministic_algorithms_enabled():  # FlashAttention ignores torch's setting
            os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
        seed = torch.initial_seed() if strategy is None else strategy.broadcast(torch.initial_seed())
        if self._adapter_config is None:
            self._weights = open_weights(self.source, model, seed)
        else:
            self._base = describe_base(self.source, self.config, seed)
            bare = build_on_meta(self.source.hf_config, self.config.attn_implementation, self.config.trust_remote_code)
            device = strategy.root_device if isinstance(strategy, EngineStrategy) else None
            self._weights = LoraWeights(open_weights(self.source, bare, seed), model, seed, device)
        if not isinstance(strategy, EngineStrategy):
            Materializer(self, self.read_tensor, torch.device("cpu")).fill_all()

    def cpu(self) -> Self:
        """Move to the CPU, as Lightning's strategies do at teardown, unless an error left tensors on meta."""
        return self if has_meta(self) else super().cpu()

    def read_tensor(self, module_name: str, module: nn.Module, attribute: str, rows: slice | None) -> torch.Tensor:
        """Read one tensor of the model, or only ``rows`` of it, to materialize the meta model."""
        assert self._weights is not None
        return self._weights.read(module_name.removeprefix("model").removeprefix("."), module, attribute, rows)

    # -- training

    def on_train_start(self) -> None:
        """Discard counts of an unfinished global batch; after a resume, apply the recipe's optimizer options."""
        self._window = None
        if self.trainer.ckpt_path and self._configured is not None:
            scheduler, configured = self._configured
            self._num_steps = self._total_steps(self.config.optim)
            scheduler.base_lrs = [options["initial_lr"] for options in configured]
            live = scheduler.optimizer.param_groups
            for group, options, factor in zip(live, configured, scheduler.lr_lambdas, strict=True):
                group.update({**options, "lr": options["initial_lr"] * factor(scheduler.last_epoch)})
            before, now = self._saved_lr, live[0]["lr"]
            if self.global_rank == 0 and before is not None and not math.isclose(before, now):
                text = "learning rate changes from %.4g to %.4g because model.optim or the training length changed"
                _log.warning(text, before, now)

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the summed loss of this rank's micro-batch, an fp32 scalar; gradients are scaled later."""
        alpha, batch = self.config.neftune_alpha, self.laid_out(batch)
        with embedding_noise(self.model, alpha, batch, self.global_rank) if alpha else nullcontext():
            loss, more = self._forward(batch)
        sums_3 = torch.stack([s.detach().double() for s in (loss.num_tokens, loss.nll_sum, loss.num_correct)])
        counts = torch.cat([sums_3[:2], batch_counts(batch).to(sums_3.device), sums_3[2:], *more])  # as STEP_COUNTS
        self._window = counts if self._window is None else self._window + counts
        return loss.loss_sum / self._loss_divisor

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale the gradients of the global batch from sums to the mean over its supervised tokens, or pairs.

        Also undoes two divisions: the engine divides by the number of ranks, Lightning by ``accumulate_grad_batches``
        (also in a short last window).
        """
        window = self._window  # None: a subclass overrides training_step and relies on Lightning's mean
        counts = torch.zeros(len(STEP_COUNTS), dtype=torch.float64, device=self.device) if window is None else window
        totals = torch.cat([counts, to_device(self.stop_votes, torch.float64, counts.device)])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(totals)
        self.step_totals, self._window = totals, None
        if window is not None:
            undo = self.trainer.world_size * self.trainer.accumulate_grad_batches * self._loss_divisor
            scale_grads(optimizer, (undo / totals[self._divided_by].clamp(min=1)).to(torch.float32))
            for name, value in self._step_metrics(totals).items():
                # our progress bar fetches logged values itself; for others Lightning converts them, which syncs
                is_shown = not getattr(self.trainer.progress_bar_callback, "asks", False)
                self.log(name, value, prog_bar=is_shown and name == "train_loss")
        self.log("lr", torch.tensor(optimizer.param_groups[0]["lr"]))  # Lightning would copy a float to the device

    def _step_metrics(self, totals: torch.Tensor) -> dict[str, torch.Tensor]:
        return step_metrics(totals)

    @property
    def _loss_divisor(self) -> float:
        return float(getattr(self.trainer.strategy, "loss_divisor", 1.0))

    def configure_optimizers(self) -> Any:
        """Build optimizer and schedule; weight decay applies to matrices only, not to biases."""
        optim = self.config.optim
        cls = optimizer_class(optim)
        splits = issubclass(cls, MuonWithAdamW)
        groups: dict[tuple[bool, bool], list[torch.Tensor]] = {(True, True): [], (False, True): [], (False, False): []}
        for name, param in self.named_parameters():
            if param.requires_grad:
                clean = clean_name(name)
                groups[splits and clean in self._hidden, clean in self._decayed].append(param)
        options: list[dict[str, Any]] = []
        for (use_muon, decayed), params in groups.items():
            if params:
                group = {"params": params, "weight_decay": optim.weight_decay * decayed}
                options.append(group | ({"use_muon": use_muon} if splits else {}))
        known = inspect.signature(cls).parameters
        own: dict[str, Any] = {"betas": (optim.beta1, optim.beta2), "eps": optim.eps}
        own["iterates_in"] = "fp32" if self._computes_in_fp32 else "bf16"
        # Adafactor's eps is a pair
        own = {n: value for n, value in own.items() if n in known and np.shape(known[n].default) == np.shape(value)}
        arguments = own | dict(optim.optimizer_args or {})
        if cls is torch.optim.AdamW:
            cls = ShardAdamW
            # Lightning's strategies cannot clip gradients of a fused optimizer
            arguments.setdefault("fused", isinstance(self.trainer.strategy, EngineStrategy))
        try:
            optimizer = cls(options, **{"lr": optim.lr} | arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError("model.optim", f"{optim.optimizer}: {error}", "what its constructor accepts") from error
        total = self._total_steps(optim)
        if optim.schedule != "constant" and total < optim.warmup_steps and self.global_rank == 0:
            text = (
                "the learning rate never reaches model.optim.lr: model.optim.warmup_steps is %d, the run has %d steps"
            )
            _log.warning(text, optim.warmup_steps, total)
        self._num_steps = total
        scheduler = LambdaLR(optimizer, lambda step: schedule_factor(optim, step, self._num_steps))
        options = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
        self._configured = scheduler, options
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def _computes_in_fp32(self) -> bool:
        strategy = self.trainer.strategy
        if isinstance(strategy, EngineStrategy):
            return strategy.config.precision_config.row.compute == "fp32"
        return self.trainer.precision == "32-true"

    def _total_steps(self, optim: OptimConfig) -> int:
        """Optimizer steps of the whole run; needed only by schedules that decay, and by ``warmup_ratio``."""
        trainer = self.trainer
        if optim.schedule == "constant" and not optim.warmup_ratio:
            return max(1, trainer.max_steps)
        total = end_of(trainer)  # infinite: for example a stream, limited by time only
        user = "warmup_ratio needs" if optim.warmup_ratio else f"schedule {optim.schedule} needs to decay"
        allowed = f"max_steps or max_epochs, which {user}"
        require(total < math.inf, "trainer.max_steps", "no end of training", allowed)
        return int(total)

    def counted(self, batch: Any) -> Any:
        """Lay out a batch on the host and add its number of supervised tokens, so that no step syncs for it."""
        given, batch = batch, self.laid_out(batch)
        if batch is not given:  # pinned memory allows an asynchronous copy
            batch = tree_map_only(torch.Tensor, torch.Tensor.pin_memory, batch)
        if isinstance(batch, Mapping) and "labels" in batch:
            return {**batch, NUM_TARGETS: int((targets_here(batch, next_targets(batch)) != IGNORED).sum())}
        return batch

    def laid_out(self, batch: Any) -> Any:
        """Add this rank's part to a batch whose rows a context group shares; best called on the host."""
        if self.context is None or not isinstance(batch, Mapping) or context_of(batch) is not None:
            return batch
        return self.context.cut(batch)

    @property
    def context(self) -> RowParts | None:
        """The ranks that get the same rows and each compute a part of their positions; None without such a group."""
        return getattr(self.trainer.strategy, "context", None) if self._trainer else None

    def _inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return model_inputs(self.laid_out(batch), self.attn_implementation)

    # -- evaluation

    def validation_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch to the metrics."""
        self._evaluate(batch)

    test_step = validation_step

    def on_validation_epoch_start(self) -> None:
        """Begin sums for each named set of ``data.val`` or ``data.test``."""
        find: Any = getattr(getattr(self.trainer, "datamodule", None), "sets_of", lambda split: [])
        self._sets = find("test" if self.trainer.testing else "val")
        self._set_metrics = {name: self._eval_metrics.clone() for name, _ in self._sets}

    on_test_epoch_start = on_validation_epoch_start

    def _add_evaluated(self, batch: Mapping[str, torch.Tensor], sums: torch.Tensor) -> None:
        """Add the sums of a batch to the totals and to its named set; a filler batch belongs to no set."""
        self._eval_metrics.update(sums)
        last = int(batch["row"].max()) if self._sets else 0
        name = next((name for name, end in self._sets if last < end), None)
        if name is not None:
            self._set_metrics[name].update(sums)

    def on_validation_epoch_end(self) -> None:
        """Log loss, perplexity and token accuracy over all supervised tokens of all ranks, and of each named set."""
        stage = "test" if self.trainer.testing else "val"
        for name, metric in self._set_metrics.items():
            self.log_dict({f"{stage}_{kind}/{name}": value for kind, value in metric.compute().items()}, sync_dist=True)
        means = {f"{stage}_{name}": value for name, value in self._eval_metrics.compute().items()}
        self._eval_metrics.reset()
        self.log_dict(means, prog_bar=stage == "val", sync_dist=True)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(
        self, batch: Mapping[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, float]]:
        """Score each row: summed loss in nats, number of supervised tokens and perplexity; skips filler rows."""
        assert self.model is not None
        sums, tokens = sample_losses(self.model, self._inputs(batch), self._loss_plan)
        if self.context is not None and self.context.rank:
            return []  # the first rank of the group returns the scores
        numbers = batch["row"].tolist() if "row" in batch else [None] * len(sums)
        return [
            {"loss_sum": loss, "supervised_tokens": num, "perplexity": math.exp(min(loss / max(1, num), 700))}
            | ({} if row is None else {"row": row})
            for row, loss, num in zip(numbers, sums.tolist(), tokens.tolist(), strict=True)
            if row is None or row >= 0
        ]

    def _evaluate(self, batch: Mapping[str, torch.Tensor]) -> None:
        loss, _ = self._forward(batch)
        sums = (loss.num_tokens, loss.nll_sum, loss.num_correct)
        self._add_evaluated(batch, torch.stack([value.double() for value in sums]))

    def _forward(self, batch: Mapping[str, torch.Tensor]) -> tuple[TokenLoss, list[torch.Tensor]]:
        """Return the loss of a batch and a subclass's own fp64 sums, which are added up over the global batch."""
        assert self.model is not None
        return causal_lm_forward(self.model, self._inputs(batch), self._loss_plan), []

    def last_hidden_states(self, batch: Mapping[str, Any], whole: bool = False) -> torch.Tensor:
        """Return the head's inputs for a batch, (B, T, hidden size), without a graph, to check that packs are isolated.

        With ``whole`` every rank of a context group computes all positions.
        """
        assert self.model is not None
        if whole or self.context is None:
            return last_hidden_states(self.model, batch, self.attn_implementation)
        part_1ND = last_hidden_states(self.model, self.context.cut(batch)[ONE_ROW], self.attn_implementation)
        shape = batch["input_ids"].shape
        return self.context.gathered(part_1ND, 1)[:, : shape.numel()].reshape(*shape, -1)

    def answers(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Generate token ids of the greedy answer to each prompt; all ranks call the model equally often."""
        assert self.model is not None
        in_step = self.trainer.world_size > 1
        return generate_ids(self.model, self.tokenizer, prompts, max_new_tokens, self.device, in_step)

    # -- checkpoints

    def checkpoint_manifest(self) -> dict[str, Any]:
        """Describe how the tensors map to the transformers model, for ``lit-fsdp export``."""
        ties = getattr(self.trainer.strategy, "_ties", {})
        experts = getattr(self._weights, "experts_apart", {})  # empty with adapters: the base has them
        entry = model_entry(self.source, ties, self._adapter_config, self._kept_with_adapter, self._base, experts)
        return {"model": {**entry, "config_overrides": self.config.config_overrides or {}}}

    def check_checkpoint(self, manifest: Manifest) -> None:
        """Refuse a checkpoint with other adapters, base or config overrides, which its tensors do not reveal."""
        entry = manifest.extra.get("model", {})
        check_overrides(entry.get("config_overrides"), self.config.config_overrides, manifest.folder)
        saved = entry.get("base")
        if self.config.lora is not None and self._base is not None and saved is not None:
            self.config.lora.check_checkpoint(manifest)
            check_base(saved, self._base, "model.name", manifest.folder)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **options: Any) -> Self:  # type: ignore[override]
        """Build a module and apply :func:`lit_fsdp.load_weights`; ``options`` as in the recipe's ``model`` section."""
        return load_weights(cls(**options), checkpoint_path)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Apply :meth:`check_checkpoint`, and record the learning rate, which an imported checkpoint lacks."""
        rates = [rate for one in checkpoint.get("lr_schedulers", ()) for rate in one.get("_last_lr", ())]
        self._saved_lr = rates[0] if rates else None
        folder = getattr(self.trainer.strategy, "loaded_checkpoint", None)
        if folder is not None:
            self.check_checkpoint(read_manifest(folder))

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return config, generation config and tokenizer files, which make a checkpoint self-contained for export."""
        return model_files(self.source, self.tokenizer, self.model)
