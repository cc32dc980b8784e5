"""FSDP units of experts under expert parallel: the experts of each rank, and sharding.

Parameters stay split along dim 0 over all ranks of a copy, as without expert parallel, so that checkpoints, optimizers
and norms do not change. Each of ``n`` neighboring ranks gathers only its own experts, from the ranks with the same
index in the other groups of neighbors.
"""

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from lit_fsdp.errors import require
from lit_fsdp.models.adapter_names import is_lora
from lit_fsdp.models.expert_parallel import ExpertGroup
from lit_fsdp.models.experts import grouped_experts, prepare_experts


def check_experts(model: nn.Module, degree: int, shards: int, path: str) -> None:
    """Refuse to divide the experts of a model over ``degree`` of the ``shards`` ranks that have a copy of it.

    Raises:
        ConfigError: It has no experts with the common interface, another implementation, or too few experts.
    """
    kinds = (module.config.model_type for module in model.modules() if isinstance(module, PreTrainedModel))
    kind = next(kinds, type(model).__name__)
    found, given = grouped_experts(model), f"{degree} for {kind}"
    allowed = "1, or a mixture whose experts take hidden states, indices and weights"
    require(found, path, f"{given}, which has no such experts", allowed, "drop expert_parallel")
    copied = any(".modules_to_save." in f".{name}." for name in found)
    text = f"{given}, with a trained copy of its experts (model.lora.modules_to_save)"
    require(not copied, path, text, "1, or adapters on experts", "drop expert_parallel")
    for name, experts in found.items():
        own = dict(experts.named_parameters())
        others = [n for n, p in own.items() if not is_lora(n) and p.shape[:1] != (experts.num_experts,)]
        text = f"{given}, whose {name} has {', '.join(others[:1])}, which is not split by expert"
        require(not others, path, text, allowed, "drop expert_parallel")
        chosen = getattr(experts.config, "_experts_implementation", None)
        text = f"{given}, whose experts use {chosen}"
        grouped = "grouped_mm, and sizes of experts that are multiples of 8"
        require(chosen == "grouped_mm", path, text, grouped, "drop expert_parallel")
        counts = [n for n in range(1, shards + 1) if shards % n == 0 and _fits(experts.num_experts, shards, n)]
        given_here = f"{given}, with {experts.num_experts} experts over {shards} ranks"
        require(degree in counts, path, given_here, " | ".join(map(str, counts)), f"set expert_parallel: {counts[-1]}")


def divide_experts(model: nn.Module, group: dist.ProcessGroup, shards: int) -> None:
    """Divide the experts of a checked model over the ranks of ``group``, in place."""
    prepare_experts(model)
    for experts in grouped_experts(model).values():
        experts.expert_group = ExpertGroup(group, held_experts(experts.num_experts, shards, dist.get_world_size(group)))


def shard_experts(experts: Any, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Apply ``fully_shard`` to each rank's own experts over ``mesh``; the ``options`` are those of other units.

    torch shards a tensor of the own experts. Its parameters are then replaced by DTensors of all experts on the mesh of
    other units, in which this rank has the same rows.
    """
    whole, group = options["mesh"], experts.expert_group
    placements = [*[Replicate()] * (whole.ndim - 1), Shard(0)]
    shapes = {}
    for name, param in list(experts._parameters.items()):
        if param is not None:
            shapes[name] = param.shape, param.stride()
            setattr(experts, name, nn.Parameter(param.detach()[group.own], param.requires_grad))
    policy = dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)  # weights may be in fp32 on purpose
    fully_shard(experts, **{**options, "mesh": mesh, "mp_policy": policy})
    for name, (shape, stride) in shapes.items():
        own: Any = experts._parameters[name]
        rows = DTensor.from_local(own.to_local(), whole, placements, run_check=False, shape=shape, stride=stride)
        setattr(experts, name, nn.Parameter(rows, own.requires_grad))  # FSDP adopts it before the first forward pass


def _rows(num_experts: int, shards: int) -> list[range]:
    """The experts in the rows of each rank, as torch splits dim 0."""
    size = -(-num_experts // shards)
    return [range(min(rank * size, num_experts), min((rank + 1) * size, num_experts)) for rank in range(shards)]


def held_experts(num_experts: int, shards: int, degree: int) -> list[list[int]]:
    """The experts of each of ``degree`` neighbors: its rows and those of its counterparts in the other groups."""
    rows = _rows(num_experts, shards)
    return [[expert for rank in rows[place::degree] for expert in rank] for place in range(degree)]


def _fits(num_experts: int, shards: int, degree: int) -> bool:
    """Whether torch splits the experts of each neighbor into the rows of its counterparts."""
    rows = _rows(num_experts, shards)
    for place, experts in enumerate(held_experts(num_experts, shards, degree)):
        sizes = [len(part) for part in _rows(len(experts), shards // degree)]
        if not experts or sizes != [len(part) for part in rows[place::degree]]:
            return False
    return True
