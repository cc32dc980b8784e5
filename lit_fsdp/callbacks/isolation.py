"""Proof, before the first step, that the samples of a pack do not attend to each other in the live model."""

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
from lit_fsdp.models.context import mixes_by_attention
from lit_fsdp.models.packing import measure_isolation, proof_batch, tokens_of_one_frequency, tokens_of_one_scale
from lit_fsdp.models.preference import evaluating
from lit_fsdp.parallel.base import EngineStrategy

_log = logging.getLogger(__name__)
_ROUNDING = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}
"""‖Δ‖ / ‖h‖ allowed if other tokens may change the rounding: experts and fp8 scales depend on all tokens.

The state that a recurrent layer carries into the next sample may be as small. Models with such layers must therefore
also stay bit-equal when samples only swap places.
"""
_MOVED = {"fp32": 1e-3, "bf16": 0.2, "fp16": 0.1}
"""‖Δ‖ / ‖h‖ allowed between two positions of a sample in its pack; positions that never restart exceed it."""


class IsolationProof(Callback):
    """Packs a few tokens of the first batch, changes some of the samples, and ends the run if the others change.

    It runs the live, sharded model in its dtype (not compiled: that would compile twice), on all ranks together, in
    eval mode and without gradients: six forward passes of 64 tokens. The last hidden states of a sample must stay
    bit-equal for any neighbors. Random generators and modes are restored afterwards. The proof is cached in the cache
    folder by model configuration, attention, dtype, device and versions.

    Pairs of completions share a row, and their prompt, only if their isolation is proved before anything is
    computed from them; otherwise they stay padded rows.
    """

    proves_isolation = True
    """For the data module, which warns if packed rows are trained on without a proof."""

    _is_done = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lay out pairs of completions in the first way that is proved, before anything is computed from them."""
        module: Any = pl_module
        strategy: Any = trainer.strategy
        packs_pairs = getattr(module, "is_preference", False) and isinstance(strategy, EngineStrategy)
        if not packs_pairs or module.pair_rows is not None:
            return
        *ways, module.pair_rows = module.ways_to_lay_out()
        ids = torch.linspace(0, module.num_embeddings - 1, 64, device=strategy.root_device).long()
        for way in ways:
            try:
                self._prove_once(trainer, {"input_ids": ids}, way == "shared")
            except ConfigError as refused:
                if trainer.is_global_zero:
                    reason = str(refused.given).removeprefix("true, but ")
                    _log.warning("pairs are not packed into one row with %s prompts: %s", way, reason)
            else:
                module.pair_rows = way
                break
        strategy.reshard()

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Prove isolation before the first step of this process, or before the first validation or test."""
        module: Any = pl_module
        is_packed = isinstance(batch, Mapping) and "cu_seq_lens" in batch
        is_cut = isinstance(batch, Mapping) and getattr(module, "context", None) is not None
        if self._is_done or not (is_packed or is_cut):
            return
        self._is_done = True
        if not isinstance(trainer.strategy, EngineStrategy) or not hasattr(module, "last_hidden_states"):
            if trainer.is_global_zero:
                text = "isolation of packed samples is proved only for CausalLMModule with fsdp_strategy"
                _log.warning("%s, not for %s", text, type(module).__name__)
            return
        if is_packed and batch.get("attention_mask") is not None:
            raise _refusal(module, "the batch has a 2-D attention_mask, so transformers treats the pack as one sample")
        self._prove_once(trainer, batch)

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    def _prove_once(self, trainer: Trainer, batch: Mapping[str, Any], shares: bool = False) -> None:
        """Prove isolation unless a proof is cached, and write it to the run folder."""
        module: Any = trainer.lightning_module
        self._check_length(trainer, module, batch)
        path, is_fixed = _remembered_at(trainer.strategy, module, shares), not module.config.trust_remote_code

        def read() -> Any:
            with contextlib.suppress(OSError, ValueError):  # then prove it again
                return json.loads(path.read_bytes()) if is_fixed else None

        remembered = Ranks().first("looking for a cached proof", read)
        record = remembered or self.prove(trainer, batch, shares)
        if trainer.is_global_zero:
            if is_fixed and not remembered:
                with contextlib.suppress(CheckpointError):  # without a cache the next run repeats it
                    write_json(path, record)
            verb = trainer.state.fn.value if trainer.state.fn else "fit"
            name = "isolation.json" if verb == "fit" else f"{verb}-isolation.json"
            write_json(Path(trainer.default_root_dir) / name, record)
            text = "isolation of packed samples verified for {model_type}, {attn_implementation}, {compute_dtype}: "
            text += "other samples change a sample by {largest_change:.1e} of its norm (allowed: {tolerance:g})"
            print(text.format(**record) + ("; pairs share their prompts" if shares else ""), file=sys.stderr)

    @staticmethod
    def _check_length(trainer: Trainer, module: Any, batch: Mapping[str, Any]) -> None:
        """Reject rows that are longer than the length up to which the proof, with its few tokens, is valid."""
        config = getattr(getattr(trainer, "datamodule", None), "config", None)
        sides = 2 if getattr(module, "is_preference", False) else 1
        length, rows = (getattr(config, name, None) or 1 for name in ("max_seq_length", "micro_batch_size"))
        longest = max(batch["input_ids"].numel(), sides * length * rows)
        if longest > (reach := tokens_of_one_scale(module)):
            raise _refusal(module, f"beyond {reach:.0f} tokens it scales queries by their position in the row")
        is_row = "cu_seq_lens" in batch or batch.keys() == {"input_ids"}  # of packed samples, or pairs
        if is_row and length > (reach := tokens_of_one_frequency(module)):
            text = f"beyond {reach:.0f} tokens (data.max_seq_length) a sample sets the rotary frequencies of all others"
            raise _refusal(module, text)

    def prove(self, trainer: Trainer, batch: Mapping[str, Any], shares: bool = False) -> dict[str, Any]:
        """Measure isolation of samples, or of pairs with a shared prompt, for ``isolation.json``; collective.

        Raises:
            ConfigError: On every rank: samples attend to each other, or depend on their position in the pack.
        """
        module: Any = trainer.lightning_module
        strategy: Any = trainer.strategy

        def states(batch: Mapping[str, Any], *whole: bool) -> torch.Tensor:
            return run_aside(strategy, module, "last_hidden_states", batch, *whole)

        split = 0.0
        with untouched(strategy, module):
            found = gathered(measure_isolation(states, batch["input_ids"], shares))
            if strategy.context is not None:
                one = proof_batch(batch["input_ids"].flatten()[:64].repeat(64)[:64][None])
                row = {"input_ids": one["input_ids"], "attention_mask": torch.ones_like(one["input_ids"])}
                together, alone = states(one).double(), states(row, True).double()
                split = max(gathered(float((together - alone).norm() / alone.norm())))
        change, moved = max(one.change for one in found), max(one.moved for one in found)
        exchanged = 0.0 if mixes_by_attention(module.model) else max(one.exchanged for one in found)
        precision, config = strategy.config.precision_config, module.source.hf_config.get_text_config().to_dict()
        experts = [value for name, value in config.items() if "experts" in name and isinstance(value, int)]
        compute, shares_rounding = precision.row.compute, precision.mode == "fp8" or max(experts, default=0) > 1
        tolerance = _ROUNDING[compute] if shares_rounding else 0.0
        if change > tolerance:
            by = f"{change:.1e} of its norm (allowed: {tolerance:g})"
            raise _refusal(module, f"a sample changes by {by} when the tokens of other samples change")
        if exchanged > 0:
            raise _refusal(module, f"a sample changes by {exchanged:.1e} of its norm when other samples swap places")
        if any(one.is_blind for one in found):
            raise _refusal(module, "the hidden states of a sample do not depend on its tokens")
        if not split <= _MOVED[compute]:
            given = f"{strategy.context.degree}, with which {module.source.hf_config.model_type} gives other results"
            given += f": the hidden states of a row change by {split:.1e} of their norm"
            raise ConfigError(f"{strategy.path}.context_parallel", given, "1")
        if moved > _MOVED[compute]:
            raise _refusal(
                module, f"hidden states depend on the position in the pack, or on packing, by {moved:.1e} of their norm"
            )
        return {
            "model_type": module.source.hf_config.model_type,
            "attn_implementation": module.attn_implementation,
            "engine": strategy.config.engine,
            "compute_dtype": compute,
            "shares_prompts": shares,
            "largest_change": change,
            "tolerance": tolerance,
            "largest_change_when_others_swap": exchanged,
            "largest_change_when_moved": moved,
            "tolerance_when_moved": _MOVED[compute],
        }


def _refusal(module: Any, reason: str) -> ConfigError:
    kind, backend = module.source.hf_config.model_type, module.attn_implementation
    return ConfigError(
        "data.packing",
        f"true, but {kind} with attn_implementation {backend} does not isolate the samples of a pack: {reason}",
        "a model and an attention backend that isolate the samples of a pack",
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
        *("with swaps", torch.__version__, transformers.__version__, lit_fsdp.__version__),
    ]
    return cache_root() / "isolation" / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}.json"


def run_aside(strategy: Any, module: Any, method: str, *args: Any) -> Any:
    """Call a method of the module outside of a step, with the engine's hooks and autocast; all ranks together."""
    stance: Any = "force_eager" if strategy.config.compile else "default"
    with torch.compiler.set_stance(stance), strategy.precision_plugin.train_step_context(), torch.no_grad():
        if strategy.model is module:
            return getattr(module, method)(*args)
        return strategy._forward_redirection(strategy.model, module, method, *args)


@contextlib.contextmanager
def untouched(strategy: Any, module: torch.nn.Module) -> Iterator[None]:
    """Use eval mode inside; restore random generators, modes and the counts of ``dtypes.json`` afterwards."""
    counted = {what: dict(found) for what, found in strategy.contract.realized.items()}
    device = strategy.root_device
    own = torch.random.fork_rng([device] if is_accelerator(device) else [], device_type=device.type)
    with evaluating(module), isolate_rng(include_cuda=False), own:
        yield
    strategy.contract.realized = counted
