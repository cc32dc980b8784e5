"""Which choices of a recipe fit a GPU, which of them is fastest and why, and what would take less memory."""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.config.data import DEFAULT_BATCH
from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.run import RULES, STRATEGY, RunConfig
from lit_fsdp.config.strategy import ActivationMode
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import EXIT_DIR
from lit_fsdp.metrics.hardware import Gpu
from lit_fsdp.plan.memory import (
    HOST_USABLE,
    OVERHEAD_BYTES,
    USABLE,
    expert_degree,
    host_memory,
    least_bytes,
    rank_memory,
    step_time,
)

_LORA = LoraConfig(target_modules="all-linear")
_QLORA = dataclasses.replace(_LORA, quantize="nf4")
_Tried = dict[str, Any]
_WHOLE = {"sharding": "full_shard", "shard_degree": None, "replicate_degree": None}
_LONG = 16_384  # tokens of rows from which on ranks that share them are looked at


@dataclass(frozen=True)
class Choice:
    """One way to run a recipe."""

    run: RunConfig
    changes: dict[str, Any]
    """Keys of the recipe that are other ones, with their values."""

    @property
    def words(self) -> str:
        """Engine, sharding, activation checkpointing and the like in a few words."""
        strategy, lora, mode = self.run.strategy, self.run.model.lora, self.run.strategy.activation_config.mode
        parts = [
            strategy.engine,
            strategy.sharding if strategy.is_sharded else "",
            f"{strategy.context_config.degree} ranks share rows" if strategy.context_config.degree > 1 else "",
            f"experts over {strategy.expert_parallel} ranks" if strategy.expert_parallel > 1 else "",
            f"recompute {mode}" if mode != "none" else "",
            "cpu_offload" if strategy.offloads else "",
            "" if lora is None else f"QLoRA ({lora.quantize})" if lora.quantize else "LoRA",
        ]
        return ", ".join(filter(None, parts))


def flags_of(changes: Mapping[str, Any]) -> list[str]:
    """Changes of a recipe, to be pasted behind the command of a run."""
    return [f"--{key} {value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]


def with_rows(run: RunConfig, rows: int) -> RunConfig:
    """The recipe with another micro-batch; its accumulation follows."""
    data = dataclasses.replace(run.data, micro_batch_size=rows)
    return dataclasses.replace(run, data=data, trainer={**run.trainer, "accumulate_grad_batches": None})


def largest_rows(run: RunConfig, gib: float) -> int:
    """Rows of the largest micro-batch that fits and divides the global batch; 0 if not even one row does."""
    total = (run.data.global_batch_size or DEFAULT_BATCH) // run.data_ranks
    allowed = [rows for rows in range(1, total + 1) if total % rows == 0] or [run.data.micro_batch_size]

    def is_too_large(rows: int) -> bool:
        return rank_memory(with_rows(run, rows)).room(gib) < 0

    return 0 if is_too_large(allowed[0]) else allowed[bisect.bisect_left(allowed, True, lo=1, key=is_too_large) - 1]


def choices(run: RunConfig, modes: tuple[ActivationMode, ...]) -> Iterator[Choice]:
    """Every way to run the recipe on its ranks; those that send least and recompute least first.

    With offload those that recompute most, as each micro-batch copies all weights. At last with adapters, where the
    recipe has none: on a base as it is, then on one of 4 bits.
    """
    world = run.world_size or 1
    kinds: list[dict[str, Any]] = [{"engine": "single"}] if world == 1 else [{"engine": "ddp"}]
    if world > 1:
        kinds += [{"engine": "fsdp2", "sharding": "shard_grad_op"}, {"engine": "fsdp2"}]
    if run.num_nodes > 1 and world > run.num_nodes:
        kinds.append({"engine": "fsdp2", "sharding": "hybrid_shard", "replicate_degree": run.num_nodes})
    degrees = [d for d in (2, 4, 8, 16) if world % d == 0 and run.data.max_seq_length >= _LONG]
    kinds += [{"engine": "fsdp2", "context_parallel": degree} for degree in degrees]
    if (degree := expert_degree(run)) > 1:
        kinds.append({"engine": "fsdp2", "expert_parallel": degree})
    offload = {"engine": "fsdp2", "cpu_offload": True}
    for lora in (None,) if run.model.lora else (None, _LORA, _QLORA):
        for kind in kinds if lora else [*kinds, offload]:
            for mode in modes[::-1] if kind is offload else modes:
                plain = {**_WHOLE, "cpu_offload": False, "context_parallel": 1, "expert_parallel": 1}
                values = {**plain, **kind, "activation_checkpointing": mode}
                if choice := changed(run, values, lora):
                    yield choice


def changed(run: RunConfig, strategy: dict[str, Any], lora: LoraConfig | None = None) -> Choice | None:
    """The recipe with other arguments of the strategy, and perhaps with adapters; None if a rule forbids it."""
    now = {name: value for name, value in strategy.items() if getattr(run.strategy, name) != value}
    changes: dict[str, Any] = {f"{STRATEGY}.{name}": value for name, value in now.items()}
    lora = lora or run.model.lora
    before, after = (dataclasses.asdict(config or LoraConfig()) for config in (run.model.lora, lora))
    changes |= {f"model.lora.{name}": value for name, value in after.items() if before[name] != value}
    model = dataclasses.replace(run.model, lora=lora)
    try:
        other = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, **now), model=model)
        for rule in RULES:
            rule(other)
    except ConfigError:
        return None
    return Choice(other, changes)


def recommend(
    run: RunConfig, gib: float, gpu: Gpu | None, every: bool, host_gib: float = math.inf
) -> tuple[_Tried | None, list[_Tried]]:
    """The first choice that fits, and all that were tried, each at the largest micro-batch that fits.

    Of ``every`` choice the fastest that fits is taken, with adapters if nothing else does; those that fit come first,
    the fastest first, then the smallest. ``peak`` of one that does not fit is what it needs at least; ``host`` is what
    it takes of the host memory of a node, of which there is ``host_gib``. One whose package
    is not here is passed over, which is said on standard error.
    """
    tried: list[_Tried] = []
    for choice in choices(run, ("none", "selective", "full") if every else ("none", "full")):
        print(f"judging {choice.words}", file=sys.stderr)
        rows, taken = 0, None
        try:
            peak, host = least_bytes(choice.run), host_memory(choice.run)["total"]
            if host <= host_gib * HOST_USABLE * 2**30 and peak <= gib * USABLE * 2**30 - OVERHEAD_BYTES:
                rows = largest_rows(choice.run, gib)
                largest = with_rows(choice.run, max(1, rows))
                peak, taken = rank_memory(largest).peak, step_time(largest, gpu) if rows else None
        except ConfigError as error:
            print(f"{choice.words}: {error.given}", file=sys.stderr)
            continue
        key = {"data.micro_batch_size": rows} if rows not in (0, choice.run.data.micro_batch_size) else {}
        found = {"choice": choice.words, "changes": choice.changes | key, "fits": rows > 0, "micro_batch_size": rows}
        found |= {"peak": peak, "host": host}
        tried.append({**found, "tokens_per_second": taken["tokens_per_second"] if taken else None})
        if rows and not every:
            break

    def order(one: _Tried) -> tuple[Any, ...]:
        # without a rate they stay as tried
        return not one["fits"], -(one["tokens_per_second"] or 0.0), 0 if one["fits"] else one["peak"]

    tried = sorted(tried, key=order) if every else tried
    fitting = [one for one in tried if one["fits"]]
    whole = [one for one in fitting if not any(key.startswith("model.lora") for key in one["changes"])]
    return next(iter(whole or fitting), None), tried


def savings(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Simulate every change that takes less memory, each by itself; those that cost least come first.

    Each is ``num_bytes`` that the rank which holds most needs less at its highest moment, ``flags`` to be pasted behind
    the command of the run, and a ``remark``. ``run`` has a ``data.global_batch_size``.
    """
    before = rank_memory(run).peak
    for remark, choice in _lighter(run):
        try:
            saved = before - rank_memory(choice.run).peak if choice else 0
        except ConfigError:  # a package that is not here
            continue
        if choice and saved > 0:
            yield {"num_bytes": saved, "flags": " ".join(flags_of(choice.changes)), "remark": remark}


def _lighter(run: RunConfig) -> Iterator[tuple[str, Choice | None]]:
    """What may take less; what the recipe has already takes as much."""
    rows, world, lora = run.data.micro_batch_size, run.world_size or 1, run.model.lora or _LORA
    degree = run.strategy.context_config.degree
    may_accumulate = run.strategy.engine != "fsdp1" or not run.strategy.cpu_offload  # see check_accumulation
    for fewer in [n for n in range(rows - 1, 0, -1) if rows % n == 0 and may_accumulate][:1]:
        steps = (run.data.global_batch_size or 0) // (fewer * run.data_ranks)
        changes = {"data.micro_batch_size": fewer, "trainer.accumulate_grad_batches": steps}
        yield f"accumulates over {steps}: the same global batch", Choice(with_rows(run, fewer), changes)
    whole = _WHOLE if run.strategy.is_sharded else {"engine": "fsdp2", **_WHOLE}
    yield "blocks are recomputed", changed(run, {"activation_checkpointing": "full"})
    if world > 1:
        yield "each rank keeps its share", changed(run, whole)
    if run.strategy.engine == "fsdp2" and world % (2 * degree) == 0:
        steps = (run.data.global_batch_size or 0) // (rows * world // (2 * degree))
        choice = changed(run, {"context_parallel": 2 * degree})
        if choice is not None:  # fewer ranks have rows of their own
            choice.changes["trainer.accumulate_grad_batches"] = steps
        yield f"{2 * degree} ranks share each row", choice
    if run.trainer["accelerator"] != "cpu":
        yield "shards are on the host, slower", changed(run, {**whole, "cpu_offload": True})
    yield "LoRA", changed(run, {}, lora)
    yield "QLoRA", changed(run, {}, dataclasses.replace(lora, quantize="nf4"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's allocator, torch's on a CPU or Python itself had no memory left."""
    said = any(words in str(error) for words in ("CUDA error: out of memory", "DefaultCPUAllocator: can't allocate"))
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def advice(run: RunConfig, recipe: Path, accelerator: str, allow_imports: Sequence[str] = ()) -> str:
    """What ``lit-fsdp plan --savings`` says of a run that ran out of memory, or in one line why it says nothing.

    Another process computes it, in two minutes at most: this one has little memory, and ranks that wait for it.
    ``recipe`` is the file in the run folder, ``allow_imports`` the packages whose classes it names.
    """
    if run.foreign:
        return f"what would save memory is not computed for somebody else's {', '.join(sorted(run.foreign))}"
    words = [sys.executable, "-m", "lit_fsdp", "plan", "--savings", "--config", str(recipe)]
    words += [f"--trainer.{name}={run.trainer[name]}" for name in ("devices", "num_nodes")]
    words += [f"--trainer.accelerator={accelerator}", *(f"--allow-imports={name}" for name in allow_imports)]
    environment = {name: value for name, value in os.environ.items() if name != EXIT_DIR}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    try:
        return str(subprocess.run(words, env=environment, **options).stdout).rstrip()  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"what would save memory was not computed: {said}"
