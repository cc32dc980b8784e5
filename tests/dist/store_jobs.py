"""Jobs of test_store.py: tensors of every odd kind, saved from one mesh and loaded into another."""

from __future__ import annotations

import pickle
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.errors import CheckpointError
from tests.dist.jobs import whole


def whole_tensors(step: int = 0) -> dict[str, torch.Tensor]:
    """The unsharded truth: odd sizes, fewer rows than ranks, numbers, empty ones, two dtypes."""
    torch.manual_seed(1234 + step)
    return {
        "model/0.weight": torch.randn(7, 5),
        "model/0.bias": torch.randn(7),
        "model/1.weight": torch.randn(1, 7),
        "model/1.bias": torch.randn(1),
        "model/half": torch.randn(6, 4).bfloat16(),
        "model/columns": torch.randn(3, 10),
        "model/number": torch.tensor(3.5),
        "model/empty": torch.empty(0, 3),
        "optim/0.weight/step": torch.tensor(9.0),
    }


def _sharded(truth: dict[str, torch.Tensor], mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The same on a mesh: the first four as parameters of a ``fully_shard`` module, the rest placed by hand."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(truth[f"model/{name}"])
    fully_shard(module, mesh=mesh)
    tensors = {f"model/{name}": tensor for name, tensor in get_model_state_dict(module).items()}
    before = [Replicate()] * (len(mesh_shape) - 1)
    for name, last in (("model/half", Shard(0)), ("model/columns", Shard(1)), ("optim/0.weight/step", Replicate())):
        tensors[name] = distribute_tensor(truth[name], mesh, [*before, last])
    assert sum(isinstance(tensor, DTensor) for tensor in tensors.values()) == 7
    return {**{name: tensor.clone() for name, tensor in truth.items()}, **tensors}


def _meet() -> tuple[int, int]:
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def _save(folder: str, step: int, tensors: dict[str, torch.Tensor], layout: Any, own: Any) -> str:
    """The error of this rank."""
    try:
        store.save_checkpoint(
            step_folder(Path(folder), step), tensors, {"step": step}, {"global_step": step}, layout, rank_state=own
        )
    except CheckpointError as error:
        return str(error)
    return "no error"


def save_all(folder: str) -> list[str]:
    """Steps 1 (sharded) and 2 (full); four ranks save from a 2-D mesh."""
    rank, size = _meet()
    mesh = (2, 2) if size == 4 else (size,)
    return [
        _save(folder, step, _sharded(whole_tensors(step), mesh), layout, {"rank": rank})
        for step, layout in ((1, "sharded"), (2, "full"))
    ]


def load_all(folder: str) -> list[list[str]]:
    """The names that come back other than they were, of each step, on a 1-D mesh and with four ranks on a 2-D one."""
    _, size = _meet()
    found = []
    for mesh in [(size,), *([(2, 2)] if size == 4 else [])]:
        for step in (1, 2):
            into = _sharded(whole_tensors(99), mesh)
            store.load_tensors(step_folder(Path(folder), step), into)
            assert store.load_state(step_folder(Path(folder), step), 1) == {"rank": 1}
            truth, loaded = whole_tensors(step), {name: whole(tensor) for name, tensor in into.items()}
            found.append([n for n in truth if loaded[n].dtype != truth[n].dtype or not loaded[n].equal(truth[n])])
    return found


def refused_saves(folder: str) -> list[str]:
    """What cannot be written on rank 1, and tensors that only rank 0 has."""
    rank, size = _meet()
    tensors = _sharded(whole_tensors(3), (size,))
    own = _save(folder, 3, tensors, "sharded", {"thing": object() if rank else 0})
    more = {"model/number": torch.zeros(2)} if rank == 0 else {}
    return [own, _save(folder, 3, {**tensors, **more}, "sharded", {})]


def no_memory_to_gather(folder: str) -> tuple[str, float]:
    """The error and the seconds of each rank where rank 1 has not the memory for one whole tensor."""
    rank, size = _meet()
    tensors = {"w": DTensor.from_local(torch.empty(1 << 25), init_device_mesh("cpu", (size,)), [Shard(0)])}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + 3 * (1 << 26), resource.RLIM_INFINITY))
    started = time.monotonic()
    return _save(folder, 4, tensors, "full", {}), time.monotonic() - started


def first_of_all(folder: str) -> tuple[int, int]:
    """How long rank 0's value is on this rank, and how many objects were gathered that were not of a few bytes."""
    _meet()
    gather, large = dist.all_gather_object, []

    def counted(found: list[Any], own: Any, group: Any = None) -> None:
        large.append(len(pickle.dumps(own)) > 1000)
        gather(found, own, group=group)

    dist.all_gather_object = counted  # type: ignore[assignment]
    value = Ranks().first("reading", lambda: "x" * 100_000)
    dist.destroy_process_group()
    return len(value), sum(large)
