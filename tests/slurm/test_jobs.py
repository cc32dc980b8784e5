"""Jobs on a real SLURM: two nodes, a node that goes, failures, the end of a job."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml

from tests.slurm.conftest import ROOT, Cluster

pytestmark = pytest.mark.timeout(600)


def test_two_nodes_with_two_processes_each_finish_and_export(cluster: Cluster):
    recipe = cluster.recipe("wide", trainer={"devices": 2, "max_steps": 4})
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), "--wait")
    assert done.returncode == 0, done.stderr + cluster.logs()
    assert "step 4/4" in done.stderr  # rank 0 was followed
    number = done.stdout.strip()
    audit = json.loads((cluster.folder / "wide" / "audit.json").read_text())
    assert audit["shard_degree"] == 4
    ranks = sorted(path.name for path in (cluster.folder / "wide" / "slurm").glob("*.rank-*.log"))
    assert ranks == [f"{number}.rank-{rank}.log" for rank in range(4)]
    nodes = cluster.states(number)[0]["NodeList"]
    assert nodes == "node[1-2]"
    checkpoint = cluster.folder / "wide" / "checkpoints" / "step-00000004"
    exported = cluster.run("lit-fsdp", "export", "--ckpt", str(checkpoint), "--out", str(cluster.folder / "model"))
    assert exported.returncode == 0, exported.stderr
    assert (cluster.folder / "model" / "config.json").is_file()


def readme_commands(chapter: str) -> list[list[str]]:
    """The words of each line in the first block of commands of a chapter."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"\n## {chapter}\n")[2]
    block = re.search(r"\n```\n(.*?)\n```\n", text, re.DOTALL)
    assert block is not None
    return [shlex.split(line, comments=True) for line in block[1].splitlines()]


def test_the_chapter_on_the_first_run_of_several_nodes_can_be_followed(cluster: Cluster):
    """Word by word, but for the name of the partition."""
    values = yaml.safe_load(cluster.recipe("R").read_text())
    del values["trainer"]["default_root_dir"], values["trainer"]["num_nodes"]
    (cluster.folder / "R.yaml").write_text(yaml.safe_dump(values))
    commands = readme_commands("Your first multi-node run")
    assert [words[:3] for words in commands] == [
        ["lit-fsdp", "slurm", verb] for verb in ("render", "submit", "status", "cancel")
    ]
    render, submit, status, cancel = ([{"gpu": "test"}.get(word, word) for word in words] for words in commands)
    done = cluster.run(*render)
    assert (done.returncode, "#SBATCH --nodes=2\n" in done.stdout) == (0, True), done.stderr
    assert not (cluster.folder / "runs" / "R").exists()
    done = cluster.run(*submit)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    done = cluster.run(*status)
    assert (done.returncode, done.stdout.startswith(f"job {number}  ")) == (0, True), done.stderr
    done = cluster.run(*cancel)
    assert (done.returncode, f"cancelled job {number}" in done.stderr) == (0, True), done.stderr
    (state,) = cluster.wait_until(number, "CANCELLED")
    assert (state["Partition"], state["NumNodes"].rpartition("-")[2], state["Restarts"]) == ("test", "2", "0")
    done = cluster.run(*status)
    assert done.stdout.startswith(f"job {number}  CANCELLED")


def test_a_job_that_fails_is_not_tried_again(cluster: Cluster):
    (cluster.folder / "broken.jsonl").write_text('{"messages": \n')
    recipe = cluster.recipe("failing", trainer={"num_nodes": 1}, data={"train": "broken.jsonl"})
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), "--wait")
    assert done.returncode not in (0, 75), done.stderr
    state = cluster.states(done.stdout.strip())[0]
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "0")
    assert "broken.jsonl" in done.stderr


def test_a_cancelled_job_stays_cancelled_and_a_second_one_is_refused_until_then(cluster: Cluster):
    recipe = cluster.recipe("cancelled", slurm={"command": ["bash", "-c", "touch started; exec sleep 600"]})
    number = cluster.submit(recipe)
    cluster.wait_for(cluster.folder / "started")
    again = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe))
    assert again.returncode == 2
    assert number in again.stderr
    assert cluster.run("lit-fsdp", "slurm", "cancel", str(cluster.folder / "cancelled")).returncode == 0
    state = cluster.wait_until(number, "CANCELLED")[0]
    assert state["Restarts"] == "0"


def test_the_nodes_are_compared_before(cluster: Cluster):
    recipe = cluster.recipe("probed", trainer={"max_steps": 1})
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), "--probe")
    assert done.returncode == 0, done.stderr
    assert "2 nodes agree: Python" in done.stderr
    cluster.run("lit-fsdp", "slurm", "cancel", done.stdout.strip())
