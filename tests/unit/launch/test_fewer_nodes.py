"""A job that may start with fewer nodes: how many it can use, what lint says, and what its script does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_facts import Facts
from lit_fsdp.launch.slurm_job import Job
from lit_fsdp.launch.slurm_nodes import asked_nodes, fewer_nodes_fit, with_node_counts
from lit_fsdp.launch.slurm_script import render
from tests.unit.launch.jobs import planned

NO_FACTS = Facts(checkpoint_bytes=None, save_seconds=None, environment={})


def job_of(nodes: int, least: int | None, strategy: dict[str, Any] | None = None, batch: int = 64) -> tuple[Any, Any]:
    trainer: dict[str, Any] = {"num_nodes": nodes}
    if strategy:
        trainer["strategy"] = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": strategy}
    data = {"train": "rows.jsonl", "global_batch_size": batch}
    job, run = planned({"command": ["/env/python"], "min_nodes": least}, trainer=trainer, data=data)
    return with_node_counts(job, run), run


def said(nodes: int, least: int, strategy: dict[str, Any] | None = None, batch: int = 64) -> list[Any]:
    return list(fewer_nodes_fit(*job_of(nodes, least, strategy, batch), NO_FACTS))


def test_all_numbers_that_fit_the_global_batch():
    job, _ = job_of(8, 1)
    assert job.node_counts == (8, 4, 2, 1)  # of 8 ranks each; 64 samples
    assert job.node_range == "1-8"
    (note,) = said(8, 1)
    assert "2 of 3, 4 of 5, 4 of 6, 4 of 7 nodes" in note


def test_without_the_key_nothing_changes():
    job, _ = job_of(8, None)
    assert (job.node_counts, job.node_range) == ((), "8")
    text = render(job)
    assert "#SBATCH --nodes=8\n" in text
    assert "num_nodes" not in text


@pytest.mark.parametrize(
    ("nodes", "least", "strategy", "batch", "fix"),
    [
        (4, 3, None, 64, "min_nodes: 4"),  # 24 ranks
        (2, 1, {"sharding": "hybrid_shard"}, 64, "min_nodes: 2"),  # one node is one copy
        (4, 1, {"sharding": "hybrid_shard", "replicate_degree": 2, "shard_degree": 16}, 64, "min_nodes: 4"),
    ],
)
def test_a_least_number_that_does_not_fit(
    nodes: int, least: int, strategy: dict[str, Any] | None, batch: int, fix: str
):
    # with degrees for 32 ranks in the recipe no other number of ranks fits
    errors = [found for found in said(nodes, least, strategy, batch) if isinstance(found, ConfigError)]
    assert [error.field for error in errors] == ["slurm.min_nodes"]
    assert fix in errors[0].fix


def test_hybrid_sharding_keeps_whole_nodes():
    job, _ = job_of(4, 2, {"sharding": "hybrid_shard", "shard_degree": 16})
    assert job.node_counts == (4, 2)
    assert said(4, 2, {"sharding": "hybrid_shard", "shard_degree": 16})  # of 3 nodes 2 are used


@pytest.mark.parametrize(("cores", "each"), [(None, 8), (6, 48)])
def test_a_range_of_nodes_is_told_cores_and_no_tasks(cores: int | None, each: int):
    """Told tasks, SLURM would keep those of the first start, and wait for a node that is lost."""
    slurm = {"command": ["/env/python"], "min_nodes": 1, "cpus_per_task": cores}
    text = render(with_node_counts(*planned(slurm, trainer={"num_nodes": 2})))
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=1-2" in options
    assert f"#SBATCH --mincpus={each}" in options
    assert not any("ntasks" in line for line in options)
    assert "--ntasks-per-node=8" in text  # srun is told


def test_more_than_the_job_has():
    with pytest.raises(ConfigError, match=r"slurm\.min_nodes: got 3 for a job of 2 node"):
        job_of(2, 3)


def run_script(job: Job, folder: Path, given: int, code: int = 0, checkpoint: bool = False) -> tuple[str, list[str]]:
    """Output of the script with so many nodes, and the words of srun; the step may leave a new checkpoint."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "srun").write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" > {folder}/srun\n{"$SAVES" if checkpoint else ""}\nexit {code}\n'
    )
    hosts = "\\n".join(f"n{i + 1}" for i in range(given))
    shows = f'[ "$1" = requeue ] && touch {folder}/requeued\n[ "$1" = show ] && printf "{hosts}\\n"; [ "$1" = show ]\n'
    (programs / "scontrol").write_text(f"#!/bin/bash\n{shows}")
    for program in programs.iterdir():
        program.chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "71", "SLURM_JOB_NODELIST": f"n[1-{given}]"}
    env |= {"SLURM_JOB_NUM_NODES": str(given), "SAVES": f"mkdir -p {folder}/run/checkpoints/step-00000020"}
    done = subprocess.run(["bash", "-c", render(job)], env=env, capture_output=True, text=True, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stdout, (folder / "srun").read_text().splitlines()


@pytest.mark.parametrize(("given", "used"), [(8, 8), (7, 4), (3, 2), (1, 1)])
def test_the_script_uses_as_many_as_fit(tmp_path: Path, given: int, used: int):
    job, _ = job_of(8, 1)
    _, words = run_script(job, tmp_path, given)
    assert f"--nodes={used}" in words
    assert f"--ntasks={used * 8}" in words
    assert f"--nodelist={','.join(f'n{i + 1}' for i in range(used))}" in words
    assert words[words.index("--trainer.num_nodes") + 1] == str(used)


@pytest.mark.parametrize(
    ("code", "is_newer", "again"),
    [
        (137, True, True),  # killed
        (134, True, True),  # aborted, as NCCL's watchdog does it
        (139, True, True),
        (137, False, False),  # at once
        (1, True, False),  # an error of the run
        (2, True, False),
        (130, True, False),  # Ctrl-C
        (75, False, True),
    ],
)
def test_a_rank_that_was_killed_is_worth_a_try_if_the_job_came_further(
    tmp_path: Path, code: int, is_newer: bool, again: bool
):
    job, _ = planned({"command": ["/env/python"]}, trainer={"default_root_dir": str(tmp_path / "run")})
    old = tmp_path / "run" / "checkpoints" / "step-00000010"
    old.mkdir(parents=True)
    (tmp_path / "run" / "slurm").mkdir()
    out, _ = run_script(job, tmp_path, 2, code, checkpoint=is_newer)
    assert (tmp_path / "requeued").exists() == again, out
    assert ("no checkpoint was made since this start" in out) == (code == 137 and not is_newer)


def test_what_the_ranks_said_of_it_is_in_the_jobs_log(tmp_path: Path):
    job, _ = planned({"command": ["/env/python"]}, trainer={"default_root_dir": str(tmp_path / "run")})
    logs = tmp_path / "run" / "slurm"
    logs.mkdir(parents=True)
    (logs / "71.rank-0.log").write_text("step 3\n[rank0]: rank 0 (n1) lost contact: no word from rank 3 (n2): killed\n")
    (logs / "71.rank-3.log").write_text("step 3\n")
    out, _ = run_script(job, tmp_path, 2, 137)
    assert "a rank was killed (signal 9)" in out
    assert "rank 0 (n1) lost contact: no word from rank 3 (n2)" in out


def test_what_a_job_asked_for(tmp_path: Path):
    job, _ = job_of(8, 2)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "71.sbatch").write_text(render(job))
    assert asked_nodes(tmp_path, "71") == asked_nodes(tmp_path, "71_4") == "2-8"
    (tmp_path / "slurm" / "72.sbatch").write_text(render(job_of(8, None)[0]))
    assert asked_nodes(tmp_path, "72") is None
    assert asked_nodes(tmp_path, "73") is None
