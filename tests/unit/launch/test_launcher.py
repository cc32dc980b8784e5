"""A wrong mixture of launcher and recipe is refused, a right one is let through."""

from __future__ import annotations

from typing import Any

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.launcher import check_launch


def torchrun(local: int, world: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(world)}


def srun(tasks: int, nodes: int, **more: str) -> dict[str, str]:
    found = {"SLURM_NTASKS": tasks, "SLURM_NNODES": nodes, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_NODES": nodes}
    return {**{key: str(value) for key, value in found.items()}, "SLURM_NTASKS_PER_NODE": str(tasks // nodes), **more}


@pytest.mark.parametrize(
    ("trainer", "environment"),
    [
        ({"devices": 8}, {}),
        ({"devices": 4}, torchrun(4, 4)),
        ({"devices": [0, 1]}, torchrun(2, 2)),
        ({"devices": "auto"}, torchrun(4, 4)),
        ({"devices": "4", "num_nodes": 2}, torchrun(4, 8)),
        ({"devices": 2, "num_nodes": 2}, srun(4, 2)),
        ({"devices": 1}, {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "x"}),  # one process needs no srun
        ({"devices": 2}, {**srun(8, 1), "SLURM_JOB_NAME": "bash"}),  # a shell inside of an allocation
        ({"devices": 2}, {**srun(8, 4), **torchrun(2, 2)}),  # torchrun inside of a job counts for more
    ],
)
def test_right(trainer: dict[str, Any], environment: dict[str, str]):
    assert check_launch(trainer, environment) is None  # nothing is raised


@pytest.mark.parametrize(
    ("trainer", "environment", "field", "fix"),
    [
        ({"devices": 8}, torchrun(4, 4), "trainer.devices", "devices: 4, or start torchrun --nproc-per-node 8"),
        ({"devices": 4}, torchrun(4, 8), "trainer.num_nodes", "num_nodes: 2"),
        ({"devices": 4, "num_nodes": 3}, torchrun(4, 8), "trainer.num_nodes", "--nnodes 3"),
        ({"devices": 2}, srun(4, 2), "trainer.num_nodes", "num_nodes: 2"),
        ({"devices": 2, "num_nodes": 2}, srun(2, 2), "trainer.devices", "--ntasks-per-node=2"),
        ({"devices": 2}, srun(3, 1), "trainer.devices", "devices: 3"),
        ({"devices": 4}, {"SLURM_NTASKS": "4", "SLURM_NNODES": "1"}, "command line", "srun lit-fsdp fit"),
    ],
)
def test_wrong(trainer: dict[str, Any], environment: dict[str, str], field: str, fix: str):
    with pytest.raises(ConfigError) as caught:
        check_launch(trainer, environment)
    assert caught.value.field == field
    assert fix in caught.value.fix


def test_ntasks_without_ntasks_per_node():
    environment = srun(4, 2)
    del environment["SLURM_NTASKS_PER_NODE"]
    with pytest.raises(ConfigError, match="--ntasks-per-node=2"):
        check_launch({"devices": 2, "num_nodes": 2}, environment)
