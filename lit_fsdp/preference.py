"""The LightningModule for preference training: :class:`CausalLMModule` with a loss of pairs and its reference model.

The loss of a global batch is (sum over its pairs) / (their number), for any number of ranks, accumulation and padding.
The reference is the model before training; with adapters, their base. Reference log-probabilities of all pairs are
computed once before the first step and cached. Where that is impossible, the base computes them in a second forward
pass of every batch.
"""

import functools
import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lit_fsdp.config.model import PreferenceModelConfig
from lit_fsdp.config.sections import build, refuse_positional, takes_fields
from lit_fsdp.data.order import FILLER
from lit_fsdp.data.sources import content_hash
from lit_fsdp.errors import require
from lit_fsdp.host import cache_root, is_first_process, make_once
from lit_fsdp.metrics.step_metrics import STEP_COUNTS, SumMetric
from lit_fsdp.models.adapter_names import base_name, is_adapter
from lit_fsdp.models.base import weights_hash
from lit_fsdp.models.loss import ONE_ROW, TokenLoss, sample_losses
from lit_fsdp.models.packing import pairs_in_one_row, rows_of_pairs
from lit_fsdp.models.preference import PAIR_COUNTS, adapters_off, evaluating, pair_metrics, preference_forward
from lit_fsdp.module import CausalLMModule
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.mesh import SHARD
from lit_fsdp.parallel.units import clean_name

_log = logging.getLogger(__name__)


class PreferenceModule(CausalLMModule):
    """Trains on pairs of a chosen and a rejected completion; its arguments are the ``model`` section of a recipe.

    Logs :func:`~lit_fsdp.models.preference.pair_metrics` with the prefix ``train_`` or ``val_``.

    Args:
        **kwargs: The fields of :class:`lit_fsdp.config.model.PreferenceModelConfig`.
    """

    config: PreferenceModelConfig
    is_preference = True
    # layout of pairs, one of ways_to_lay_out(), set by IsolationProof; None: not checked, so padded
    pair_rows: str | None = None
    _divided_by = len(STEP_COUNTS)

    @takes_fields(PreferenceModelConfig)
    def __init__(self, *names: Any, **kwargs: Any) -> None:
        refuse_positional("PreferenceModule", PreferenceModelConfig, names)
        kwargs = vars(build(PreferenceModelConfig, kwargs, "model"))
        super().__init__(**{name: value for name, value in kwargs.items() if name != "preference"})
        self.config = PreferenceModelConfig(**kwargs)  # jsonargparse finds the allowed arguments through this call
        means = functools.partial(pair_metrics, config=self.config.preference)
        self._eval_metrics = SumMetric(len(PAIR_COUNTS), means)
        self._references: dict[str, torch.Tensor] = {}
        self._identity: str | None = None

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of the chosen and rejected completions of a batch, fp32 (2, P), without a graph."""
        assert self.model is not None
        sums_B, _ = sample_losses(self.model, self._inputs(batch), self._loss_plan)
        return -sums_B.view(2, -1)

    def ways_to_lay_out(self) -> tuple[str, ...]:
        """List layouts as :func:`~lit_fsdp.models.packing.rows_of_pairs`; compiled code gets padded rows only.

        Other row lengths would recompile it. Context groups also start from padded rows, which they join and split.
        """
        compiles = self.trainer.strategy.config.compile  # type: ignore[attr-defined]
        is_fixed = compiles or self.config.neftune_alpha or self.context is not None
        return ("padded",) if is_fixed else rows_of_pairs(self.model, self.attn_implementation)

    def laid_out(self, batch: Any) -> Any:
        """Join the pairs of a batch in one row if ``pair_rows`` says so; best called on the host."""
        is_known = isinstance(batch, Mapping) and ONE_ROW not in batch and {"counts", "attention_mask"} <= batch.keys()
        in_one_row = is_known and self.pair_rows in ("shared", "whole")
        return super().laid_out(pairs_in_one_row(batch, self.pair_rows == "shared") if in_one_row else batch)

    def _forward(self, batch: Mapping[str, torch.Tensor]) -> tuple[TokenLoss, list[torch.Tensor]]:
        assert self.model is not None
        assert self._loss_plan is not None
        config, inputs = self.config.preference, self._inputs(batch)
        reference = self._reference(batch) if config.has_reference else None
        loss, sums = preference_forward(self.model, inputs, config, self._loss_plan, reference)
        return loss, [sums]

    def _step_metrics(self, totals: torch.Tensor) -> dict[str, torch.Tensor]:
        means = pair_metrics(totals[len(STEP_COUNTS) :], self.config.preference)
        return {f"train_{name}": value for name, value in means.items()}

    def _evaluate(self, batch: Mapping[str, torch.Tensor]) -> None:
        self._add_evaluated(batch, *self._forward(batch)[1])

    def predict_step(
        self, batch: Mapping[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> list[dict[str, float]]:
        """Score each pair: summed log-probabilities of both completions in nats; skips fillers."""
        chosen, rejected = self(batch).tolist()
        rows = zip(batch["row"].tolist(), chosen, rejected, strict=True)
        return [{"row": row, "logp_chosen": c, "logp_rejected": r} for row, c, r in rows if row >= 0]

    # -- the reference

    def _reference(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities under the reference model, (2, P)."""
        assert self.model is not None
        split = "train" if self.trainer.training else "test" if self.trainer.testing else "val"
        if self._has_base and split not in self._references:
            with adapters_off(self.model), evaluating(self.model):
                return self(batch)
        return self._references[split][:, batch["row"]]

    @functools.cached_property
    def _has_base(self) -> bool:
        """Whether only adapters are trained, so that the base is still the reference model."""
        names = [name for name, param in self.named_parameters() if param.requires_grad]
        return self.config.lora is not None and all(map(is_adapter, names))

    def on_fit_start(self) -> None:
        """Compute reference log-probabilities unless they are cached; our strategies load a checkpoint after this."""
        self._references.clear()
        if isinstance(self.trainer.strategy, EngineStrategy) or not self.trainer.ckpt_path:
            self._identity = None  # Lightning's strategies have already loaded the checkpoint
        for split in ("train", "val"):
            self._refer_to(split)

    def on_validation_start(self) -> None:
        """Compute them for the evaluated split; not inside a step, because this frees gathered parameters."""
        self._refer_to("test" if self.trainer.testing else "val")

    on_test_start = on_validation_start

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the identity of the reference model, so that the checkpoint can be validated."""
        checkpoint["reference"] = self._identity

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the identity of the reference model."""
        super().on_load_checkpoint(checkpoint)
        self._identity = self._identity or checkpoint.get("reference")

    def _refer_to(self, split: str) -> None:
        """Load or compute log-probabilities of a split, fp32 (2, pairs); adapters: if all are used. Collective."""
        if not self.config.preference.has_reference or split in self._references:
            return
        assert self.model is not None
        field, loss = "model.preference.loss", self.config.preference.loss
        fix = "train adapters (model.lora), or set model.preference.loss: orpo | simpo, which need no reference"
        data: Any = getattr(self.trainer, "datamodule", None)
        is_numbered = hasattr(data, "in_order") and not (split == "train" and data.config.streaming)
        if self._has_base and not is_numbered:
            return
        require(is_numbered, field, loss, "numbered rows: a CausalLMDataModule without streaming", fix)
        rows = data.in_order(split)
        if rows is None:
            return
        loader, num_pairs, fingerprint = rows
        most = self.trainer.max_steps * data.config.global_batch_size if split == "train" else -1
        if self._has_base and 0 <= most < num_pairs:
            return
        strategy: Any = self.trainer.strategy
        if self._has_base or self._identity is None:
            self._identity = weights_identity(self, strategy, self._has_base)
        row = getattr(getattr(strategy, "config", None), "precision_config", self.trainer.precision)
        root = Path(data.config.cache_dir).expanduser() if data.config.cache_dir else cache_root()
        lora = self.config.lora  # weights_identity covers packed weights but not their scales
        quantized = [lora.quantize, lora.double_quantization] if lora is not None and lora.quantize else []
        made_with = [fingerprint, self._identity, self._origin(), str(row), *quantized]
        folder = root / "reference" / content_hash(made_with)
        if not strategy.reduce_boolean_decision(folder.is_dir()):
            given = f"{loss} with data.{split}, which has no log-probabilities of the model before training"
            is_untrained = self._has_base or self._identity == weights_identity(self, strategy)
            require(is_untrained, field, given, "the rows of data.train and data.val of the run", fix)
            if is_first_process():
                _log.info("%s: computing reference log-probabilities of %d pairs", field, num_pairs)
            found = torch.zeros(2, num_pairs, device=strategy.root_device)
            without = adapters_off(self.model) if self._has_base else nullcontext()
            with evaluating(self), without, self.trainer.precision_plugin.forward_context():
                for batch in loader:
                    is_row, logps = batch["row"] != FILLER, self(strategy.batch_to_device(batch))
                    found[:, batch["row"][is_row]] = logps[:, is_row].float()
            if self.context is not None:  # its ranks have the same rows
                found *= int(self.context.rank == 0)
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(found)
            if isinstance(strategy, EngineStrategy):
                strategy.reshard()  # a checkpoint is loaded into shards
            logps_2P = found.cpu().numpy()
            make_once(folder, lambda made: np.save(made / "logps.npy", logps_2P), f"reference of data.{split}")
        self._references[split] = torch.from_numpy(np.load(folder / "logps.npy")).to(strategy.root_device)

    def _origin(self) -> list[Any]:
        """What sums of the weights do not show: the order of values in files, and the settings of the model."""
        config: Any = self.model.config  # type: ignore[union-attr]
        volatile = ("transformers_version", "dtype", "use_cache")
        # without defaults, of which a later transformers may have more
        settings = {k: v for k, v in config.to_diff_dict().items() if k[0] != "_" and k not in volatile}
        files = self.source.weights_folder
        return [files and weights_hash(files), json.dumps(settings, sort_keys=True, default=str)]


def weights_identity(module: torch.nn.Module, strategy: Any, of_base: bool = False) -> str:
    """Hash the weights, or only the base below adapters, equally for all ranks and engines; collective."""
    found = {clean_name(name): param.detach() for name, param in module.named_parameters()}
    if of_base:
        found = {base_name(name): param for name, param in found.items() if not is_adapter(name)}
    named = sorted(found.items())
    parts = [getattr(param, "_local_tensor", param).reshape(-1).view(torch.uint8) for _, param in named]
    sums = torch.stack([part.sum(dtype=torch.int64) for part in parts]).to(strategy.root_device)
    if isinstance(strategy, EngineStrategy):
        dist.all_reduce(sums, group=strategy.mesh.get_group(SHARD))
    return content_hash([[name for name, _ in named], sums.tolist()])
