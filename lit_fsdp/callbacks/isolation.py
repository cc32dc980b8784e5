"""Proof, before the first step, that the samples of a pack do not see each other in the model as it runs here."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.callbacks.csv_log import beside
from lit_fsdp.callbacks.run_record import write_json
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.packing import (
    Worst,
    changed_in,
    moved,
    num_rounds,
    other_ids,
    recut,
    sequence_numbers,
    takes_positions,
)
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.checkpointing import restore_rng, rng_state

_log = logging.getLogger(__name__)
FILE = "isolation.json"
_ROUNDING = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}
"""‖Δ‖ / ‖h‖ allowed where other tokens may change the rounding: experts and fp8 scales take all tokens together."""
_MOVED = {"fp32": 1e-3, "bf16": 0.2, "fp16": 0.1}
"""‖Δ‖ / ‖h‖ allowed between two places of a sample in its pack; positions that never restart exceed it."""


class IsolationProof(Callback):
    """Runs the first packed batch with other tokens in part of its samples, and ends the run if the others notice.

    It uses the live model under its strategy, sharded, in its dtype and compiled if it is, on all ranks together, in
    eval mode and without gradients. Every sample is once left as it is while any given other one is changed (fewest
    forward passes: :func:`lit_fsdp.models.packing.num_rounds`); its last hidden states must stay bit-equal. One more
    pass moves samples to another place of their pack. Random generators, gradients and the mode of every module are
    afterwards what they were, so that a resumed run stays bit-equal. Batches without packs cost nothing.
    """

    proves_isolation = True
    """For the data module, which warns where packed rows are trained on without a proof."""

    def __init__(self) -> None:
        self._done = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Before the first step of this process."""
        self._prove_once(trainer, pl_module, batch)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before the first validation, if nothing was trained."""
        self._prove_once(trainer, pl_module, batch)

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Before the first test batch."""
        self._prove_once(trainer, pl_module, batch)

    def _prove_once(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if self._done:
            return
        self._done = True
        if isinstance(batch, Mapping) and "cu_seq_lens" in batch:
            if not isinstance(trainer.strategy, EngineStrategy):
                if not trainer.is_global_zero:
                    return
                _log.warning(
                    "packed samples under %s: that they do not see each other is not proved; "
                    "lit_fsdp.fsdp_strategy proves it before step 1, also with engine ddp or single",
                    type(trainer.strategy).__name__,
                )
                return
            record = self.prove(trainer, batch)
            if trainer.is_global_zero:
                assert trainer.state.fn is not None
                write_json(Path(trainer.default_root_dir) / beside(FILE, trainer.state.fn.value), record)
                print(_sentence(record), file=sys.stderr)

    def prove(self, trainer: Trainer, batch: Mapping[str, Any]) -> dict[str, Any]:
        """See :func:`prove_isolation`."""
        return prove_isolation(trainer, batch)


def prove_isolation(trainer: Trainer, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured, for ``isolation.json``; collective, with a packed batch on every rank.

    Raises:
        ConfigError: On every rank: samples see each other, or depend on their place in the pack.
    """
    module: Any = trainer.lightning_module
    strategy: Any = trainer.strategy
    backend, kind = module.attn_implementation, module.source.hf_config.model_type
    if not takes_positions(module.model):
        raise _refusal(kind, backend, "its forward takes no position_ids, so nothing tells it where samples begin")
    if batch.get("attention_mask") is not None:
        raise _refusal(
            kind, backend, "the batch has a 2-D attention_mask, with which transformers takes a pack for one"
        )
    started = time.perf_counter()
    batch, was_cut = _with_neighbours(batch)
    with _untouched(strategy, module):
        found = _measure(strategy, module, batch)
    ranks: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(ranks, found)
    compute = strategy.config.precision_config.row.compute
    inexact = _shares_rounding(module, strategy)
    record = {
        "model_type": kind,
        "attn_implementation": backend,
        "engine": strategy.config.engine,
        "compute_dtype": compute,
        "compile": strategy.config.compile,
        "step": int(trainer.global_step),
        "ranks": trainer.world_size,
        "packs": sum(rank["packs"] for rank in ranks),
        "sequences": sum(rank["sequences"] for rank in ranks),
        "samples_cut_in_two_for_it": was_cut,
        "forward_passes": found["passes"],
        "seconds": round(time.perf_counter() - started, 3),
        "largest_change": max(rank["change"] for rank in ranks),
        "largest_change_when_moved": max(rank["moved"] for rank in ranks),
        "bit_equal": all(rank["change"] == 0 for rank in ranks),
        "tolerance": _ROUNDING[compute] if inexact else 0.0,
        "tolerance_because_of": inexact,
        "tolerance_when_moved": _MOVED[compute],
    }
    _judge(record, ranks)
    return record


def _judge(record: Mapping[str, Any], ranks: list[dict[str, Any]]) -> None:
    kind, backend = record["model_type"], record["attn_implementation"]
    rank = max(range(len(ranks)), key=lambda r: ranks[r]["change"])
    if record["largest_change"] > record["tolerance"]:
        if ranks[rank]["repeated"]:
            raise _refusal(kind, backend, "its forward pass is not repeatable here, so that nothing can be proved")
        where = f"sequence {ranks[rank]['sequence']} of {ranks[rank]['sequences']} on rank {rank}"
        by = f"by {record['largest_change']:.1e} of its size (allowed: {record['tolerance']:g})"
        raise _refusal(kind, backend, f"with other tokens in the other samples {where} changes {by}")
    blind = next((r for r, found in enumerate(ranks) if found["blind"] >= 0), None)
    if blind is not None:
        raise _refusal(kind, backend, f"a sample with other tokens has the same hidden states (rank {blind})")
    if record["largest_change_when_moved"] > record["tolerance_when_moved"]:
        by = f"{record['largest_change_when_moved']:.1e} of their size"
        raise _refusal(kind, backend, f"its states depend on a sample's place in the pack, by {by}")


def _refusal(kind: str, backend: str, reason: str) -> ConfigError:
    others = [name for name in ("sdpa", "eager", "flash_attention_2") if name != backend]
    return ConfigError(
        "data.packing",
        f"true, but {kind} with attn_implementation {backend} does not keep the samples of a pack apart: {reason}",
        "a model and an attention under which no sample of a pack depends on another",
        f"set data.packing: false, or try model.attn_implementation: {' or '.join(others)}",
    )


def _with_neighbours(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The batch; if no pack on any rank holds two sequences, with its sequences cut in two."""
    alone = torch.tensor(float(len(batch["cu_seq_lens"]) == len(batch["input_ids"]) + 1))
    alone = alone.to(batch["input_ids"].device)
    dist.all_reduce(alone, op=dist.ReduceOp.MIN)
    return (recut(batch), True) if alone and batch["input_ids"].shape[1] > 1 else (batch, False)


def _measure(strategy: Any, module: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    ids, positions = batch["input_ids"], batch["position_ids"]
    numbers = sequence_numbers(positions)
    count = int(numbers.max()) + 1
    largest = torch.tensor(count, device=ids.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    rounds = num_rounds(int(largest))
    changed, other = changed_in(count, rounds).to(ids.device), other_ids(ids)
    states = _states(strategy, module, batch)
    worst, place = Worst(), Worst()
    for changed_N in changed:
        mixed = torch.where(changed_N[numbers], other, ids)
        worst.compare(states, _states(strategy, module, {**batch, "input_ids": mixed}), numbers, changed_N)
    order = moved(positions)
    elsewhere = {**batch, "input_ids": ids.gather(1, order), "position_ids": positions.gather(1, order)}
    elsewhere["cu_seq_lens"] = _borders(elsewhere["position_ids"])
    after = _states(strategy, module, elsewhere)
    back = torch.empty_like(after).scatter_(1, order[..., None].expand_as(after), after)
    place.compare(states, back, numbers, torch.zeros(count, dtype=torch.bool))
    differs = torch.tensor(float(worst.difference > 0), device=ids.device)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    again = bool(differs) and not torch.equal(states, _states(strategy, module, batch))
    return {
        "packs": len(ids),
        "sequences": count,
        "passes": rounds + 2 + int(differs),
        "change": worst.difference,
        "sequence": worst.sequence,
        "blind": worst.blind,
        "moved": place.difference,
        "repeated": again,
    }


def _borders(positions_BT: torch.Tensor) -> torch.Tensor:
    numbers = sequence_numbers(positions_BT).flatten()
    sizes = numbers.bincount()
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)


def _states(strategy: Any, module: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Last hidden states (B, T, D), through the engine's own hooks and autocast, as a step would run."""
    with strategy.precision_plugin.train_step_context(), torch.no_grad():
        if strategy.model is module:
            return module.last_hidden_states(batch)
        return strategy._forward_redirection(strategy.model, module, "last_hidden_states", batch)


@contextmanager
def _untouched(strategy: Any, module: torch.nn.Module) -> Any:
    """Eval mode inside; afterwards random generators, modes and the counts of ``dtypes.json`` are as before."""
    counted = {what: dict(found) for what, found in strategy.contract.realised.items()}
    generators, modes = rng_state(strategy.root_device), {child: child.training for child in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for child, training in modes.items():
            child.training = training
        restore_rng(generators, strategy.root_device)
        strategy.contract.realised = counted


def _shares_rounding(module: Any, strategy: Any) -> str | None:
    """What makes the rounding of one token depend on others, if anything does."""
    if strategy.config.precision_config.mode == "fp8":
        return "fp8 scales"
    config = module.source.hf_config.get_text_config().to_dict()
    experts = [value for name, value in config.items() if "experts" in name and isinstance(value, int)]
    return "experts" if max(experts, default=0) > 1 else None


def _sentence(record: Mapping[str, Any]) -> str:
    if record["bit_equal"]:
        result = "bit-equal whatever the others hold"
    else:
        change, allowed = record["largest_change"], record["tolerance"]
        result = f"equal to {change:.1e} (allowed for {record['tolerance_because_of']}: {allowed:g})"
    packs = f"{record['sequences']} sequences in {record['packs']} packs on {record['ranks']} rank(s)"
    how = ", ".join(str(record[key]) for key in ("model_type", "attn_implementation", "compute_dtype", "engine"))
    cost = f"{record['forward_passes']} forward passes in {record['seconds']:.1f} s"
    return f"isolation proved: {packs}, each {result}; {how}; {cost}"
