"""Which choices of a recipe fit a GPU, which of them is fastest and why, and what would take less memory."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lit_fsdp.config.data import DEFAULT_BATCH
from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.run import RULES, STRATEGY, RunConfig
from lit_fsdp.config.strategy import ActivationMode
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import EXIT_DIR
from lit_fsdp.plan.memory import OVERHEAD_BYTES, USABLE, StepTime, least_bytes, rank_memory

_MODES: tuple[ActivationMode, ...] = ("none", "selective", "full")
_LORA = LoraConfig(target_modules="all-linear")
_QLORA = dataclasses.replace(_LORA, quantize="nf4")
_SECONDS = 120
"""After which a run that ran out of memory ends without advice."""
TimeOf = Callable[[RunConfig], StepTime | None]
"""The time of a step; None where no rate is known."""


@dataclass(frozen=True)
class Choice:
    """One way to run a recipe."""

    run: RunConfig
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe that are other ones, with their values."""

    @property
    def words(self) -> str:
        """Engine, sharding, activation checkpointing and the like in a few words."""
        strategy = self.run.strategy
        parts: list[str] = [strategy.engine, strategy.sharding] if strategy.is_sharded else [strategy.engine]
        mode = strategy.activation_config.mode
        parts += [] if mode == "none" else [f"recompute {mode}"]
        parts += ["cpu_offload"] if strategy.offloads else []
        lora = self.run.model.lora
        if lora is not None:
            parts.append("LoRA" if lora.quantize is None else f"QLoRA ({lora.quantize})")
        return ", ".join(parts)

    @property
    def flags(self) -> list[str]:
        """The changes, to be pasted behind the command of a run."""
        values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in self.changes.items())
        return [f"--{key} {value}" for key, value in values]


def with_rows(run: RunConfig, rows: int) -> RunConfig:
    """The recipe with another micro-batch; its accumulation follows."""
    data = dataclasses.replace(run.data, micro_batch_size=rows)
    return dataclasses.replace(run, data=data, trainer={**run.trainer, "accumulate_grad_batches": None})


def largest_rows(run: RunConfig, gib: float) -> int:
    """Rows of the largest micro-batch that fits and divides the global batch; 0 if not even one row does.

    The answer is simulated, and so is the next one that does not fit; what a row more needs only tells where to look.
    """
    total = (run.data.global_batch_size or DEFAULT_BATCH) // (run.world_size or 1)
    allowed = [rows for rows in range(1, total + 1) if total % rows == 0] or [run.data.micro_batch_size]
    one = rank_memory(with_rows(run, 1))
    if one.room(gib) < 0:
        return 0
    best, left, each = 1, allowed[1:], float(one.step.kept + one.step.block)
    while left:
        rows = max((rows for rows in left if each * (rows - 1) <= one.room(gib)), default=left[0])
        more = rank_memory(with_rows(run, rows))
        each = max(1, more.peak - one.peak) / (rows - 1)
        if more.room(gib) >= 0:
            best, left = rows, [other for other in left if other > rows]
        else:
            left = [other for other in left if other < rows]
    return best


def choices(run: RunConfig, modes: tuple[ActivationMode, ...] = _MODES) -> Iterator[Choice]:
    """Every way to run the recipe on its ranks; those that send least and recompute least first.

    At last with adapters, where the recipe has none: on a base as it is, then on one of 4 bits.
    """
    world = run.world_size or 1
    kinds: list[dict[str, Any]] = [{"engine": "single"}] if world == 1 else [{"engine": "ddp"}]
    if world > 1:
        kinds += [{"engine": "fsdp2", "sharding": "shard_grad_op"}, {"engine": "fsdp2", "sharding": "full_shard"}]
    if run.num_nodes > 1 and world > run.num_nodes:
        kinds.append({"engine": "fsdp2", "sharding": "hybrid_shard", "replicate_degree": run.num_nodes})
    offload = {"engine": "fsdp2", "sharding": "full_shard", "cpu_offload": True}
    neutral = {"sharding": "full_shard", "shard_degree": None, "replicate_degree": None, "cpu_offload": False}
    for lora in (None,) if run.model.lora else (None, _LORA, _QLORA):
        for kind in kinds if lora else [*kinds, offload]:
            for mode in modes:
                choice = changed(run, {**neutral, **kind, "activation_checkpointing": mode}, lora)
                if choice is not None:
                    yield choice


def changed(run: RunConfig, strategy: dict[str, Any], lora: LoraConfig | None = None) -> Choice | None:
    """The recipe with other arguments of the strategy, and perhaps with adapters; None if a rule forbids it."""
    now = {name: value for name, value in strategy.items() if getattr(run.strategy, name) != value}
    changes: dict[str, Any] = {f"{STRATEGY}.{name}": value for name, value in now.items()}
    model = run.model
    if lora is not None:
        model = dataclasses.replace(run.model, lora=lora)
        before, after = (dataclasses.asdict(config) for config in (run.model.lora or LoraConfig(), lora))
        changes |= {f"model.lora.{name}": value for name, value in after.items() if before[name] != value}
    try:
        other = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, **now), model=model)
        for rule in RULES:
            rule(other)
    except ConfigError:
        return None
    return Choice(other, changes)


def judge(choice: Choice, gib: float, time_of: TimeOf) -> tuple[Choice, dict[str, Any]]:
    """Simulate a choice at the largest micro-batch that fits, or with one row; returns it so, and what is predicted."""
    rows = largest_rows(choice.run, gib)
    run = with_rows(choice.run, max(1, rows))
    taken = time_of(run) if rows else None
    key = {"data.micro_batch_size": rows} if rows not in (0, choice.run.data.micro_batch_size) else {}
    known = Choice(run, choice.changes | key)
    return known, {
        "choice": known.words,
        "changes": known.changes,
        "fits": rows > 0,
        "micro_batch_size": rows,
        "peak": rank_memory(run).peak,
        "tokens_per_second": taken.tokens_per_second if taken else None,
    }


def search(run: RunConfig, gib: float, time_of: TimeOf) -> list[tuple[Choice, dict[str, Any]]]:
    """Judge every choice: those that fit, the fastest first, then those that do not, the smallest first."""
    found = []
    for choice in choices(run):
        print(f"judging {choice.words}", file=sys.stderr)
        try:
            found.append(judge(choice, gib, time_of))
        except ConfigError as error:  # a package that is not here
            print(f"{choice.words}: {error.given}", file=sys.stderr)

    def order(judged: tuple[Choice, dict[str, Any]]) -> tuple[Any, ...]:
        known, record = judged
        # what moves to the host comes last: how long that takes is not counted
        offloads = known.run.strategy.offloads
        return not record["fits"], offloads, -(record["tokens_per_second"] or 0.0), record["peak"]

    return sorted(found, key=order)


def recommend(run: RunConfig, gib: float, time_of: TimeOf) -> tuple[tuple[Choice, dict[str, Any]] | None, list[str]]:
    """The first choice that fits, in the order in which they cost time, and what was wrong with those before it."""
    reasons: list[str] = []
    for choice in choices(run, ("none", "full")):
        try:
            least = least_bytes(choice.run)
            why = f"{choice.words} keeps {least / 2**30:.1f} GiB, whatever the batch"
            if least <= gib * USABLE * 2**30 - OVERHEAD_BYTES:
                memory = rank_memory(with_rows(choice.run, 1))
                if memory.room(gib) >= 0:
                    return judge(choice, gib, time_of), reasons
                why = f"{choice.words} needs {memory.peak / 2**30:.1f} GiB with one row"
        except ConfigError as error:  # a package that is not here
            why = f"{choice.words}: {error.given}"
        reasons.append(why)
    return None, reasons


class Saving(NamedTuple):
    """One change of a recipe, and the bytes that the rank which holds most needs less at its highest moment."""

    num_bytes: int
    flags: str
    """To be pasted behind the command of the run."""
    remark: str


def savings(run: RunConfig, names_accumulation: bool = False) -> Iterator[Saving]:
    """Simulate every change that takes less memory, each by itself; those that cost least come first.

    ``run`` has a ``data.global_batch_size``; ``names_accumulation``: the recipe says
    ``trainer.accumulate_grad_batches``, which then has to follow.
    """
    before = rank_memory(run).peak
    for choice, remark in _lighter(run, names_accumulation):
        try:
            saved = before - rank_memory(choice.run).peak
        except ConfigError:  # a package that is not here
            continue
        if saved > 0:
            yield Saving(saved, " ".join(choice.flags), remark)


def _lighter(run: RunConfig, names_accumulation: bool) -> Iterator[tuple[Choice, str]]:
    rows, world, strategy = run.data.micro_batch_size, run.world_size or 1, run.strategy
    for fewer in [n for n in range(rows - 1, 0, -1) if rows % n == 0][:1]:
        steps = (run.data.global_batch_size or 0) // (fewer * world)
        changes: dict[str, Any] = {"data.micro_batch_size": fewer}
        if names_accumulation:
            changes["trainer.accumulate_grad_batches"] = steps
        yield Choice(with_rows(run, fewer), changes), f"accumulates over {steps}: the same global batch"
    sharded = {} if strategy.is_sharded else {"engine": "fsdp2"}
    whole = {"sharding": "full_shard", "shard_degree": None, "replicate_degree": None}
    is_full = strategy.is_sharded and strategy.sharding == "full_shard"
    kinds: list[tuple[dict[str, Any], str]] = []
    if strategy.activation_config.mode != "full":
        kinds.append(({"activation_checkpointing": "full"}, "blocks are recomputed"))
    if world > 1 and not is_full:
        kinds.append(({**sharded, **whole}, "each rank keeps its share"))
    if run.trainer["accelerator"] != "cpu" and not strategy.offloads:
        kinds.append(({**sharded, **({} if is_full else whole), "cpu_offload": True}, "shards are on the host, slower"))
    options = [(changed(run, values), remark) for values, remark in kinds]
    lora = run.model.lora
    options += [(changed(run, {}, _LORA), "LoRA")] if lora is None else []
    if lora is None or lora.quantize is None:
        options.append((changed(run, {}, dataclasses.replace(lora or _LORA, quantize="nf4")), "QLoRA"))
    yield from ((choice, remark) for choice, remark in options if choice is not None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's allocator, torch's on a CPU or Python itself had no memory left."""
    said = any(words in str(error) for words in ("CUDA error: out of memory", "DefaultCPUAllocator: can't allocate"))
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def advice(run: RunConfig, recipe: Path, accelerator: str, allow_imports: Sequence[str] = ()) -> str:
    """What ``lit-fsdp plan --savings`` says of a run that ran out of memory, or in one line why it says nothing.

    Another process computes it: this one has little memory, and a process group whose other ranks are waiting.
    ``recipe`` is the file in the run folder, ``allow_imports`` the packages whose classes it names.
    """
    if run.foreign:
        return f"what would save memory is not computed for somebody else's {', '.join(sorted(run.foreign))}"
    words = [sys.executable, "-m", "lit_fsdp", "plan", "--savings", "--config", str(recipe)]
    words += [f"--trainer.{name}={run.trainer[name]}" for name in ("devices", "num_nodes")]
    words += [f"--trainer.accelerator={accelerator}", *(f"--allow-imports={name}" for name in allow_imports)]
    environment = {name: value for name, value in os.environ.items() if name != EXIT_DIR}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"what would save memory was not computed: {error}"
    if done.returncode:
        return f"what would save memory was not computed: {(done.stderr.splitlines() or ['no reason'])[-1]}"
    return done.stdout.rstrip()
