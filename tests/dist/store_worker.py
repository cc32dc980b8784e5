"""What test_store.py runs on ranks that tests.dist.forks forks, which share the imports."""

from __future__ import annotations

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

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.run_folder import checkpoints, step_folder
from lit_fsdp.errors import CheckpointError


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


def sharded(whole: dict[str, torch.Tensor], mesh_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The same on a mesh: the first four as parameters of a ``fully_shard`` module, the rest placed by hand."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(whole[f"model/{name}"])
    fully_shard(module, mesh=mesh)
    tensors = {f"model/{name}": tensor for name, tensor in get_model_state_dict(module).items()}
    before = [Replicate()] * (len(mesh_shape) - 1)
    tensors["model/half"] = distribute_tensor(whole["model/half"], mesh, [*before, Shard(0)])
    tensors["model/columns"] = distribute_tensor(whole["model/columns"], mesh, [*before, Shard(1)])
    tensors["optim/0.weight/step"] = distribute_tensor(whole["optim/0.weight/step"], mesh, [*before, Replicate()])
    tensors.update({name: whole[name].clone() for name in ("model/number", "model/empty")})
    assert sum(isinstance(tensor, DTensor) for tensor in tensors.values()) == 7
    return tensors


def save_all(rank: int, size: int, folder: Path) -> Any:
    """Steps 1 (sharded) and 2 (full); four ranks save from a 2-D mesh."""
    for step, layout in ((1, "sharded"), (2, "full")):
        tensors = sharded(whole_tensors(step), (2, 2) if size == 4 else (size,))
        store.save_checkpoint(
            step_folder(folder, step), tensors, {"step": step}, {"global_step": step}, layout, rank_state={"rank": rank}
        )
    return len(checkpoints(folder))


def load_all(rank: int, size: int, folder: Path) -> Any:
    """How many tensors of each step come back bit-equal, on a 1-D mesh and, with four ranks, on a 2-D one."""
    equal = []
    for mesh_shape in [(size,), *([(2, 2)] if size == 4 else [])]:
        for step in (1, 2):
            into = sharded(whole_tensors(99), mesh_shape)
            store.load_tensors(step_folder(folder, step), into)
            loaded = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in into.items()}
            whole = whole_tensors(step)
            equal.append(sum(loaded[n].dtype == whole[n].dtype and torch.equal(loaded[n], whole[n]) for n in whole))
            assert store.load_rank_state(step_folder(folder, step), 1) == {"rank": 1}
    return equal


def fail_everywhere(rank: int, size: int, folder: Path) -> Any:
    """The error of each rank when rank 1 fails: at its shard, its own state, what it holds; and rank 0 at its file."""
    errors = []
    write = disk.HashedFile.write
    for bad_rank, file, layout in [
        (1, "rank-00001.safetensors", "sharded"),
        (0, "state.json", "full"),
        (0, "tensors.safetensors", "full"),
        (0, "manifest.json", "sharded"),
    ]:

        def failing(self: disk.HashedFile, data: Any, bad_rank: int = bad_rank, file: str = file) -> int:
            if rank == bad_rank and self.path.name == file:
                raise CheckpointError(f"{self.path}: No space left on device")
            return write(self, data)

        disk.HashedFile.write = failing  # type: ignore[method-assign]
        errors.append(_error_of_save(rank, size, folder, layout))
    disk.HashedFile.write = write  # type: ignore[method-assign]
    errors.append(_error_of_save(rank, size, folder, "sharded", state=object() if rank == 1 else 0))
    errors.append(_error_of_save(rank, size, folder, "sharded", on_first={"model/number": torch.zeros(2)}))
    return errors


def _error_of_save(
    rank: int,
    size: int,
    folder: Path,
    layout: Any,
    state: Any = 0,
    on_first: dict[str, torch.Tensor] | None = None,
) -> str:
    tensors = sharded(whole_tensors(3), (size,))
    tensors.update((on_first or {}) if rank == 0 else {})
    own = {"thing": state}
    try:
        store.save_checkpoint(step_folder(folder, 3), tensors, {}, {"global_step": 3}, layout, rank_state=own)
    except CheckpointError as error:
        return str(error)
    return "no error"


def no_memory_to_gather(rank: int, size: int, folder: Path) -> Any:
    """The error of each rank where rank 1 has not the memory for one whole tensor."""
    tensors = {"w": DTensor.from_local(torch.empty(1 << 25), init_device_mesh("cpu", (size,)), [Shard(0)])}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (used + 3 * (1 << 26), resource.RLIM_INFINITY))
    started = time.monotonic()
    try:
        store.save_checkpoint(step_folder(folder, 4), tensors, {}, {"global_step": 4}, "full")
    except CheckpointError as error:
        return [str(error), time.monotonic() - started]
    return ["no error", 0.0]


SCENARIOS = {f.__name__: f for f in (save_all, load_all, fail_everywhere, no_memory_to_gather)}


def scenario(name: str, folder: str) -> Any:
    """One of the functions above, in a process group; the group is left to the end of the process."""
    dist.init_process_group("gloo")
    return SCENARIOS[name](dist.get_rank(), dist.get_world_size(), Path(folder))
