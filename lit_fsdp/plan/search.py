"""Which choices of a recipe fit a GPU, which of them is fastest, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lit_fsdp.config.data import DEFAULT_BATCH
from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.run import RULES, STRATEGY, RunConfig
from lit_fsdp.config.strategy import ActivationMode
from lit_fsdp.errors import ConfigError
from lit_fsdp.metrics.hardware import Gpu
from lit_fsdp.plan.memory import OVERHEAD_BYTES, USABLE, RankMemory, StepTime, least_bytes, rank_memory, step_time

_MODES: tuple[ActivationMode, ...] = ("none", "selective", "full")
LORA = LoraConfig(target_modules="all-linear")
QLORA = dataclasses.replace(LORA, quantize="nf4")


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


@dataclass(frozen=True)
class Result:
    """What is predicted of a choice."""

    choice: Choice
    memory: RankMemory
    fits: bool
    rows: int
    """Of its micro-batch."""
    time: StepTime | None
    """None where no rate is known."""

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks; 0 where no rate is known."""
        return self.time.tokens_per_second if self.time else 0.0


def with_rows(run: RunConfig, rows: int) -> RunConfig:
    """The recipe with another micro-batch; its accumulation follows."""
    data = dataclasses.replace(run.data, micro_batch_size=rows)
    return dataclasses.replace(run, data=data, trainer={**run.trainer, "accumulate_grad_batches": None})


def largest_rows(run: RunConfig, gib: float, at: RankMemory | None = None) -> int:
    """Rows of the largest micro-batch that fits and divides the global batch; 0 if not even one row does.

    The answer is simulated, and so is the next one that does not fit; what a row more needs only tells where to look.
    """
    total = (run.data.global_batch_size or DEFAULT_BATCH) // (run.world_size or 1)
    allowed = [rows for rows in range(1, total + 1) if total % rows == 0] or [run.data.micro_batch_size]
    one = at or rank_memory(with_rows(run, 1))
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
    for lora in (None,) if run.model.lora else (None, LORA, QLORA):
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


def judge(choice: Choice, gib: float, time_of: Callable[[RunConfig], StepTime | None]) -> Result:
    """Simulate a choice at the largest micro-batch that fits."""
    one = rank_memory(with_rows(choice.run, 1))
    rows = largest_rows(choice.run, gib, one)
    run = with_rows(choice.run, max(1, rows))
    memory = one if rows <= 1 else rank_memory(run)
    key = {"data.micro_batch_size": rows} if rows and rows != choice.run.data.micro_batch_size else {}
    known = Choice(run, {**choice.changes, **key})
    return Result(known, memory, rows > 0, rows, time_of(run) if rows else None)


def search(
    run: RunConfig, gib: float, time_of: Callable[[RunConfig], StepTime | None], tell: Callable[[str], None]
) -> list[Result]:
    """Judge every choice: those that fit, the fastest first, then those that do not, the smallest first."""
    found = []
    for choice in choices(run):
        tell(choice.words)
        try:
            found.append(judge(choice, gib, time_of))
        except ConfigError as error:  # a package that is not here
            tell(f"{choice.words}: {error.given}")
    # what moves to the host comes last: how long that takes is not counted
    return sorted(found, key=lambda r: (not r.fits, r.memory.offloads, -r.tokens_per_second, r.memory.peak))


def recommend(
    run: RunConfig, gib: float, time_of: Callable[[RunConfig], StepTime | None]
) -> tuple[Result | None, list[str]]:
    """The first choice that fits, in the order in which they cost time, and what was wrong with those before it."""
    reasons, usable = [], gib * USABLE * 2**30 - OVERHEAD_BYTES
    for choice in choices(run, ("none", "full")):
        try:
            least = least_bytes(choice.run)
            if least > usable:
                reasons.append(f"{choice.words} keeps {least / 2**30:.1f} GiB, whatever the batch")
                continue
            memory = rank_memory(with_rows(choice.run, 1))
            if memory.room(gib) >= 0:
                return judge(choice, gib, time_of), reasons
        except ConfigError as error:  # a package that is not here
            reasons.append(f"{choice.words}: {error.given}")
            continue
        reasons.append(f"{choice.words} needs {memory.peak / 2**30:.1f} GiB with one row")
    return None, reasons


def time_on(gpu: Gpu | None, share: float, network: float) -> Callable[[RunConfig], StepTime | None]:
    """What tells the time of a step on this GPU; nothing without one, or where no operations are known."""

    def of(run: RunConfig) -> StepTime | None:
        with contextlib.suppress(ValueError):
            return step_time(run, gpu, share, network) if gpu else None
        return None

    return of
