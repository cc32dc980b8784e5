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

# Assumed: what no tensor shows on a GPU (the CUDA context, NCCL's buffers, workspaces of cuBLAS); the share of its
# memory that tensors may fill, without what the driver keeps and what fragments; of a node, one port of 400 Gbit/s in
# each direction; the share of the peak at which blocks compute; a step of a ring, whatever it carries, on InfiniBand.
OVERHEAD_BYTES = int(1.5 * 2**30)
USABLE = 0.97
NETWORK_GB_PER_SECOND = 50.0
PEAK_SHARE = 0.4
RING_STEP_SECONDS = 1e-5
_GATHERS = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0, "hybrid_shard": 2, "hybrid_shard_zero2": 1}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that holds most between steps, which ``offloads`` puts in host memory, and at work.

    ``largest_tensor`` is what a load holds at most beside the shards.
    """

    parameters: int
    gradients: int
    optimizer: int
    step: StepMemory
    largest_tensor: int
    offloads: bool

    @property
    def peak(self) -> int:
        """At the highest moment of a step, on the device."""
        state = -self.step.gradients if self.offloads else self.parameters + self.optimizer
        return state + self.step.total

    def room(self, gib: float) -> float:
        """Bytes that are left on a GPU of this size; below 0 if it does not fit."""
        return gib * USABLE * 2**30 - OVERHEAD_BYTES - self.peak


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
    """Simulate a step of a checked recipe with a known number of ranks and lit_fsdp's own model and strategy."""
    assert run.world_size is not None
    strategy, state = settled_strategy(run), _largest_state(run)
    params = list(_planned(run)[0].parameters())
    steps = accumulation_steps(run.data, run.world_size, run.trainer["accumulate_grad_batches"])
    rows_per_sample = 1 + isinstance(run.model, PreferenceModelConfig)
    shape = run.data.micro_batch_size * rows_per_sample, run.data.max_seq_length
    mesh = mesh_shape(strategy, run.num_nodes, run.world_size, STRATEGY)
    on_cpu = device_type(run) == "cpu"
    step = step_memory(run.model, strategy, shape, mesh, state["gradient_bytes"], steps > 1, on_cpu)
    row = strategy.precision_config.row
    if steps > 1 and strategy.is_sharded and not strategy.sync_each_micro_batch:
        # whole gradients wait on the device for the last micro-batch, in the dtype in which they are reduced
        waiting = sum(p.numel() for p in params if p.requires_grad) * TORCH_DTYPES[row.reduce].itemsize
        step = dataclasses.replace(step, gradients=0, reduced=step.reduced + waiting)
    return RankMemory(
        parameters=state["parameter_bytes"] + state.get("quantization_bytes", 0),
        gradients=state["gradient_bytes"],
        optimizer=state["optimizer_bytes"],
        step=step,
        largest_tensor=max(p.numel() for p in params) * TORCH_DTYPES[row.param].itemsize,
        offloads=strategy.offloads,
    )


def least_bytes(run: RunConfig) -> int:
    """What the rank that holds most keeps, whatever the batch, weights that stay gathered included; not simulated."""
    strategy = settled_strategy(run)
    if strategy.offloads:
        return 0
    stays = strategy.is_sharded and strategy.sharding in ("shard_grad_op", "hybrid_shard_zero2")
    size = TORCH_DTYPES[strategy.precision_config.row.compute].itemsize
    return _state_of(_largest_state(run)) + stays * size * sum(p.numel() for p in _planned(run)[0].parameters())


def zero_table(run: RunConfig) -> dict[str, int]:
    """Bytes of parameters, gradients and AdamW state per rank: whole, and by the stages of ZeRO (arXiv:1910.02054)."""
    assert run.world_size is not None
    alone = dataclasses.replace(run.strategy, engine="ddp", sharding="no_shard", cpu_offload=False)
    whole = _largest_state(dataclasses.replace(run, strategy=alone))
    kinds = [whole[f"{kind}_bytes"] for kind in ("optimizer", "gradient", "parameter")]
    found = {}
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        found[name] = sum(-(-size // run.world_size) if i < stage else size for i, size in enumerate(kinds))
    return found


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
    """What one optimizer step sends: from a rank to its neighbor, and out of a node in so many steps of rings."""

    rank_bytes: float
    node_bytes: float
    ring_steps: int

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
    """Count what an optimizer step sends at most: the root unit stays gathered, and small messages go in trees.

    Parameters are gathered for the forward and, unless they stay gathered (``shard_grad_op``, ``hybrid_shard_zero2``),
    again for the backward pass; gradients are reduce-scattered over the ranks of a copy and all-reduced over copies.
    ``mesh`` is copies of the model and ranks that share one: whole nodes, or a part of one; ``gather_bytes`` and
    ``reduce_bytes`` are per parameter, ``forwards`` and ``reductions`` per step.

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


def step_time(run: RunConfig, gpu: Gpu | None) -> dict[str, float] | None:
    """Seconds of an optimizer step by arithmetic, and the rate over all ranks; all samples are as long as they may be.

    ``exposed`` is the communication that nothing hides: what exceeds the computation, the first gather, the last
    reduction. None: no operations are known for this architecture, or no peak rate for the precision.
    """
    assert run.world_size is not None
    strategy, model, world = settled_strategy(run), _planned(run)[0].model, run.world_size
    row = strategy.precision_config.row
    peak = (gpu.tflops if gpu else {}).get("fp8" if strategy.precision_config.mode == "fp8" else row.compute)
    try:
        formula = flop_formula(model)
    except (AttributeError, ValueError):  # no formula, or a config without such keys
        return None
    if gpu is None or peak is None:
        return None
    global_rows = run.data.global_batch_size or DEFAULT_BATCH
    tokens = float(global_rows * (1 + isinstance(run.model, PreferenceModelConfig)) * run.data.max_seq_length)
    counts = {"tokens": tokens, "supervised_tokens": tokens, "squared_tokens": tokens * run.data.max_seq_length}
    words = dict.fromkeys(formula.blocks, "full" if strategy.activation_config.mode == "full" else "no")
    operations = formula.train_flops(counts) + (formula.recomputed_flops(counts, words) or 0.0)
    compute = operations / world / (peak * 1e12 * PEAK_SHARE)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_units, forwards = len(formula.blocks) + 2, global_rows // (run.data.micro_batch_size * world)
    traffic = step_traffic(
        total,
        num_units,
        strategy.sharding if strategy.is_sharded else "no_shard",
        mesh_shape(strategy, run.num_nodes, world),
        ranks_per_node=world // run.num_nodes,
        gather_bytes=TORCH_DTYPES[row.compute].itemsize,
        reduce_bytes=TORCH_DTYPES[row.reduce].itemsize * trained / total,
        forwards=forwards,
        reductions=forwards if strategy.sync_each_micro_batch else 1,
    )
    communication = traffic.rank_bytes / (gpu.link_gb_per_second * 1e9)
    if run.num_nodes > 1:
        communication = max(communication, traffic.seconds(NETWORK_GB_PER_SECOND * 1e9))
    ends = 2 * communication / num_units / forwards
    exposed = max(communication - compute, min(ends, communication))
    rate = tokens / (compute + exposed)
    return {"compute": compute, "communication": communication, "exposed": exposed, "tokens_per_second": rate}


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
