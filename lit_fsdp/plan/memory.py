"""What each rank of a recipe holds at its highest moment, by kind, and how long a step takes, before anything runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lit_fsdp.audit import CausalLMModule, device_type, settled_strategy, state_per_rank
from lit_fsdp.config.data import DEFAULT_BATCH, accumulation_steps
from lit_fsdp.config.model import ModelConfig, PreferenceModelConfig
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.strategy import Sharding, StrategyConfig, mesh_shape
from lit_fsdp.metrics.flops import flop_formula
from lit_fsdp.metrics.hardware import Gpu
from lit_fsdp.models.build import build_trainable
from lit_fsdp.models.optimizers import state_bytes
from lit_fsdp.models.resolve import resolve_architecture
from lit_fsdp.parallel.precision import TORCH_DTYPES, cast_parameters
from lit_fsdp.parallel.units import UnitPlan, plan_for
from lit_fsdp.plan.simulate import StepMemory, step_memory

T = TypeVar("T")

OVERHEAD_BYTES = int(1.5 * 2**30)
"""Taken on every GPU by what no tensor shows: the CUDA context, NCCL's buffers, workspaces of cuBLAS."""
USABLE = 0.97
"""Share of a GPU's memory that tensors may fill: what the driver keeps and what fragments is not there."""
NETWORK_GB_PER_SECOND = 50.0
"""Of a node in each direction, in 10**9 bytes, where nothing else is said: one 400 Gbit/s port."""
PEAK_SHARE = 0.4
"""Share of a GPU's peak rate at which blocks compute, where nothing else is said."""
RING_STEP_SECONDS = 1e-5
"""Assumed for one step of a ring whatever it carries; a network of InfiniBand class."""
_GATHERS = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0, "hybrid_shard": 2, "hybrid_shard_zero2": 1}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that holds most."""

    parameters: int
    gradients: int
    """Between steps; whether they are there at the highest moment, ``step`` knows."""
    optimizer: int
    step: StepMemory
    largest_tensor: int
    """In storage dtype: what a load holds at most beside the shards."""
    offloads: bool
    """Whether parameters, gradients and optimizer state are in host memory."""

    @property
    def peak(self) -> int:
        """At the highest moment of a step, on the device."""
        if self.offloads:
            return self.step.total - self.step.gradients
        return self.parameters + self.optimizer + self.step.total

    def room(self, gib: float) -> float:
        """Bytes that are left on a GPU of this size; below 0 if it does not fit."""
        return gib * USABLE * 2**30 - OVERHEAD_BYTES - self.peak


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by arithmetic."""

    compute: float
    communication: float
    exposed: float
    """Part of the communication that nothing hides: what exceeds the computation, the first gather, the last
    reduction."""
    tokens: float
    """Of the global batch."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.seconds


def _once(function: Callable[..., T]) -> Callable[..., T]:
    """Remember answers: a simulated step takes a second or two, and a search asks for the same ones again."""
    known: dict[str, T] = {}

    @functools.wraps(function)
    def ask(*args: Any) -> T:
        key = repr(args)
        if key not in known:
            known[key] = function(*args)
        return known[key]

    return ask


@_once
def rank_memory(run: RunConfig) -> RankMemory:
    """Simulate a step of a checked recipe with a known number of ranks and lit_fsdp's own model and strategy.

    Raises:
        ConfigError: The model's config is not at hand, or its step cannot be followed without values.
    """
    assert run.world_size is not None
    strategy, state = settled_strategy(run), _largest_state(run)
    hf_config = resolve_architecture(run.model)
    steps = accumulation_steps(run.data, run.world_size, run.trainer["accumulate_grad_batches"])
    pair = 2 if isinstance(run.model, PreferenceModelConfig) else 1
    shape = run.data.micro_batch_size * pair, run.data.max_seq_length
    mesh = mesh_shape(strategy, run.num_nodes, run.world_size, STRATEGY)
    on_cpu = device_type(run) == "cpu"
    step = step_memory(hf_config, run.model, strategy, shape, mesh, state["gradient_bytes"], steps > 1, on_cpu)
    row = strategy.precision_config.row
    if steps > 1 and strategy.is_sharded and not strategy.sync_each_micro_batch:
        # whole gradients wait on the device for the last micro-batch, in the dtype in which they are reduced
        trained = sum(p.numel() for p in _planned(run)[0].parameters() if p.requires_grad)
        waiting = trained * TORCH_DTYPES[row.reduce].itemsize
        step = dataclasses.replace(step, gradients=0, reduced=step.reduced + waiting)
    size = TORCH_DTYPES[row.param].itemsize
    return RankMemory(
        parameters=state["parameter_bytes"] + state.get("quantization_bytes", 0),
        gradients=state["gradient_bytes"],
        optimizer=state["optimizer_bytes"],
        step=step,
        largest_tensor=max(p.numel() for p in _planned(run)[0].parameters()) * size,
        offloads=strategy.offloads,
    )


def least_bytes(run: RunConfig) -> int:
    """What the rank that holds most keeps, whatever the batch: no step is simulated.

    Parameters, gradients and optimizer state, and all weights where they stay gathered until the backward pass.
    """
    strategy, state = settled_strategy(run), _largest_state(run)
    if strategy.offloads:
        return 0
    stays = strategy.is_sharded and strategy.sharding in ("shard_grad_op", "hybrid_shard_zero2")
    size = TORCH_DTYPES[strategy.precision_config.row.compute].itemsize
    return _state_of(state) + stays * size * sum(p.numel() for p in _planned(run)[0].parameters())


def _largest_state(run: RunConfig) -> dict[str, int]:
    """Of the rank that holds most."""
    assert run.world_size is not None
    strategy = settled_strategy(run)
    module, plan = _planned(run)
    kept = state_bytes(run.model.optim, module.model, TORCH_DTYPES[strategy.precision_config.row.param].itemsize)[0]
    shards = mesh_shape(strategy, run.num_nodes, run.world_size, STRATEGY)[1]
    return max(state_per_rank(module, plan, strategy, shards, kept), key=_state_of)


def _planned(run: RunConfig) -> tuple[Any, UnitPlan]:
    """The whole model on meta and its units: once for all choices that change neither."""
    given = settled_strategy(run)
    alike = StrategyConfig(engine=given.engine, wrap=given.wrap, precision=given.precision, compile=given.compile)
    return _model_and_units(dataclasses.replace(run.model, attn_implementation=None), alike)


@_once
def _model_and_units(model: ModelConfig, strategy: StrategyConfig) -> tuple[Any, UnitPlan]:
    module = CausalLMModule(build_trainable(resolve_architecture(model), model)[0])
    cast_parameters(module, strategy)
    return module, plan_for(module, strategy, STRATEGY)


def _state_of(rank: dict[str, int]) -> int:
    return sum(size for kind, size in rank.items() if kind.endswith("_bytes"))


# What an optimizer step sends. Every collective is counted as a ring over its ranks, neighbors in the same node side by
# side, as NCCL lays them: an all-gather or reduce-scatter of S bytes over n ranks makes each rank pass on S (n-1)/n
# bytes in n-1 steps, an all-reduce twice that. A ring leaves a node once, so these are also the bytes that leave the
# node, however many of its ranks are in the ring; rings of different ranks of a node (the copies of hybrid sharding)
# add up.


@dataclass(frozen=True)
class Traffic:
    """What one optimizer step sends."""

    rank_bytes: float
    """From each rank to its neighbor, over whatever link is between them."""
    node_bytes: float
    """Out of each node over the network; 0 on one node."""
    ring_steps: int
    """One after another, in rings that leave a node."""

    def seconds(self, bytes_per_second: float) -> float:
        """Time on the network at this rate per node and direction, if nothing hides it."""
        return self.node_bytes / bytes_per_second + self.ring_steps * RING_STEP_SECONDS


def step_traffic(
    num_params: int,
    num_units: int,
    sharding: Sharding,
    mesh: tuple[int, int],
    ranks_per_node: int = 8,
    gather_bytes: int = 2,
    reduce_bytes: float = 4,
    forwards: int = 1,
    reductions: int = 1,
) -> Traffic:
    """Count what an optimizer step sends.

    Parameters are gathered for the forward and, unless they stay gathered (``shard_grad_op``, ``hybrid_shard_zero2``),
    again for the backward pass; gradients are reduce-scattered over the ranks of a copy and all-reduced over copies.

    Args:
        num_params: Of the model.
        num_units: FSDP units; each is gathered and reduced by itself.
        sharding: How often.
        mesh: Copies of the model, and ranks that share one: whole nodes, or a part of one.
        ranks_per_node: Of nodes that are alike.
        gather_bytes: Per parameter: compute dtype.
        reduce_bytes: Per parameter: reduce dtype, times the share of what is trained.
        forwards: Of each rank per step; gathers are repeated.
        reductions: As many with ``sync_each_micro_batch: true``, else 1.

    Returns:
        Upper bounds where less is sent: the root unit stays gathered, and NCCL all-reduces small messages in trees,
        which take fewer steps.

    Source: ZeRO, arXiv:1910.02054, section 7; hybrid sharding: PyTorch FSDP, arXiv:2304.11277, section 3.2.2.
    """
    copies, degree = mesh
    gathers, reduced = _GATHERS[sharding] * forwards, num_params * reduce_bytes * reductions
    inside = (num_params * gather_bytes * gathers + reduced) * (degree - 1) / degree
    across = 2 * (copies - 1) / copies * reduced / degree
    node_bytes, steps = 0.0, 0
    if degree > ranks_per_node:
        node_bytes += inside
        steps += (gathers + reductions) * (degree - 1)
    if copies * degree > ranks_per_node and copies > 1:
        node_bytes += across * min(degree, ranks_per_node)
        steps += 2 * (copies - 1) * reductions
    return Traffic(inside + across, node_bytes, steps * num_units)


def step_time(run: RunConfig, gpu: Gpu, share: float = PEAK_SHARE, network: float = NETWORK_GB_PER_SECOND) -> StepTime:
    """Seconds of an optimizer step, from operations and bytes; all samples are as long as they may be.

    ``share`` is that of :data:`PEAK_SHARE`, ``network`` that of :data:`NETWORK_GB_PER_SECOND`.

    Raises:
        ValueError: No operations are known for this architecture, or the GPU has no peak rate for the precision.
    """
    assert run.world_size is not None
    strategy, model = settled_strategy(run), _planned(run)[0].model
    row, world = strategy.precision_config.row, run.world_size
    kind = "fp8" if strategy.precision_config.mode == "fp8" else row.compute
    if kind not in gpu.tflops:
        raise ValueError(f"{gpu.name} does not multiply in {kind}")
    formula = flop_formula(model)
    global_rows = run.data.global_batch_size or DEFAULT_BATCH
    pair = 2 if isinstance(run.model, PreferenceModelConfig) else 1
    tokens = float(global_rows * pair * run.data.max_seq_length)
    counts = {"tokens": tokens, "supervised_tokens": tokens, "squared_tokens": tokens * run.data.max_seq_length}
    words = dict.fromkeys(formula.blocks, "full" if strategy.activation_config.mode == "full" else "no")
    operations = formula.train_flops(counts) + (formula.recomputed_flops(counts, words) or 0.0)
    compute = operations / world / (gpu.tflops[kind] * 1e12 * share)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_units = len(formula.blocks) + 2
    gather_bytes, reduce_bytes = TORCH_DTYPES[row.compute].itemsize, TORCH_DTYPES[row.reduce].itemsize * trained / total
    sharding = strategy.sharding if strategy.is_sharded else "no_shard"
    mesh = mesh_shape(strategy, run.num_nodes, world)
    forwards = global_rows // (run.data.micro_batch_size * world)
    repeats = forwards, forwards if strategy.sync_each_micro_batch else 1
    per_node = world // run.num_nodes
    traffic = step_traffic(total, num_units, sharding, mesh, per_node, gather_bytes, reduce_bytes, *repeats)
    inside = traffic.rank_bytes / (gpu.link_gb_per_second * 1e9)
    communication = max(inside, traffic.seconds(network * 1e9)) if run.num_nodes > 1 else inside
    ends = 2 * communication / num_units / forwards
    return StepTime(compute, communication, max(communication - compute, min(ends, communication)), tokens)


def compared_memory(run: RunConfig, folder: Path) -> str:
    """Put what was predicted of a run beside what it measured into its ``audit.json``, and say both in one line.

    For the end of a process, whose process group is gone: the simulated step has one that only pretends.
    """
    from lit_fsdp.callbacks.records import add_to_audit

    try:
        predicted = rank_memory(run).peak
    except Exception as error:  # a prediction ends no run
        return f"peak memory was not predicted: {error}"
    measured = max(add_to_audit(folder, {"predicted_peak_bytes": predicted})["measured_peak_bytes_per_rank"])
    return f"peak memory per rank: {measured / 2**30:.2f} GiB measured, {predicted / 2**30:.2f} GiB predicted"


def zero_table(run: RunConfig) -> dict[str, int]:
    """Bytes of parameters, gradients and AdamW state per rank: whole everywhere, and by the stages of ZeRO.

    Source: ZeRO, arXiv:1910.02054, figure 1.
    """
    assert run.world_size is not None
    alone = dataclasses.replace(run.strategy, engine="ddp", sharding="no_shard", cpu_offload=False)
    whole = _largest_state(dataclasses.replace(run, strategy=alone))
    kinds = [whole[f"{kind}_bytes"] for kind in ("optimizer", "gradient", "parameter")]
    found = {}
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        found[name] = sum(-(-size // run.world_size) if i < stage else size for i, size in enumerate(kinds))
    return found
