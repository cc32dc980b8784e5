"""Simulate one training step with tensors without data to find its memory.

The engine's own code shards a model of three blocks over torch's fake process group, and one micro-batch runs forward
and backward under ``FakeTensorMode``: every tensor has its shape, dtype and lifetime, but no memory. The memory added
by the third block is that of each further block. Assumptions: all tokens are supervised, ``torch.compile``, which may
need less, is off, and fsdp1 behaves like fsdp2.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lit_fsdp.audit import CausalLMModule, device_type, pinned_excess, settled_strategy
from lit_fsdp.config.model import PreferenceModelConfig
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.metrics.hardware import is_accelerator
from lit_fsdp.models.attention import BY_SAMPLE
from lit_fsdp.models.build import build_trainable
from lit_fsdp.models.expert_parallel import ExpertGroup, Sizes, share_sent
from lit_fsdp.models.loss import NUM_TARGETS, causal_lm_forward, plan_loss
from lit_fsdp.models.packing import model_inputs
from lit_fsdp.models.parts import RowParts, context_method
from lit_fsdp.models.quantize import give_shapes
from lit_fsdp.models.resolve import resolve_architecture
from lit_fsdp.parallel.activation import host_copies, prepare_blocks
from lit_fsdp.parallel.expert_units import divide_experts
from lit_fsdp.parallel.fully_sharded import apply_fully_shard, unit_options
from lit_fsdp.parallel.mesh import build_expert_groups
from lit_fsdp.parallel.precision import TORCH_DTYPES, cast_parameters
from lit_fsdp.parallel.units import plan_for, quantized_layers

_BLOCKS = 3  # input and output of the first may differ from those of the others
_GLOO_COPIES = {torch.ops.c10d._allgather_base_.default: 0, torch.ops.c10d._reduce_scatter_base_.default: 1}
"""The argument that gloo copies while it sends (ProcessGroupGloo.cpp): output and input."""
_Live = Counter[str]
"""Live bytes by kind: ``work``, ``gathered``, ``reduced`` and ``gradients``, and ``host`` for those of the host."""


@dataclass(frozen=True)
class StepMemory:
    """Peak bytes of a rank during a step, besides parameters and optimizer state.

    ``kept``: activations of all blocks for the backward pass. ``at_work``: temporary tensors in one block, or in head
    and loss, including logits and gradients of activations. ``gathered``: unsharded weights, in use and prefetched.
    ``reduced``: unsharded gradients. ``gradients``: sharded gradients so far, none if offload keeps them on the host.
    ``host``: activations of all blocks in host memory, not part of ``total``.
    The ``moment`` is ``forward`` (ends with the loss, if chunked with its gradient), ``head`` or ``blocks`` (their
    backward pass) or ``optimizer``. The numbers ``block`` and ``loss`` are the ``at_work`` bytes at the peaks of the
    backward pass of blocks, and of head and loss.
    """

    moment: str
    gradients: int
    kept: int = 0
    at_work: int = 0
    gathered: int = 0
    reduced: int = 0
    block: int = 0
    loss: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes besides parameters and optimizer state."""
        return self.kept + self.at_work + self.gathered + self.reduced + self.gradients


class _Watch(TorchDispatchMode):
    """Count the bytes of every storage during its lifetime, by the kind of work that created it."""

    def __init__(self, known: Iterable[torch.Tensor], copied: Mapping[Any, int]) -> None:
        super().__init__()
        self._copied = copied
        self.live: _Live = Counter()
        self.kind, self.phase = "work", "forward"
        self.highest: dict[str, _Live] = {}
        self.forward_ends: list[_Live] = []
        self.backward_starts: list[_Live] = []
        self._sizes: dict[int, tuple[str, int]] = {tensor.untyped_storage()._cdata: ("", 0) for tensor in known}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device
        made = [torch.empty_like(args[self._copied[op]])] if op in self._copied else []
        out = _without_data(op, *args, **(kwargs or {}))
        out = op(*args, **(kwargs or {})) if out is None else out
        for tensor in [*made, *tree_leaves(out)]:
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in self._sizes:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = (self.kind, 0)
                self.resized(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self._end, storage._cdata)
        return out

    def follow(self, blocks: list[nn.Module]) -> None:
        """Record live bytes at the end of each block's forward, and start a phase with each block's backward pass."""

        def begin(number: int, grad: torch.Tensor) -> None:
            self.phase = f"block {number}"
            self.backward_starts.append(self.live.copy())

        def after(number: int, module: nn.Module, args: Any, output: Any) -> None:
            if self.phase == "forward":  # not recomputed
                self.forward_ends.append(self.live.copy())
                first = next(t for t in tree_leaves(output) if torch.is_tensor(t))
                first.register_hook(functools.partial(begin, number))

        for number, block in enumerate(blocks):
            block.register_forward_hook(functools.partial(after, number))

    def move(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count these tensors as another kind."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            before, size = self._sizes.get(key, ("", 0))
            if before and before != kind:
                self.resized(key, 0)
                self._sizes[key] = (kind, 0)
                self.resized(key, size)

    def resized(self, key: int, size: int) -> None:
        """Update the size of a storage that was created in the step."""
        kind, before = self._sizes.get(key, ("", 0))
        if not kind:
            return
        self._sizes[key] = (kind, size)
        self.live[kind] += size - before
        if self.phase not in self.highest or _on_device(self.live) > _on_device(self.highest[self.phase]):
            self.highest[self.phase] = self.live.copy()

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Size, tuple[int, ...], torch.dtype]:
        """Copy a tensor that is saved for the backward pass to the host, where the copy is pinned."""
        before, self.kind = self.kind, "host"
        pinned = tensor.new_empty(tensor.nbytes + pinned_excess(tensor.nbytes), dtype=torch.uint8)
        strides = torch.empty_like(tensor).stride()  # as of a copy
        self.kind = before
        return pinned, tensor.shape, strides, tensor.dtype

    def from_host(self, copied: tuple[torch.Tensor, torch.Size, tuple[int, ...], torch.dtype]) -> torch.Tensor:
        """Copy it back."""
        pinned, shape, strides, dtype = copied
        return pinned.new_empty_strided(shape, strides, dtype=dtype)

    def _end(self, key: int) -> None:
        self.resized(key, 0)
        del self._sizes[key]


def _on_device(live: _Live) -> int:
    return live.total() - live["host"]


def _without_data(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Emulate ops that need data or that torch rejects: indexing by a mask takes all rows; experts in fp32."""
    if op in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default):
        (mask, *others) = args[1]
        if mask is not None and mask.dtype == torch.bool and not others:
            rows = args[0].reshape(-1, *args[0].shape[mask.dim() :])
            return rows.clone() if op is torch.ops.aten.index.Tensor else args[0]
    if op is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:  # torch 2.13: bf16 alone on meta
        left, right = args[:2]
        ends: Any = kwargs.get("offs", args[2] if len(args) > 2 else None)
        groups = [len(ends)] if left.dim() == right.dim() == 2 else []
        return left.new_empty(*groups, *left.shape[:-1], right.shape[-1])
    return None


def step_memory(run: RunConfig, gradient_bytes: int, accumulates: bool) -> StepMemory:
    """Simulate a step of a checked recipe with a known number of ranks, and return its memory peak.

    The number ``gradient_bytes`` is the size of all gradients of a rank between steps. Raises :class:`ConfigError` for
    an architecture that cannot be shortened, or that needs tensor values.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert run.world_size is not None
    strategy, config = settled_strategy(run), resolve_architecture(run.model)
    small = copy.deepcopy(config.get_text_config())
    num_blocks = int(small.num_hidden_layers)
    small.num_hidden_layers = min(_BLOCKS, num_blocks)
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[: small.num_hidden_layers]
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=run.world_size)
        try:
            watch = _simulate(small, run, strategy)
        finally:
            dist.destroy_process_group()
        found = _highest(watch, num_blocks, gradient_bytes, accumulates, strategy.offloads)
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        given = f"a step of {config.model_type} without values ({' '.join(str(error).split())[:200]})"
        fix = "measure a run of one step: peak_memory_gib in metrics.csv"
        raise ConfigError("plan", given, "architectures whose blocks run on tensors without values", fix) from error
    if strategy.engine == "ddp" and run.world_size > 1:  # its buckets, and the copies being sent
        found = dataclasses.replace(found, reduced=2 * gradient_bytes)
    return found


def _simulate(hf_config: Any, run: RunConfig, strategy: StrategyConfig) -> _Watch:
    model: Any = build_trainable(hf_config, dataclasses.replace(run.model, attn_implementation=None))[0]
    row = strategy.precision_config.row
    holder: Any = CausalLMModule(model)
    cast_parameters(holder, strategy)
    wrap = strategy.wrap_config
    if not wrap.manual:  # few blocks leave a larger share in the root than the model, which was checked
        strategy = dataclasses.replace(strategy, wrap=dataclasses.replace(wrap, max_root_share=1.0))
    units = plan_for(holder, dataclasses.replace(strategy, compile=False), "strategy")
    blocks = list(units.blocks)
    prepare_blocks(blocks, strategy.activation_config)
    loss_plan = plan_loss(model, run.model.loss)
    holder.forward = lambda batch: causal_lm_forward(model, batch, loss_plan).loss_sum
    shape = run.mesh_shape()
    names = ("replicate", "shard") if shape[0] > 1 else ("shard",)
    mesh = init_device_mesh("cpu", shape[-len(names) :], mesh_dim_names=names)
    expert_mesh = None
    if (degree := strategy.expert_parallel) > 1:
        group, expert_mesh = build_expert_groups("cpu", *shape, degree, timedelta(seconds=60))
        divide_experts(holder, group, shape[1])
    for layer in quantized_layers(holder).values():  # torch 2.11 cannot create fake tensors of a subclass
        packed = torch.empty(layer.weight.shape, dtype=layer.weight.dtype, device="meta")
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    batch = _batch(run, model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        holder.to_empty(device="cpu")
        model.tie_weights()
        for layer in quantized_layers(holder).values():
            give_shapes(layer, TORCH_DTYPES[row.compute])
        root = holder
        if strategy.is_sharded:
            on_device = dataclasses.replace(strategy, cpu_offload=False)
            whole = [p for p in holder.parameters() if not p.dim()]
            how = unit_options(on_device, mesh), whole, lambda module: None, is_accelerator(device_type(run))
            root = apply_fully_shard(holder, units, on_device, *how, expert_mesh=expert_mesh)
        num_targets = batch["input_ids"].numel() // strategy.context_config.degree
        autocast = row.compute != row.param and not strategy.is_sharded
        batch = tree_map_only(torch.Tensor, torch.empty_like, batch)
        given = [leaf for leaf in tree_leaves(batch) if torch.is_tensor(leaf)]
        known = _locals([*holder.parameters(), *holder.buffers(), *given])
        watch = _Watch(known, _GLOO_COPIES if device_type(run) == "cpu" else {})
        watch.follow(blocks)
        with watch, _engine_kinds(watch), _offload(watch, device_type(run)):
            with torch.autocast("cpu", TORCH_DTYPES[row.compute], enabled=autocast):
                loss = root({**batch, NUM_TARGETS: num_targets})
            watch.phase = "head"
            loss.backward()
    return watch


def _batch(run: RunConfig, model: Any) -> dict[str, Any]:
    """Build the batch of a rank: rows of maximum length, or its part of them in a context group."""
    rows = run.data.micro_batch_size * (1 + isinstance(run.model, PreferenceModelConfig))
    ids = torch.ones(rows, run.data.max_seq_length, dtype=torch.int64)
    given, config = {"input_ids": ids, "labels": ids}, run.strategy.context_config
    if config.degree == 1:  # transformers would treat fake positions as packed samples, and build a mask
        by_sample = {"sample_lengths": (ids.shape[1],)} if model.config._attn_implementation == BY_SAMPLE else {}
        return {**given, **by_sample}
    group: Any = dist.new_group(list(range(config.degree)))
    context = RowParts(group, context_method(model, config, f"{STRATEGY}.context_parallel"))
    return model_inputs(context.cut({**given, "attention_mask": torch.ones_like(ids)}), BY_SAMPLE)


def _locals(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]


def _evenly_exchanged(
    group: ExpertGroup, counts_E: torch.Tensor, rows_n: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, Sizes]:
    """Assume that the router sends equally many tokens to each rank, because fake tensors have no values."""
    n, (num_tokens, num_choices) = group.degree, shape
    choices = [num_tokens * num_choices // n] * n
    choices[0] += num_tokens * num_choices % n
    rows = [min(choices[0], math.ceil(num_tokens * share_sent(len(counts_E), n, num_choices)))] * n
    counts_nE = counts_E.new_empty(n, len(group.own))
    return counts_nE, rows_n.new_empty(n), Sizes(choices, [choices[0]] * n, rows, rows)


@contextlib.contextmanager
def _offload(watch: _Watch, device: str) -> Iterator[None]:
    """Count activations that are offloaded from an accelerator; on a CPU they stay where they are."""
    if device == "cpu":
        yield
        return
    host_copies.append((watch.to_host, watch.from_host))
    try:
        yield
    finally:
        host_copies.pop()


def _engine_kinds(watch: _Watch) -> contextlib.ExitStack:
    """Separate the tensors that the engine gathers, frees and reduces from those that the model computes."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    resize: Any = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        watch.resized(storage._cdata, size)
        return result

    def of_kind(original: Any, kind: str) -> Any:
        def call(group: Any, *args: Any) -> Any:
            grads = [p.unsharded_param.grad for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
            watch.move((grad for grad in grads if grad is not None), "reduced")
            before, watch.kind = watch.kind, kind
            result = original(group, *args)
            watch.kind = before
            shards = [p.sharded_param.grad for p in group.fsdp_params if p.sharded_param.grad is not None]
            watch.move(_locals(shards), "gradients")
            return result

        return call

    replaced = contextlib.ExitStack()
    replaced.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))  # how engines free
    replaced.enter_context(mock.patch.object(ExpertGroup, "exchanged", _evenly_exchanged))
    kinds = {"unshard": "gathered", "wait_for_unshard": "gathered", "post_backward": "reduced"}
    for name, kind in kinds.items():
        of = of_kind(getattr(FSDPParamGroup, name), kind)
        replaced.enter_context(mock.patch.object(FSDPParamGroup, name, of))
    return replaced


def _highest(watch: _Watch, num_blocks: int, gradient_bytes: int, accumulates: bool, offloads: bool) -> StepMemory:
    """Extrapolate the memory peak of the full model from the peaks of the short model."""
    forward, backward = watch.forward_ends, watch.backward_starts
    simulated = len(forward)
    further = num_blocks - simulated
    kept, host = (forward[-1][kind] - forward[-2][kind] for kind in ("work", "host"))
    each = backward[-1]["gradients"] - backward[-2]["gradients"]
    stays = forward[-2]["gathered"] - forward[0]["gathered"]  # 0 if all blocks except the last are freed after forward
    found = {"optimizer": Counter(gradients=0 if offloads else gradient_bytes)}
    for phase, live in watch.highest.items():
        # early in the backward pass all activations exist, late all gradients
        is_early = phase in ("forward", "head", f"block {simulated - 1}")
        all_kept = kept * (num_blocks if is_early else 1)
        gradients = live["gradients"] + (0 if is_early else each * further)
        if accumulates or phase == "forward":  # Lightning frees the previous gradients after the forward
            gradients = gradient_bytes
        found[phase] = Counter(
            kept=all_kept,
            at_work=live["work"] + (kept * further if is_early else 0) - all_kept,
            gathered=live["gathered"] + (stays * further if is_early else 0),
            reduced=live["reduced"],
            gradients=0 if offloads else gradients,  # offload: those of a unit leave once reduced
        )
    moment, highest = max(found.items(), key=lambda pair: pair[1].total())
    block = max(live["at_work"] for phase, live in found.items() if phase.startswith("block"))
    loss = max(live["at_work"] for phase, live in found.items() if not phase.startswith("block"))
    moment = moment.partition(" ")[0].replace("block", "blocks")
    return StepMemory(**highest, moment=moment, block=block, loss=loss, host=host * num_blocks)
