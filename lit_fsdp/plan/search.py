"""Find which choices of a recipe fit a GPU, the fastest of them, and changes that save memory."""

import bisect
import dataclasses
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_Tried = dict[str, Any]
_WHOLE = {"sharding": "full_shard", "shard_degree": None, "replicate_degree": None}
_LONG = 16_384  # tokens per row from which context parallel is considered


@dataclass(frozen=True)
class Choice:
    """One way to run a recipe."""

    run: RunConfig
    changes: dict[str, Any]
    """Changed keys of the recipe, with their values."""

    @property
    def words(self) -> str:
        """Short description: engine, sharding, activation checkpointing and so on."""
        strategy, lora, mode = self.run.strategy, self.run.model.lora, self.run.strategy.activation_config.mode
        parts = [
            strategy.engine,
            strategy.sharding if strategy.is_sharded else "",
            f"{strategy.context_config.degree} ranks share rows" if strategy.context_config.degree > 1 else "",
            f"experts over {strategy.expert_parallel} ranks" if strategy.expert_parallel > 1 else "",
            f"recompute {mode}" if mode != "none" else "",
            "activations offloaded" if self.run.strategy.activation_config.offload_activations else "",
            "cpu_offload" if strategy.offloads else "",
            "" if lora is None else f"QLoRA ({lora.quantize})" if lora.quantize else "LoRA",
        ]
        return ", ".join(filter(None, parts))


def flags_of(changes: Mapping[str, Any]) -> list[str]:
    """Format changes of a recipe as flags to append to the command of a run."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    return [f"--{key} {shlex.quote(value)}" for key, value in values.items()]


def _as_given(value: Any) -> Any:
    """Return a value as a recipe would give it: of a section, only what differs from the defaults."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {field.name: given for field, given in fields if given != field.default}


def with_rows(run: RunConfig, rows: int) -> RunConfig:
    """Return the recipe with another micro-batch size; the accumulation is derived from it."""
    data = dataclasses.replace(run.data, micro_batch_size=rows)
    return dataclasses.replace(run, data=data, trainer={**run.trainer, "accumulate_grad_batches": None})


def largest_rows(run: RunConfig, gib: float) -> int:
    """Return the largest micro-batch size that fits and divides the global batch; 0 if a single row does not fit."""
    total = (run.data.global_batch_size or DEFAULT_BATCH) // run.data_ranks
    allowed = [rows for rows in range(1, total + 1) if total % rows == 0] or [run.data.micro_batch_size]

    def is_too_large(rows: int) -> bool:
        return rank_memory(with_rows(run, rows)).room(gib) < 0

    return 0 if is_too_large(allowed[0]) else allowed[bisect.bisect_left(allowed, True, lo=1, key=is_too_large) - 1]


def choices(run: RunConfig, modes: tuple[ActivationMode, ...]) -> Iterator[Choice]:
    """Yield all ways to run the recipe on its ranks, those with the least communication and recomputation first.

    With offload, those with the most recomputation come first, because each micro-batch copies all weights. Choices
    with adapters that the recipe does not have come last: on an unquantized base, then on a 4-bit base.
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
    smaller = _on_4_bits(run.model.lora or _LORA)
    for lora in [None, *([] if run.model.lora else [_LORA]), *([smaller] if smaller else [])]:
        for kind in kinds if lora else [*kinds, offload]:
            for mode in modes[::-1] if kind is offload else modes:
                plain = {**_WHOLE, "cpu_offload": False, "context_parallel": 1, "expert_parallel": 1}
                values = {**plain, **kind, "activation_checkpointing": mode}
                if choice := changed(run, values, lora):
                    yield choice


def _on_4_bits(lora: LoraConfig) -> LoraConfig | None:
    """Return the adapters on a 4-bit base; None if they already have it, or are DoRA, which cannot."""
    return None if lora.quantize or lora.use_dora else dataclasses.replace(lora, quantize="nf4")


def changed(run: RunConfig, strategy: dict[str, Any], lora: LoraConfig | None = None) -> Choice | None:
    """Return the recipe with other arguments of the strategy, optionally with adapters; None if a rule forbids it."""
    now = {name: value for name, value in strategy.items() if getattr(run.strategy, name) != value}
    changes: dict[str, Any] = {f"{STRATEGY}.{name}": _as_given(value) for name, value in now.items()}
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
    """Return the first choice that fits, and all tried choices, each with the largest micro-batch that fits.

    With ``every``, return the fastest choice that fits, with adapters only if nothing else fits; the list has fitting
    choices first, fastest first, then the others, smallest first. The ``peak`` of a choice that does not fit is a
    minimum. The value ``host`` is its host memory per node, of which ``host_gib`` is available. Choices with a missing
    package are skipped with a message on standard error.
    """
    tried: list[_Tried] = []
    skipped: set[str] = set()
    for choice in choices(run, ("none", "selective", "full") if every else ("none", "full")):
        print(f"evaluating {choice.words}", file=sys.stderr)
        rows, taken = 0, None
        try:
            peak, host = least_bytes(choice.run), host_memory(choice.run)["total"]
            if host <= host_gib * HOST_USABLE * 2**30 and peak <= gib * USABLE * 2**30 - OVERHEAD_BYTES:
                rows = largest_rows(choice.run, gib)
                largest = with_rows(choice.run, max(1, rows))
                peak, taken = rank_memory(largest).peak, step_time(largest, gpu) if rows else None
        except ConfigError as error:
            if error.given not in skipped:
                print(f"not evaluated: {choice.words}: {error.given}; {error.fix}", file=sys.stderr)
            skipped.add(error.given)
            continue
        key = {"data.micro_batch_size": rows} if rows not in (0, choice.run.data.micro_batch_size) else {}
        found = {"choice": choice.words, "changes": choice.changes | key, "fits": rows > 0, "micro_batch_size": rows}
        found |= {"peak": peak, "host": host}
        tried.append({**found, "tokens_per_second": taken["tokens_per_second"] if taken else None})
        if rows and not every:
            break

    def order(one: _Tried) -> tuple[Any, ...]:
        # without a rate they stay in the order of the search
        return not one["fits"], -(one["tokens_per_second"] or 0.0), 0 if one["fits"] else one["peak"]

    tried = sorted(tried, key=order) if every else tried
    fitting = [one for one in tried if one["fits"]]
    whole = [one for one in fitting if not any(key.startswith("model.lora") for key in one["changes"])]
    return next(iter(whole or fitting), None), tried


def savings(run: RunConfig) -> Iterator[dict[str, Any]]:
    """Simulate every change that saves memory, one at a time; those with the lowest cost come first.

    Each has ``num_bytes`` (peak bytes saved on the largest rank; None if a package is missing), ``flags`` to append to
    the command of the run, and a ``remark``. The ``run`` must have a ``data.global_batch_size``.
    """
    before = rank_memory(run).peak
    for remark, choice in _lighter(run):
        try:
            saved = before - rank_memory(choice.run).peak if choice else 0
        except ConfigError as error:
            if choice and error.fix.startswith("pip install"):
                flags = " ".join(flags_of(choice.changes))
                yield {"num_bytes": None, "flags": flags, "remark": f"{remark}; first {error.fix}"}
            continue
        if choice and saved > 0:
            yield {"num_bytes": saved, "flags": " ".join(flags_of(choice.changes)), "remark": remark}


def _lighter(run: RunConfig) -> Iterator[tuple[str, Choice | None]]:
    """Yield changes that may save memory; settings that the recipe already has save nothing."""
    rows, world, lora = run.data.micro_batch_size, run.world_size or 1, run.model.lora or _LORA
    degree = run.strategy.context_config.degree
    may_accumulate = run.strategy.engine != "fsdp1" or not run.strategy.cpu_offload  # see check_accumulation
    divisors = [n for n in range(rows - 1, 0, -1) if rows % n == 0 and may_accumulate]
    for fewer in dict.fromkeys(divisors[:1] + divisors[-1:]):
        steps = (run.data.global_batch_size or 0) // (fewer * run.data_ranks)
        changes = {"data.micro_batch_size": fewer, "trainer.accumulate_grad_batches": steps}
        yield f"accumulates over {steps} micro-batches; same global batch", Choice(with_rows(run, fewer), changes)
    whole = _WHOLE if run.strategy.is_sharded else {"engine": "fsdp2", **_WHOLE}
    yield "blocks are recomputed", changed(run, {"activation_checkpointing": "full"})
    if run.trainer["accelerator"] != "cpu":
        before = run.strategy.activation_config
        mode = before.mode if before.mode in ("full", "every_n") else "full"
        on_host = dataclasses.replace(before, mode=mode, memory_budget=None, offload_activations=True)
        is_new = before != on_host
        yield "their inputs are in host memory", changed(run, {"activation_checkpointing": on_host}) if is_new else None
    if world == 1 and run.strategy.is_sharded:
        yield "the only rank gathers no weights", changed(run, {"engine": "single"})
    if world > 1:
        yield "weights, gradients and optimizer state are sharded", changed(run, whole)
    if run.strategy.engine == "fsdp2" and world % (2 * degree) == 0:
        steps = (run.data.global_batch_size or 0) // (rows * world // (2 * degree))
        choice = changed(run, {"context_parallel": 2 * degree})
        if choice is not None:  # fewer data-parallel ranks
            choice.changes["trainer.accumulate_grad_batches"] = steps
        yield f"{2 * degree} ranks share each row", choice
    if run.trainer["accelerator"] != "cpu":
        yield "shards are in host memory; slower", changed(run, {**whole, "cpu_offload": True})
    yield "LoRA", changed(run, {}, lora)
    if smaller := _on_4_bits(lora):
        yield "QLoRA", changed(run, {}, smaller)


def advice(run: RunConfig, recipe: Path, accelerator: str, allow_imports: Sequence[str] = ()) -> str:
    """Return the output of ``lit-fsdp plan --savings`` for a run that ran out of memory, or the reason it is missing.

    A separate process computes it, in at most two minutes: this process has little memory, and ranks wait for it. The
    ``recipe`` is the file in the run folder; the list ``allow_imports`` has the packages of its classes.
    """
    if run.foreign:
        return f"memory savings are not computed for a custom {', '.join(sorted(run.foreign))}"
    words = [sys.executable, "-m", "lit_fsdp", "plan", "--savings", "--config", str(recipe)]
    words += [f"--trainer.{name}={run.trainer[name]}" for name in ("devices", "num_nodes")]
    words += [f"--trainer.accelerator={accelerator}", *(f"--allow-imports={name}" for name in allow_imports)]
    environment = {name: value for name, value in os.environ.items() if name != EXIT_DIR}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    try:
        return str(subprocess.run(words, env=environment, **options).stdout).rstrip()  # noqa: S603
    except subprocess.TimeoutExpired:
        return f"memory savings took more than two minutes to compute; run: lit-fsdp {shlex.join(words[3:])}"
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        return f"cannot compute memory savings: {reason}"
