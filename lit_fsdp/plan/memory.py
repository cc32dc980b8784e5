"""Predict the peak memory of each rank of a recipe, by kind, and the time of a step, without running it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lit_fsdp.audit import CausalLMModule, device_type, settled_strategy, state_per_rank
from lit_fsdp.config.data import DEFAULT_BATCH
from lit_fsdp.config.model import ModelConfig, PreferenceModelConfig
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.metrics.flops import experts_per_token, flop_formula
from lit_fsdp.metrics.hardware import Gpu
from lit_fsdp.models.adapter_names import is_lora
from lit_fsdp.models.build import build_trainable
from lit_fsdp.models.expert_parallel import share_sent
from lit_fsdp.models.experts import grouped_experts
from lit_fsdp.models.optimizers import state_bytes
from lit_fsdp.models.parts import context_method
from lit_fsdp.models.resolve import resolve_architecture
from lit_fsdp.parallel.expert_units import check_experts
from lit_fsdp.parallel.precision import TORCH_DTYPES, cast_parameters
from lit_fsdp.parallel.units import UnitPlan, plan_for
from lit_fsdp.plan.simulate import StepMemory, step_memory

T = TypeVar("T")

# Assumptions. Per GPU: memory outside of tensors (CUDA context, NCCL buffers, cuBLAS workspaces); share of its memory
# usable for tensors, without driver memory and fragmentation. Per node: one port of 400 Gbit/s in each direction. Share
# of the peak rate that blocks reach. Per host: memory bandwidth with all cores stepping, copy rate from one GPU to
# unpinned memory, memory of a rank outside of tensors (Python, libraries, loaders), share of its memory that ranks may
# use.
OVERHEAD_BYTES = int(1.5 * 2**30)
USABLE = 0.97
NETWORK_GB_PER_SECOND = 50.0
PEAK_SHARE = 0.4
HOST_GB_PER_SECOND = 200.0
PAGEABLE_GB_PER_SECOND = 6.0
PROCESS_BYTES, CPU_PROCESS_BYTES = 4 * 2**30, 2**30  # of a rank that trains on a GPU, or on the CPU
HOST_USABLE = 0.9
_GATHERS = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0, "hybrid_shard": 2, "hybrid_shard_zero2": 1}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank with most memory: state between steps (in host memory if ``offloads``) and during a step.

    The number ``largest_tensor`` is the maximum that loading needs besides the shards.
    """

    parameters: int
    gradients: int
    optimizer: int
    step: StepMemory
    largest_tensor: int
    offloads: bool

    @property
    def peak(self) -> int:
        """Peak bytes on the device during a step."""
        return (0 if self.offloads else self.parameters + self.optimizer) + self.step.total

    def room(self, gib: float) -> float:
        """Return the free bytes on a GPU of this size; negative if the run does not fit."""
        return gib * USABLE * 2**30 - OVERHEAD_BYTES - self.peak


def _once(function: Callable[..., T]) -> Callable[..., T]:
    """Cache results: a simulated step takes one or two seconds, and a search repeats calls."""
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
    strategy, state = settled_strategy(run), _largest_state(run)
    steps = run.accumulation_steps()
    step = step_memory(run, state["gradient_bytes"], accumulates=steps > 1)
    row = strategy.precision_config.row
    if steps > 1 and strategy.is_sharded and not strategy.sync_each_micro_batch:
        # full gradients stay on the device until the last micro-batch, in the reduction dtype
        trained = sum(number for param, number in _numels(run) if param.requires_grad)
        waiting = trained * TORCH_DTYPES[row.reduce].itemsize
        step = dataclasses.replace(step, gradients=0, reduced=step.reduced + waiting)
    largest = max(param.numel() for param in _planned(run)[0].parameters()) * TORCH_DTYPES[row.param].itemsize
    if strategy.offloads:  # a shard arrives in its stored dtype, and is cast on the device
        step = dataclasses.replace(step, gathered=step.gathered + largest // run.mesh_shape()[1])
    return RankMemory(
        parameters=state["parameter_bytes"] + state.get("quantization_bytes", 0),
        gradients=state["gradient_bytes"],
        optimizer=state["optimizer_bytes"],
        step=step,
        largest_tensor=largest,
        offloads=strategy.offloads,
    )


def host_memory(run: RunConfig) -> dict[str, int]:
    """Compute the host memory in bytes of the ranks of a node, by kind and in ``total``.

    The entry ``state`` is offloaded state, ``activations`` offloaded activations (if any), ``rounding`` the excess size
    of the pinned blocks of state, ``staged`` the (pinned) copy for background saves (for a checkpoint in one file, on
    the first node), ``peaks`` those of ranks that train on the CPU, and ``processes`` everything else.
    """
    on_cpu = device_type(run) == "cpu"
    assert run.world_size is not None
    strategy, state, ranks = settled_strategy(run), _largest_state(run), run.world_size // run.num_nodes
    copies, shards = run.mesh_shape()
    # checkpoints do not include a frozen base
    saved = state["gradient_bytes" if run.model.lora else "parameter_bytes"] + state["optimizer_bytes"]
    staged = saved * shards if strategy.state_dict == "full" else saved * ranks // copies
    staged *= run.checkpoint.in_background(not on_cpu, strategy.offloads)
    rounding = state.pop("rounding_bytes", 0) * ranks
    found = {"state": _state_of(state) * ranks * strategy.offloads, "rounding": rounding, "staged": staged}
    if on_cpu:
        found["peaks"] = rank_memory(run).peak * ranks
    elif strategy.activation_config.offload_activations:
        found["activations"] = rank_memory(run).step.host * ranks
    found["processes"] = (CPU_PROCESS_BYTES if on_cpu else PROCESS_BYTES) * ranks
    return {**found, "total": sum(found.values())}


def least_bytes(run: RunConfig) -> int:
    """Return the minimum bytes of the largest rank for any batch, including weights that stay gathered, unsimulated."""
    strategy = settled_strategy(run)
    if strategy.offloads:
        return 0
    size = TORCH_DTYPES[strategy.precision_config.row.compute].itemsize
    gathered = sum(number for _, number in _numels(run))
    return _state_of(_largest_state(run)) + strategy.keeps_gathered * size * gathered


def zero_table(run: RunConfig) -> dict[str, int]:
    """Return bytes of parameters, gradients and AdamW state per rank: full, and by ZeRO stage (arXiv:1910.02054)."""
    assert run.world_size is not None
    alone = dataclasses.replace(
        run.strategy, engine="ddp", sharding="no_shard", cpu_offload=False, context_parallel=1, expert_parallel=1
    )
    whole = _largest_state(dataclasses.replace(run, strategy=alone))
    kinds = [whole[f"{kind}_bytes"] for kind in ("optimizer", "gradient", "parameter")]
    found = {}
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        found[name] = sum(-(-size // run.world_size) if i < stage else size for i, size in enumerate(kinds))
    return found


def _largest_state(run: RunConfig) -> dict[str, int]:
    """Return the state of the largest rank."""
    strategy = settled_strategy(run)
    module, plan = _planned(run)
    kept = state_bytes(run.model.optim, module.model, TORCH_DTYPES[strategy.precision_config.row.param].itemsize)[0]
    pins = strategy.offloads and device_type(run) != "cpu"
    return max(state_per_rank(module, plan, strategy, run.mesh_shape()[1], kept, pins), key=_state_of)


def _planned(run: RunConfig) -> tuple[Any, UnitPlan]:
    """Return the full model on the meta device and its units, cached for all choices that change neither."""
    given = settled_strategy(run)
    names = ("engine", "wrap", "precision", "compile", "expert_parallel")
    alike = StrategyConfig(**{name: getattr(given, name) for name in names})
    module, plan = _model_and_units(dataclasses.replace(run.model, attn_implementation=None), alike)
    if (degree := given.expert_parallel) > 1:
        check_experts(module, degree, run.mesh_shape()[1], f"{STRATEGY}.expert_parallel")
    return module, plan


@_once
def _model_and_units(model: ModelConfig, strategy: StrategyConfig) -> tuple[Any, UnitPlan]:
    module = CausalLMModule(build_trainable(resolve_architecture(model), model)[0])
    cast_parameters(module, strategy)
    return module, plan_for(module, strategy, STRATEGY)


def _state_of(rank: dict[str, int]) -> int:
    return sum(size for kind, size in rank.items() if kind.endswith("_bytes"))


# Communication of an optimizer step. Every collective counts as a ring over its ranks, with ranks of a node adjacent,
# as in NCCL: for an all-gather or reduce-scatter of S bytes over n ranks, each rank sends S (n-1)/n bytes, for an
# all-reduce twice as many. A ring leaves a node once, so the same number of bytes leaves the node for any number of its
# ranks in the ring; rings of different ranks of a node (the copies of hybrid sharding) add up.


def sent_bytes(gathered: float, reduced: float, mesh: tuple[int, int], ranks_per_node: int = 8) -> tuple[float, float]:
    """Return the maximum bytes that a rank sends to its neighbor, and a node to the next node, per optimizer step.

    The numbers ``gathered`` and ``reduced`` are bytes of full parameters and gradients, over all gathers and reductions
    of the step. Gradients are reduce-scattered over the ranks of a copy and all-reduced over copies. The ``mesh`` is
    the number of model copies and of ranks per copy: full nodes, or a part of a node. That the root unit stays gathered
    is ignored.

    Source: ZeRO, arXiv:1910.02054, section 7; hybrid sharding: PyTorch FSDP, arXiv:2304.11277, section 3.2.2.
    """
    copies, degree = mesh
    inside = (gathered + reduced) * (degree - 1) / degree
    across = 2 * (copies - 1) / copies * reduced / degree
    node_bytes = inside if degree > ranks_per_node else 0.0
    if copies * degree > ranks_per_node:
        node_bytes += across * min(degree, ranks_per_node)
    return inside + across, node_bytes


def step_time(run: RunConfig, gpu: Gpu | None) -> dict[str, float] | None:
    """Compute the seconds of an optimizer step, and the token rate over all ranks, for samples of maximum length.

    The entry ``exposed`` is the exposed time of communication or ``copies``, whichever takes longer: the part that
    exceeds the computation, the first gather, the last reduction. With offload every gather copies shards in their
    stored dtype, and the first reduction copies gradients to pinned memory. For further micro-batches, in unpinned
    memory, the ``host`` waits (torch's ``foreach_reduce``), accumulates, and steps. The entry ``activations`` is the
    time of copies of offloaded activations, all of it exposed. None: the operations of this
    architecture, or the peak rate of the precision, are unknown.
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
    tokens, forwards, reductions = _of_a_step(run)
    counts = {"tokens": tokens, "supervised_tokens": tokens, "squared_tokens": tokens * run.data.max_seq_length}
    words = dict.fromkeys(formula.blocks, "full" if strategy.activation_config.mode == "full" else "no")
    operations = formula.train_flops(counts) + (formula.recomputed_flops(counts, words) or 0.0)
    compute = operations / world / (peak * 1e12 * PEAK_SHARE)
    rank_bytes, node_bytes, traveling = _sent(run, forwards, reductions, tokens / world)
    communication = max(rank_bytes / (gpu.link_gb_per_second * 1e9), node_bytes / (NETWORK_GB_PER_SECOND * 1e9))

    def rate(degree: int) -> float:  # of a group, in a node or across nodes
        return (gpu.link_gb_per_second if degree <= world // run.num_nodes else NETWORK_GB_PER_SECOND) * 1e9

    exchanged = _exchanged_bytes(run, model, tokens / world, TORCH_DTYPES[row.compute].itemsize)
    exchanges = exchanged / rate(strategy.context_config.degree) + traveling / rate(strategy.expert_parallel)
    copies = host = waits = 0.0
    if strategy.activation_config.offload_activations:  # to the host and back, in the stream that computes
        waits = 2 * forwards * rank_memory(run).step.host / (gpu.host_gb_per_second * 1e9)
    if strategy.offloads:
        state, further = _largest_state(run), reductions - 1
        gathers = forwards * (_GATHERS[strategy.sharding] or 2)
        gradients = state["gradient_bytes"]
        copies = (gathers * state["parameter_bytes"] + gradients) / (gpu.host_gb_per_second * 1e9)
        # the host accumulates, scales, measures and clips gradients; AdamW reads and writes parameters and moments
        touched = (4 * further + 8) * gradients + 2 * state["optimizer_bytes"]
        host = further * gradients / (PAGEABLE_GB_PER_SECOND * 1e9)
        host += touched * (world // run.num_nodes) / (HOST_GB_PER_SECOND * 1e9)
    moved = max(communication, copies)  # gathered shards have just been copied
    exposed = max(moved - compute, min(2 * moved / (len(formula.blocks) + 2) / forwards, moved))
    found = {"compute": compute, "communication": communication, "copies": copies, "host": host}
    exposed += exchanges + waits  # attention waits for exchanges
    found |= {"exposed": exposed, "exchanges": exchanges, "activations": waits}
    return {**found, "tokens_per_second": tokens / (compute + exposed + host)}


def _of_a_step(run: RunConfig) -> tuple[float, int, int]:
    """Return the tokens of an optimizer step on all ranks, and the forward passes and gradient reductions of a rank."""
    rows = run.data.global_batch_size or DEFAULT_BATCH
    forwards = rows // (run.data.micro_batch_size * run.data_ranks)
    tokens = float(rows * (1 + isinstance(run.model, PreferenceModelConfig)) * run.data.max_seq_length)
    return tokens, forwards, forwards if run.strategy.sync_each_micro_batch else 1


def _numels(run: RunConfig) -> Iterator[tuple[Any, int]]:
    """Yield each parameter, and the number of its elements that a rank gathers: of experts only those of the rank."""
    degree = run.strategy.expert_parallel
    divided = _expert_params(run) if degree > 1 else set()
    for param in _planned(run)[0].parameters():
        yield param, param.numel() // (degree if param in divided else 1)


def _expert_params(run: RunConfig) -> set[Any]:
    """Return expert weights that can be divided over ranks, without adapters, which are not divided."""
    experts = grouped_experts(_planned(run)[0].model).values()
    return {p for module in experts for name, p in module.named_parameters() if not is_lora(name)}


def expert_degree(run: RunConfig) -> int:
    """Return the maximum number of ranks in a node for expert parallel; 1 if it is impossible or has no benefit."""
    strategy, model, world = settled_strategy(run), _planned(run)[0], run.world_size or 1
    for degree in range(world // run.num_nodes, 1, -1) if grouped_experts(model) else ():
        try:
            divided = dataclasses.replace(strategy, engine="fsdp2", expert_parallel=degree)
            check_experts(model, degree, dataclasses.replace(run, strategy=divided).mesh_shape()[1], STRATEGY)
        except ConfigError:
            continue
        return degree
    return 1


def expert_bytes(run: RunConfig) -> dict[str, float] | None:
    """Return bytes per step that a rank sends for experts: ``weights`` without expert parallel, ``tokens`` with it.

    The number ``tokens`` includes weights. The ``degree`` is that of the recipe, or the maximum in a node. None if not
    divisible.
    """
    given = run.strategy.expert_parallel
    degree = given if given > 1 else expert_degree(run)
    if (
        degree == 1
        or run.strategy.engine != "fsdp2"
        or not experts_per_token(_planned(run)[0].model.config.get_text_config())
    ):
        return None
    tokens, forwards, reductions = _of_a_step(run)
    sent = {}
    for name, n in (("weights", 1), ("tokens", degree)):
        other = dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, expert_parallel=n))
        rank_bytes, _, traveling = _sent(other, forwards, reductions, tokens / (run.world_size or 1), experts_only=True)
        sent[name] = rank_bytes + traveling
    return {"degree": degree, **sent}


def _sent(
    run: RunConfig, forwards: int, reductions: int, tokens: float, experts_only: bool = False
) -> tuple[float, float, float]:
    """Return bytes per step of weights and gradients sent by a rank and a node, and of ``tokens`` to remote experts.

    The hidden states of a token are sent to each rank that has experts of it and back, in every pass.
    """
    assert run.world_size is not None
    strategy, model, per_node = settled_strategy(run), _planned(run)[0].model, run.world_size // run.num_nodes
    row, degree = strategy.precision_config.row, strategy.expert_parallel
    size, reduce_size = TORCH_DTYPES[row.compute].itemsize, TORCH_DTYPES[row.reduce].itemsize
    gathers = forwards * (_GATHERS[strategy.sharding] if strategy.is_sharded else 0)
    copies, shards = run.mesh_shape()
    experts = _expert_params(run) if degree > 1 or experts_only else set()
    rank_bytes = node_bytes = 0.0
    for is_of_experts, n in ((False, 1), (True, degree)):
        own = [p for p in model.parameters() if (p in experts) == is_of_experts]
        if experts_only and not is_of_experts:
            continue
        gathered = gathers * size * sum(p.numel() for p in own) / n
        reduced = reductions * reduce_size * sum(p.numel() for p in own if p.requires_grad) / n
        # neighbors have other experts: each ring has every n-th rank
        by_rank, by_node = sent_bytes(gathered, reduced, (copies, shards // n), max(1, per_node // n))
        rank_bytes, node_bytes = rank_bytes + by_rank, node_bytes + by_node * min(n, per_node)
    if degree == 1:
        return rank_bytes, node_bytes, 0.0
    config = model.config.get_text_config()
    active = experts_per_token(config)
    shares = sum(share_sent(module.num_experts, degree, active) for module in grouped_experts(model).values())
    rows = tokens * (degree - 1) * shares
    return rank_bytes, node_bytes, _passes(strategy) * 2 * rows * config.hidden_size * size


def _passes(strategy: StrategyConfig) -> int:
    """Return how often a block runs per micro-batch: forward, backward, and once more if it is recomputed."""
    return 2 + (strategy.activation_config.mode in ("full", "every_n", "memory_budget"))


def _exchanged_bytes(run: RunConfig, model: Any, tokens: float, size: int) -> float:
    """Return bytes per step that a rank of a context group sends for attention of the ``tokens`` that it computes.

    These are queries, keys, values and outputs, once in the forward pass, once in the backward pass, and once more if
    blocks are recomputed; or keys and values of all other ranks.
    """
    strategy, config = settled_strategy(run), model.config.get_text_config()
    degree = strategy.context_config.degree
    if degree == 1:
        return 0.0
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = 2 * groups * (degree - 1)
    if context_method(model, strategy.context_config, f"{STRATEGY}.context_parallel") == "ulysses":
        numbers = 2 * (heads + math.lcm(groups, degree)) * (degree - 1) / degree
    return _passes(strategy) * tokens * width * size * config.num_hidden_layers * numbers


def compared_memory(run: RunConfig, folder: Path) -> str:
    """Add the predicted peak of a run to its ``audit.json``, and return a line with the measured and predicted peak.

    Call this at the end of a process, after its process group is destroyed: the simulation creates a fake group.
    """
    from lit_fsdp.callbacks.records import add_to_audit

    try:
        predicted = rank_memory(run).peak
    except Exception as error:  # a failed prediction must not end a run
        return f"cannot predict peak memory: {error}"
    measured = max(add_to_audit(folder, {"predicted_peak_bytes": predicted})["measured_peak_bytes_per_rank"])
    what = "increase of memory per rank up to the peak" if device_type(run) == "cpu" else "peak memory per rank"
    return f"{what}: {measured / 2**30:.2f} GiB measured, {predicted / 2**30:.2f} GiB predicted"
