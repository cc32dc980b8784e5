"""What the cluster cannot give is said by lint, where sbatch would let the job wait for ever."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_lint_cluster import parse_partitions
from tests.unit.launch.test_lint import FINE, _a_shared_place_with_room, found  # noqa: F401 (a fixture)

SINFO = """\
gpu*|1-00:00:00|1-infinite|6|64|gpu:a100:8(S:0-1)
gpu*|1-00:00:00|1-infinite|2|128|gpu:h100:4,gpu:a100:4,nvme:1
small|1:00:00|1-4|10|32|gpu:2
cpu|infinite|1-infinite|100|96|(null)
"""
KNOWN = dataclasses.replace(FINE, partitions=parse_partitions(SINFO))


def of(slurm: dict[str, Any] | None = None, nodes: int = 2, devices: int = 8) -> dict[str, ConfigError]:
    data = {"train": "generated:640", "global_batch_size": 960}
    return found(slurm, KNOWN, trainer={"num_nodes": nodes, "devices": devices}, data=data)


def test_sinfo_is_read():
    first, second, small, cpu = KNOWN.partitions or ()
    assert (first.name, first.is_default, first.time_limit, first.max_nodes) == ("gpu", True, 86400, None)
    assert (first.nodes, first.cpus, first.gpus, second.gpus) == (6, 64, 8, 8)
    assert (small.is_default, small.time_limit, small.max_nodes, small.gpus) == (False, 3600, 4, 2)
    assert (cpu.time_limit, cpu.gpus) == (None, 0)
    assert parse_partitions("a greeting of the site\n\n") == ()
    (odd,) = parse_partitions("odd|0:00|1|2|8|(null)\n")
    assert odd.time_limit is None  # no time that a job can have


@pytest.mark.parametrize(
    ("slurm", "nodes", "devices", "field", "says"),
    [
        ({"partition": "gpus"}, 2, 8, "slurm.partition", "set slurm.partition: gpu"),
        ({"time": "2-0"}, 2, 8, "slurm.time", "at most 1-00:00:00"),
        ({"time": "UNLIMITED"}, 2, 8, "slurm.time", "at most 1-00:00:00"),
        ({"partition": "small", "time": "61"}, 2, 2, "slurm.time", "at most 01:00:00"),
        ({}, 10, 8, "slurm.nodes", "at most 8"),
        ({"partition": "small"}, 5, 2, "slurm.nodes", "at most 4"),
        ({"cpus_per_task": 16}, 3, 8, "slurm.nodes", "at most 2"),  # two of its nodes have 128 cores
        ({"partition": "small"}, 2, 8, "slurm.gpus_per_node", "at most 2"),
        ({"partition": "cpu"}, 2, 8, "slurm.gpus_per_node", "another slurm.partition"),
        ({"cpus_per_task": 20}, 2, 8, "slurm.cpus_per_task", "set slurm.cpus_per_task: 16"),
        ({"partition": "small,cpu"}, 2, 8, "slurm.gpus_per_node", "at most 2"),
    ],
)
def test_what_the_partition_cannot_give(slurm: dict[str, Any], nodes: int, devices: int, field: str, says: str):
    errors = of(slurm, nodes, devices)
    assert list(errors) == [field]
    assert says in str(errors[field])


@pytest.mark.parametrize(
    ("slurm", "nodes", "devices"),
    [
        ({"time": "1-0", "partition": "gpu"}, 8, 8),
        ({"cpus_per_task": 16}, 2, 8),
        ({"partition": "small", "time": "60"}, 4, 2),
        ({"partition": "cpu,gpu"}, 2, 8),  # one that can is enough
    ],
)
def test_what_it_can(slurm: dict[str, Any], nodes: int, devices: int):
    assert of(slurm, nodes, devices) == {}


def test_the_partition_of_this_shell_counts_where_the_recipe_names_none():
    facts = dataclasses.replace(KNOWN, environment={**FINE.environment, "SBATCH_PARTITION": "small"})
    assert list(found({}, facts)) == ["slurm.gpus_per_node"]
    assert found({"partition": "gpu"}, dataclasses.replace(KNOWN)) == {}
