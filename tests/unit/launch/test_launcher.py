"""A wrong mixture of launcher and recipe is refused; ranks are started before anything heavy is imported."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.launcher import adopt_step, check_launch, drop_used_port


def torchrun(local: int, world: int, **more: str) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(world), **more}


def batch(tasks: int | None = None, **more: str) -> dict[str, str]:
    """The shell of a batch script, which is no step."""
    given = {} if tasks is None else {"SLURM_NTASKS": str(tasks), "SLURM_NPROCS": str(tasks)}
    rank = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    return {"SLURM_JOB_ID": "71", "SLURM_JOB_NAME": "x", "SLURM_NNODES": "1", **rank, **given, **more}


def step(tasks_per_node: str, **more: str) -> dict[str, str]:
    """Inside of an allocation of two nodes with two tasks each that was asked for by salloc."""
    counts = [int(n) for n in tasks_per_node.replace("(x2)", f",{tasks_per_node[0]}").split(",")]
    tasks, nodes = str(sum(counts)), str(len(counts))
    found = batch(sum(counts), SLURM_STEP_ID="3", SLURM_STEP_NUM_TASKS=tasks, SLURM_STEP_NUM_NODES=nodes)
    found |= {"SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "SLURM_STEP_NODELIST": {"1": "b[2,4]", "2": "a[1-2]"}[nodes]}
    return {**found, "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "interactive", "SLURM_NNODES": nodes, **more}


FOUR = {"devices": 2, "num_nodes": 2}
BY_HAND = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "1"}


def test_right():
    for trainer, environment in (
        ({"devices": 8}, {}),
        ({"devices": 4}, torchrun(4, 4)),
        ({"devices": "4", "num_nodes": 2}, torchrun(4, 8)),
        ({"devices": 2}, {**step("2(x2)"), **torchrun(2, 2), "SLURM_STEP_NUM_TASKS": "1"}),
        (FOUR, {**step("2(x2)"), **torchrun(2, 4), "SLURM_STEP_NUM_TASKS": "2"}),
        (FOUR, step("2(x2)")),
        ({"devices": 1, "num_nodes": 2}, step("1(x2)", SLURM_DISTRIBUTION="cyclic")),
        *(({"devices": 2}, environment) for environment in (batch(), batch(1), step("1"), step("2"))),
        (FOUR, BY_HAND),
        ({"devices": 2}, {"LSB_JOBID": "12", "PMI_SIZE": "1"}),  # a shell that starts the ranks itself
        (FOUR, {"LSB_JOBID": "12", "JSM_NAMESPACE_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4"}),
        ({"devices": 1}, {"OMPI_COMM_WORLD_SIZE": "2"}),  # two runs, as in a search over learning rates
        (FOUR, {"OMPI_COMM_WORLD_SIZE": "2", **BY_HAND}),
        (FOUR, {"OMPI_COMM_WORLD_SIZE": "4", "LOCAL_RANK": "1"}),
        (FOUR, {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **BY_HAND}),
        (FOUR, {"RANK": "1", "WORLD_SIZE": "2", **BY_HAND}),  # of nodes
        ({"devices": 2}, {"RANK": "0", "WORLD_SIZE": "1"}),
        ({"devices": 1, "num_nodes": 2, "plugins": "KubeflowEnvironment"}, {"RANK": "0", "WORLD_SIZE": "2"}),
    ):
        adopt_step(environment)
        assert check_launch(trainer, environment) is None  # nothing is raised


def test_wrong():
    for trainer, environment, field, fix in (
        ({"devices": 8}, torchrun(4, 4), "trainer.devices", "devices: 4, or start torchrun --nnodes 1 --nproc-per-"),
        ({"devices": 8}, torchrun(4, 4), "trainer.devices", "exec torchrun, and #SBATCH --signal=B:TERM@120"),
        ({"devices": 4}, torchrun(4, 8), "trainer.num_nodes", "num_nodes: 2"),
        ({"devices": 8}, torchrun(1, 2), "trainer.devices", "set trainer.devices: 1 and trainer.num_nodes: 2, or"),
        ({"devices": 4, "num_nodes": 3}, torchrun(4, 8), "trainer.num_nodes", "--nnodes 3"),
        ({"devices": 2}, torchrun(2, 2, SLURM_STEP_NUM_TASKS="2"), "command line", "without torchrun"),
        ({"devices": 2}, step("2(x2)"), "trainer.num_nodes", "num_nodes: 2"),
        (FOUR, step("1(x2)"), "trainer.devices", "--ntasks-per-node=2"),
        ({"devices": 4}, batch(4), "command line", "srun lit-fsdp fit ..., and #SBATCH --signal=USR1@120"),
        (FOUR, {}, "trainer.num_nodes", "torchrun --nnodes 2"),
        (FOUR, {"LSB_JOBID": "12"}, "trainer.num_nodes", "torchrun --nnodes 2"),
        (FOUR, {"PMI_SIZE": "1"}, "trainer.num_nodes", "torchrun --nnodes 2"),
        ({"devices": 2}, {"JSM_NAMESPACE_SIZE": "1"}, "trainer.devices", "start 2 processes with jsrun"),
        ({"num_nodes": 2}, {"JSM_NAMESPACE_SIZE": "3"}, "trainer.devices", "start 2 processes with jsrun"),
        ({"devices": 2}, {"OMPI_COMM_WORLD_SIZE": "2"}, "command line", "--nproc-per-node 2 on each node, or pip"),
        (FOUR, {"PMI_SIZE": "4", "MASTER_ADDR": "a"}, "command line", "torchrun --nnodes 2 --nproc-per-node 2"),
        ({"devices": 2}, {"RANK": "0", "WORLD_SIZE": "2"}, "RANK", "--nnodes 2 --nproc-per-node 2 in"),
        ({"num_nodes": 2}, {"MASTER_ADDR": "a", "NODE_RANK": "0"}, "trainer.num_nodes", "on each node"),
        ({"num_nodes": 2}, step("2,1"), "SLURM_STEP_TASKS_PER_NODE", "--ntasks-per-node=1"),
        (FOUR, step("2(x2)", SLURM_DISTRIBUTION="cyclic:block"), "SLURM_DISTRIBUTION", "--distribution=block"),
    ):
        adopt_step(environment)
        with pytest.raises(ConfigError) as caught:
            check_launch(trainer, environment)
        assert caught.value.field == field
        assert fix in caught.value.fix


def test_what_an_earlier_run_of_the_parent_left_is_forgotten():
    """Its port is in use; a port that is free was chosen by the user."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other.getsockname()[1])}
        left = {"LOCAL_RANK": "0", "NODE_RANK": "0", **taken}
        ranks = ({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"LOCAL_RANK": "1"}, {"NODE_RANK": "1"}, {"SLURM_NTASKS": "4"})
        by_hand = [taken | {"NODE_RANK": "0"}, taken | {"LOCAL_RANK": "0"}, left | {"MASTER_PORT": "99999"}]
        by_hand += [left | rank for rank in ranks]
        for environment, is_forgotten in ((left, True), (taken, True), *((one, False) for one in by_hand)):
            kept = dict(environment)
            drop_used_port(kept)
            assert kept == ({} if is_forgotten else environment)
    kept = dict(left)
    drop_used_port(kept)
    assert kept == left


def test_mpirun_with_mpi4py_starts_one_process_per_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "mpi4py")
    check_launch(FOUR, {"PMI_SIZE": "4"})
    with pytest.raises(ConfigError, match=r"got 2 on 2 node\(s\), but mpirun started 2 process"):
        check_launch(FOUR, {"PMI_SIZE": "2"})


def test_a_step_says_what_is_true_of_it():
    """Of two tasks on the second of two nodes, in an allocation that was asked for with two on each."""
    environment = step("2")
    adopt_step(environment)
    assert environment["SLURM_JOB_NAME"] not in ("bash", "interactive")
    assert environment["MASTER_ADDR"] == "b2"  # and not the first of the allocation
    assert 20000 <= int(environment["MASTER_PORT"]) < 30000
    other = step("1(x2)", SLURM_STEP_ID="4", MASTER_ADDR="10.0.0.1")
    adopt_step(other)
    assert other["MASTER_PORT"] != environment["MASTER_PORT"]  # two steps of one job may run at the same time
    assert (other["MASTER_ADDR"], other["SLURM_NTASKS_PER_NODE"]) == ("10.0.0.1", "1")  # what is given stays


def test_one_task_is_a_place_to_start_ranks_from_and_none_of_several():
    for environment in (batch(), batch(1), step("1")):
        adopt_step(environment)
        assert not {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS"} & environment.keys()
    under_torchrun = {**step("2(x2)"), **torchrun(2, 4)}
    before = dict(under_torchrun)
    adopt_step(under_torchrun)
    assert under_torchrun == before


_PROGRAM = """
import os, signal, sys, time
from lit_fsdp.exit_codes import exit_code_of
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import wait_for_first
from lit_fsdp.launch import ranks

ranks._POLL_SECONDS, ranks._GRACE_SECONDS = 0.05, 0.1
rank = os.environ.get("LOCAL_RANK", "0")

def act():
    case = sys.argv[1]
    if rank == "0":
        ranks.LAUNCHED_RANKS.start({"devices": 3})
    elif case == "killed" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "all fail" or (case == "one fails" and rank == "2"):
        raise ConfigError("model.name", rank, "another")
    if rank == "0" and case != "all fail":
        print("prepared", flush=True)
        ranks.LAUNCHED_RANKS.release()
    wait_for_first()
    print("met", rank, os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], flush=True)
    if rank == "0":
        time.sleep(60 if case in ("killed", "one fails") else 0)
        ranks.LAUNCHED_RANKS.end(grace_seconds=20)
    return 0

sys.exit(exit_code_of(act))
"""


def test_ranks_wait_until_the_first_one_is_ready_and_what_one_meets_ends_the_run(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    for case, ended, first, last in (
        ("all well", 0, "", ""),
        ("all fail", 2, "error: model.name: got 0", ""),
        ("one fails", 76, "[rank 2] error: model.name: got 2", "error: rank 2 ended with exit code 2"),
        ("killed", 76, "", "error: rank 1 was ended by SIGKILL: the host may have run out of memory (see dmesg)"),
    ):
        words = [sys.executable, str(program), case]
        done = subprocess.run(words, capture_output=True, text=True, timeout=50, env=environment)
        said, errors = done.stdout.splitlines(), done.stderr.splitlines() or [""]
        assert (done.returncode, first in errors[0], last in errors[-1]) == (ended, True, True), done
        if case == "all well":
            assert (said[0], sorted(said[1:])) == ("prepared", [f"met {rank} 3 127.0.0.1" for rank in range(3)])
        assert case != "all fail" or not any("[rank" in line for line in errors)  # what all meet is said once
