"""Proof, before the first step, that the samples of a row do not see each other in the model as it runs here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

import lit_fsdp
from lit_fsdp.callbacks.records import gathered, write_json
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.host import cache_root
from lit_fsdp.metrics.hardware import device_name, is_accelerator
from lit_fsdp.models.packing import measure_isolation, proof_batch
from lit_fsdp.models.preference import evaluating
from lit_fsdp.parallel.base import EngineStrategy

_log = logging.getLogger(__name__)
_ROUNDING = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}
"""‖Δ‖ / ‖h‖ allowed where other tokens may change the rounding: experts and fp8 scales take all tokens together."""
_MOVED = {"fp32": 1e-3, "bf16": 0.2, "fp16": 0.1}
"""‖Δ‖ / ‖h‖ allowed between two positions of a sample in its pack; positions that never restart exceed it."""


class IsolationProof(Callback):
    """Packs a few of the first batch's tokens, changes some of the samples, and ends the run if the others notice.

    It uses the live model under its strategy, sharded and in its dtype (not compiled: that would compile twice), on all
    ranks together, in eval mode and without gradients: four forward passes of 64 tokens. The last hidden states of a
    sample must stay bit-equal whatever its neighbors hold. Afterwards random generators and modes are what they were.
    What was proved is remembered in the cache folder by model configuration, attention, dtype, device and versions.

    Pairs of completions go into one row once that is proved, and share prompts where that is, before anything is
    computed of them; they stay padded rows where it is not.
    """

    proves_isolation = True
    """For the data module, which warns where packed rows are trained on without a proof."""

    _is_done = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay pairs of completions out in the first way that is proved, before anything is computed of them."""
        module: Any = pl_module
        strategy: Any = trainer.strategy
        is_asked = getattr(module, "is_preference", False) and isinstance(strategy, EngineStrategy)
        if not is_asked or module.pair_rows is not None:
            return
        *ways, module.pair_rows = module.ways_to_lay_out()
        ids = torch.linspace(0, module.num_embeddings - 1, 64, device=strategy.root_device).long()
        for way in ways:
            try:
                self._prove_once(trainer, {"input_ids": ids}, way == "shared")
            except ConfigError as refused:
                if trainer.is_global_zero:
                    reason = str(refused.given).removeprefix("true, but ")
                    _log.warning("pairs do not go into one row with %s prompts: %s", way, reason)
            else:
                module.pair_rows = way
                break
        strategy.reshard()

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Prove it before the first step of this process, or the first validation or test if nothing is trained."""
        module: Any = pl_module
        is_packed = isinstance(batch, Mapping) and "cu_seq_lens" in batch
        is_cut = isinstance(batch, Mapping) and getattr(module, "context", None) is not None
        if self._is_done or not (is_packed or is_cut):
            return
        self._is_done = True
        if not isinstance(trainer.strategy, EngineStrategy) or not hasattr(module, "last_hidden_states"):
            if trainer.is_global_zero:
                text = "that packed samples do not see each other is proved only for CausalLMModule under fsdp_strategy"
                _log.warning("%s, not for %s", text, type(module).__name__)
            return
        if is_packed and batch.get("attention_mask") is not None:
            raise _refusal(module, "the batch has a 2-D attention_mask, with which transformers takes a pack for one")
        self._prove_once(trainer, batch)

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    def _prove_once(self, trainer: Trainer, batch: Mapping[str, Any], shares: bool = False) -> None:
        """Prove it, unless it is remembered, and note it in the run folder."""
        module: Any = trainer.lightning_module
        path, is_fixed = _remembered_at(trainer.strategy, module, shares), not module.config.trust_remote_code

        def read() -> Any:
            with contextlib.suppress(OSError, ValueError):  # it is proved again
                return json.loads(path.read_bytes()) if is_fixed else None

        remembered = Ranks().first("looking for an earlier proof", read)
        record = remembered or self.prove(trainer, batch, shares)
        if trainer.is_global_zero:
            if is_fixed and not remembered:
                with contextlib.suppress(CheckpointError):  # a cache that cannot be written costs the next run a second
                    write_json(path, record)
            verb = trainer.state.fn.value if trainer.state.fn else "fit"
            name = "isolation.json" if verb == "fit" else f"{verb}-isolation.json"
            write_json(Path(trainer.default_root_dir) / name, record)
            text = "isolation proved for {model_type}, {attn_implementation}, {compute_dtype}: with other neighbors a "
            text += "packed sample changes by {largest_change:.1e} of its size (allowed: {tolerance:g})"
            print(text.format(**record) + ("; pairs share their prompts" if shares else ""), file=sys.stderr)

    def prove(self, trainer: Trainer, batch: Mapping[str, Any], shares: bool = False) -> dict[str, Any]:
        """Return what was measured, for ``isolation.json``, of samples or of pairs with a shared prompt; collective.

        Raises:
            ConfigError: On every rank: samples see each other, or depend on their position in the pack.
        """
        module: Any = trainer.lightning_module
        strategy: Any = trainer.strategy

        def states(batch: Mapping[str, Any], *whole: bool) -> torch.Tensor:
            return run_aside(strategy, module, "last_hidden_states", batch, *whole)

        split = 0.0
        with untouched(strategy, module):
            found = gathered(trainer, measure_isolation(states, batch["input_ids"], shares))
            if strategy.context is not None:
                one = proof_batch(batch["input_ids"].flatten()[:64].repeat(64)[:64][None])
                together, alone = states(one).double(), states(one, True).double()
                split = max(gathered(trainer, float((together - alone).norm() / alone.norm())))
        change, moved = max(one.change for one in found), max(one.moved for one in found)
        precision, config = strategy.config.precision_config, module.source.hf_config.get_text_config().to_dict()
        experts = [value for name, value in config.items() if "experts" in name and isinstance(value, int)]
        compute, shares_rounding = precision.row.compute, precision.mode == "fp8" or max(experts, default=0) > 1
        tolerance = _ROUNDING[compute] if shares_rounding else 0.0
        if change > tolerance:
            by = f"{change:.1e} of its size (allowed: {tolerance:g})"
            raise _refusal(module, f"with other tokens in the other samples one changes by {by}")
        if any(one.is_blind for one in found):
            raise _refusal(module, "a sample with other tokens has the same hidden states")
        if not split <= _MOVED[compute]:
            given = f"{strategy.context.degree}, but then {module.source.hf_config.model_type} computes something else"
            given += f": the states of a row change by {split:.1e} of their size"
            raise ConfigError(f"{strategy.path}.context_parallel", given, "1")
        if moved > _MOVED[compute]:
            raise _refusal(module, f"its states depend on a sample's place in the pack, by {moved:.1e} of their size")
        return {
            "model_type": module.source.hf_config.model_type,
            "attn_implementation": module.attn_implementation,
            "engine": strategy.config.engine,
            "compute_dtype": compute,
            "shares_prompts": shares,
            "largest_change": change,
            "tolerance": tolerance,
            "largest_change_when_moved": moved,
            "tolerance_when_moved": _MOVED[compute],
        }


def _refusal(module: Any, reason: str) -> ConfigError:
    kind, backend = module.source.hf_config.model_type, module.attn_implementation
    return ConfigError(
        "data.packing",
        f"true, but {kind} with attn_implementation {backend} does not keep the samples of a pack apart: {reason}",
        "a model and an attention under which no sample of a pack depends on another",
        "set data.packing: false, or try another model.attn_implementation",
    )


def _remembered_at(strategy: Any, module: Any, shares: bool) -> Path:
    device = strategy.root_device
    parts = [
        module.source.hf_config.to_json_string(use_diff=False),
        module.attn_implementation,
        strategy.config.precision_config.mode,
        device_name(device),
        *(["shared prompts"] if shares else []),
        *([strategy.context.degree, strategy.context.method] if strategy.context else []),
        *(torch.__version__, transformers.__version__, lit_fsdp.__version__),
    ]
    return cache_root() / "isolation" / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json"


def run_aside(strategy: Any, module: Any, method: str, *args: Any) -> Any:
    """A method of the module outside of every step, through the engine's own hooks and autocast; all ranks together."""
    stance: Any = "force_eager" if strategy.config.compile else "default"
    with torch.compiler.set_stance(stance), strategy.precision_plugin.train_step_context(), torch.no_grad():
        if strategy.model is module:
            return getattr(module, method)(*args)
        return strategy._forward_redirection(strategy.model, module, method, *args)


@contextlib.contextmanager
def untouched(strategy: Any, module: torch.nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards random generators, modes and the counts of ``dtypes.json`` are as before."""
    counted = {what: dict(found) for what, found in strategy.contract.realized.items()}
    device = strategy.root_device
    own = torch.random.fork_rng([device] if is_accelerator(device) else [], device_type=device.type)
    with evaluating(module), isolate_rng(include_cuda=False), own:
        yield
    strategy.contract.realized = counted
