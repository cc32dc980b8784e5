"""A wrong mixture of launcher and recipe is refused, a right one is let through."""

from __future__ import annotations

from typing import Any

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.launcher import adopt_step, check_launch


def torchrun(local: int, world: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(world)}


def srun(tasks: int, nodes: int, **more: str) -> dict[str, str]:
    found = {"SLURM_NTASKS": tasks, "SLURM_NNODES": nodes, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_NODES": nodes}
    return {**{key: str(value) for key, value in found.items()}, "SLURM_NTASKS_PER_NODE": str(tasks // nodes), **more}


def step(tasks_per_node: str, **more: str) -> dict[str, str]:
    """Inside of an allocation of two nodes with two tasks each that was asked for by salloc."""
    counts = [int(n) for n in tasks_per_node.replace("(x2)", f",{tasks_per_node[0]}").split(",")]
    nodes = {1: "node2", 2: "node[1-2]"}[len(counts)]
    found = {
        **{"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": str(sum(counts))},
        **{"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_NUM_NODES": str(len(counts))},
        **{"SLURM_STEP_NUM_TASKS": str(sum(counts)), "SLURM_STEP_TASKS_PER_NODE": tasks_per_node},
        **{"SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "interactive", "SLURM_NNODES": str(len(counts))},
    }
    return {**found, **more}


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
        ({"devices": 2, "num_nodes": 2}, {**step("2(x2)"), **torchrun(2, 4), "SLURM_STEP_NUM_TASKS": "2"}),
        ({"devices": 2, "num_nodes": 2}, {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "1"}),
        ({"devices": 1, "num_nodes": 2}, step("1(x2)", SLURM_JOB_NAME="x", SLURM_DISTRIBUTION="cyclic")),
        ({"devices": 2, "num_nodes": 2}, {"OMPI_COMM_WORLD_SIZE": "4"}),  # Lightning knows that launcher
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
        ({"devices": 2}, {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "x"}, "trainer.devices", "--ntasks-per-node=2"),
        ({"devices": 2, "num_nodes": 2}, {}, "trainer.num_nodes", "torchrun --nnodes 2"),
        ({"num_nodes": 2}, {"MASTER_ADDR": "a", "NODE_RANK": "0"}, "trainer.num_nodes", "on each node"),
        ({"num_nodes": 2}, {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "2"}, "NODE_RANK", "from 0 on"),
        (
            {"devices": 2},
            {**srun(2, 1), **torchrun(2, 2), "SLURM_STEP_NUM_TASKS": "2"},
            "command line",
            "without torchrun",
        ),
        ({"devices": 2, "num_nodes": 2}, {**torchrun(2, 3), "GROUP_WORLD_SIZE": "2"}, "command line", "nproc-per-node"),
        ({"num_nodes": 2}, step("2,1", SLURM_JOB_NAME="x"), "SLURM_STEP_TASKS_PER_NODE", "--ntasks-per-node=1"),
        (
            {"devices": 2, "num_nodes": 2},
            step("2(x2)", SLURM_JOB_NAME="x", SLURM_DISTRIBUTION="cyclic:block"),
            "SLURM_DISTRIBUTION",
            "--distribution=block",
        ),
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


def test_a_step_of_an_interactive_allocation_is_no_shell():
    """Of two tasks on the second of two nodes, in an allocation that was asked for with two on each."""
    environment = step("2")
    adopt_step(environment)
    assert environment["SLURM_JOB_NAME"] not in ("bash", "interactive")
    assert environment["MASTER_ADDR"] == "node2"  # and not the first of the allocation
    assert 20000 <= int(environment["MASTER_PORT"]) < 30000
    check_launch({"devices": 2}, environment)
    other = step("2", SLURM_STEP_ID="4")
    adopt_step(other)
    assert other["MASTER_PORT"] != environment["MASTER_PORT"]  # two steps of one job may run at the same time


def test_tasks_per_node_are_those_of_the_step():
    environment = step("1(x2)", MASTER_ADDR="10.0.0.1", MASTER_PORT="1234")
    adopt_step(environment)
    assert environment["SLURM_NTASKS_PER_NODE"] == "1"
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "1234")  # given ones stay
    check_launch({"devices": 1, "num_nodes": 2}, environment)
    del environment["SLURM_NTASKS_PER_NODE"]  # srun --ntasks=2 --nodes=2
    adopt_step(environment)
    check_launch({"devices": 1, "num_nodes": 2}, environment)


def test_a_shell_that_is_a_step_is_not_one_of_several_ranks():
    environment = step("1")
    adopt_step(environment)
    assert "SLURM_PROCID" not in environment
    check_launch({"devices": 2}, environment)


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "3"}, {**step("2(x2)"), **torchrun(2, 4)}])
def test_what_is_no_step_is_left_alone(environment: dict[str, str]):
    before = dict(environment)
    adopt_step(environment)
    assert environment == before
