"""Everything that would have failed an hour later is said before a job is submitted."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_fsdp.config.parser import check_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch import slurm_lint_places
from lit_fsdp.launch.slurm_facts import GIB, Facts, Partition
from lit_fsdp.launch.slurm_job import plan_job, put_job_size
from lit_fsdp.launch.slurm_lint import lint
from tests.unit.launch import jobs
from tests.unit.launch.jobs import planned, recipe

FINE = Facts(checkpoint_bytes=GIB, save_seconds=None, environment={"LIT_FSDP_CACHE": "/shared/cache"})
COMMAND = {"command": ["bash", "-c", "true"]}


@pytest.fixture(autouse=True)
def _a_shared_place_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MODEL", {"model_type": "llama"})  # wherever this checkout lies
    monkeypatch.setattr(slurm_lint_places, "file_system", lambda path: "nfs4")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * GIB))


def found(slurm: dict[str, Any] | None = None, facts: Facts = FINE, **more: Any) -> dict[str, ConfigError]:
    job, run = planned({**COMMAND, **(slurm or {})}, **more)
    errors, _ = lint(job, run, facts)
    return {error.field: error for error in errors}


def test_a_job_that_can_run_is_let_through():
    assert found({"time": "2:00:00", "extra": ["--exclusive", "--mail-type=END"], "setup": ["module load cuda"]}) == {}


@pytest.mark.parametrize(
    "option",
    [
        *(
            "--ntasks=16",
            "--ntasks",
            "-n 16",
            "-n16",
            "--gpus-per-task=1",
            "--gpus=16",
            "-G4",
            "--gres=gpu:8",
            "--array=0-3",
        ),
        *("--nodes=4", "-N4", "--signal=B:USR1@60", "--no-requeue", "--output=x", "--wrap=hostname", "--time=10"),
    ],
)
def test_options_that_are_ours_are_refused_with_the_key_to_use(option: str):
    errors = found({"extra": ["--exclusive", option]})
    assert list(errors) == ["slurm.extra[1]"]
    assert "slurm." in errors["slurm.extra[1]"].allowed or option.startswith(("--output", "--wrap"))


@pytest.mark.parametrize(
    "line",
    [
        "srun hostname",
        "cd x && srun -n 2 y",
        "torchrun --nproc 8 x",
        "mpirun x",
        "bash -i",
        "read answer",
        "salloc -N1",
    ],
)
def test_launchers_and_terminals_inside_the_job_are_refused(line: str):
    assert list(found({"setup": ["module load cuda", line]})) == ["slurm.setup[1]"]


def test_a_launcher_as_the_command_is_refused():
    assert "slurm.command" in found({"command": ["bash", "-c", "torchrun x"]})


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_names_that_lightning_takes_for_a_shell(name: str):
    assert list(found({"job_name": name})) == ["slurm.job_name"]


def test_inside_of_a_job():
    facts = dataclasses.replace(FINE, environment={**FINE.environment, "SLURM_JOB_ID": "12"})
    assert list(found(facts=facts)) == ["SLURM_JOB_ID"]


def strategy(**args: Any) -> dict[str, Any]:
    return {"strategy": {"init_args": args}}


@pytest.mark.parametrize(("shards", "is_fine"), [(8, True), (16, True), (4, False), (2, False)])
def test_hybrid_groups_are_whole_nodes(shards: int, is_fine: bool):
    errors = found(trainer=strategy(sharding="hybrid_shard", shard_degree=shards, replicate_degree=16 // shards))
    assert (errors == {}) == is_fine
    assert is_fine or "multiple of 8" in errors["trainer.strategy.init_args.shard_degree"].allowed


def test_a_lead_shorter_than_a_save_is_refused_and_the_fix_is_enough():
    facts = dataclasses.replace(FINE, checkpoint_bytes=200 * GIB)  # at 2 x 0.5 GiB/s: 200 s, and 30 s for the step
    errors = found({"signal_lead_seconds": 229}, facts)
    assert "230" in errors["slurm.signal_lead_seconds"].allowed
    lead = int(errors["slurm.signal_lead_seconds"].fix.rpartition(" ")[2])
    assert "slurm.signal_lead_seconds" not in found({"signal_lead_seconds": lead}, facts)
    assert "slurm.signal_lead_seconds" not in found({"signal_lead_seconds": 230}, facts)


def test_a_measured_save_counts_for_more_than_an_estimate():
    facts = dataclasses.replace(FINE, checkpoint_bytes=200 * GIB, save_seconds=10.0)
    assert "slurm.signal_lead_seconds" not in found({"signal_lead_seconds": 60}, facts)


@pytest.mark.parametrize(("time", "is_fine"), [("6:59", False), ("7:00", True), ("UNLIMITED", True), ("1-0", True)])
def test_a_time_limit_leaves_room_for_start_and_save(time: str, is_fine: bool):
    """300 s for the start and the lead of 120 s."""
    assert (list(found({"time": time})) == []) is is_fine


@pytest.mark.parametrize("place", ["/tmp/run", "/dev/shm/x", "/var/tmp/run"])
def test_a_run_folder_of_one_node_is_refused_for_several(place: str):
    assert list(found(trainer={"default_root_dir": place})) == ["trainer.default_root_dir"]
    assert found(trainer={"default_root_dir": place, "num_nodes": 1}) == {}


def test_a_cache_of_one_node_is_refused_for_several(monkeypatch: pytest.MonkeyPatch):
    facts = dataclasses.replace(FINE, environment={"LIT_FSDP_CACHE": "/tmp/cache"})
    assert list(found(facts=facts)) == ["data.cache_dir"]


def test_memory_as_a_file_system_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slurm_lint_places, "file_system", lambda path: "tmpfs")
    assert "trainer.default_root_dir" in found()


def test_the_file_system_of_a_path_that_does_not_exist_yet():
    assert slurm_lint_places.local_place(Path("/proc/nothing/there")) is None  # the fixture says nfs4


def test_too_little_disk_for_what_is_kept():
    facts = dataclasses.replace(FINE, checkpoint_bytes=30 * GIB)  # two last, one best, one being written
    errors = found({"signal_lead_seconds": 600}, facts)
    assert "120.0 GiB free" in errors["checkpoint"].allowed
    kept = found({"signal_lead_seconds": 600}, facts, checkpoint={"keep_last": 1, "keep_best": 0})
    assert "checkpoint" not in kept


def test_every_seed_needs_its_own_disk():
    facts = dataclasses.replace(FINE, checkpoint_bytes=10 * GIB)
    assert "120.0 GiB free" in found({"seeds": [1, 2, 3]}, facts)["checkpoint"].allowed


def test_what_could_not_be_checked_is_said():
    job, run = planned(COMMAND)
    errors, notes = lint(job, run, dataclasses.replace(FINE, checkpoint_bytes=None))
    assert errors == []
    assert [note.split(":")[0] for note in notes] == [
        "the cluster's limits",
        "slurm.cpus_per_task is not set",
        "time of a save",
        "free disk",
    ]


def notes_of(slurm: dict[str, Any], **sections: Any) -> str:
    job, run = planned({**COMMAND, **slurm}, **sections)
    return "\n".join(lint(job, run, FINE)[1])


def test_each_rank_gets_more_than_one_core():
    assert "gives each rank one core" in notes_of({})
    assert "gives each rank one core" not in notes_of({"cpus_per_task": 12})
    assert "gives each rank one core" not in notes_of({"cpu_bind": "none"})


def test_a_validation_may_be_longer_than_the_lead():
    rows = {"train": "rows.jsonl", "global_batch_size": 64}
    assert "a validation is finished before a signal is heard" not in notes_of({}, data=rows)
    assert "a validation is finished before a signal is heard" in notes_of({}, data={**rows, "val_split": 0.1})


def test_without_a_time_limit_it_is_said_that_none_is_compared():
    assert "slurm.time is not set" in notes_of({})
    assert "slurm.time is not set" not in notes_of({"time": "12:00:00"})


@pytest.mark.parametrize("limit", ["1", "30:00", "2:00:00", "soon"])
def test_the_time_limit_of_the_shell_holds_where_the_recipe_has_none(limit: str):
    partition = Partition("gpu", True, 3600, None, 9, 64, 8)
    facts = dataclasses.replace(
        FINE, environment={**FINE.environment, "SBATCH_TIMELIMIT": limit}, partitions=(partition,)
    )
    job, run = planned(COMMAND)
    if limit == "soon":
        with pytest.raises(ConfigError, match="SBATCH_TIMELIMIT: got 'soon'"):
            lint(job, run, facts)
        return
    errors, notes = lint(job, run, facts)
    assert "slurm.time is not set" not in " ".join(notes)
    assert [error.field for error in errors] == ([] if limit == "30:00" else ["SBATCH_TIMELIMIT"])
    assert all(error.fix.startswith("unset SBATCH_TIMELIMIT, and set slurm.time: ") for error in errors)


def test_missing_files_are_refused():
    errors = found({"env_file": "/no/such/file", "command": ["/no/such/python"]})
    assert list(errors) == ["slurm.env_file", "slurm.command"]


@pytest.mark.parametrize(
    ("slurm", "trainer", "field"),
    [
        ({"nodes": 4}, {}, "slurm.nodes"),
        ({"gpus_per_node": 4}, {}, "slurm.gpus_per_node"),
        ({"gpus_per_node": 8}, {"accelerator": "cpu"}, "slurm.gpus_per_node"),
        ({}, {"devices": "auto"}, "trainer.devices"),
        ({"gpus_per_node": 0}, {"devices": -1, "accelerator": "cpu"}, "trainer.devices"),
        ({"gpus_per_node": 0}, {"accelerator": "gpu"}, "slurm.gpus_per_node"),
        ({"gpus_per_node": 0}, {"accelerator": "cuda"}, "slurm.gpus_per_node"),
        ({"gpus_per_node": 0}, {"accelerator": "auto"}, "slurm.gpus_per_node"),
        ({"gpus_per_node": 0}, {"accelerator": None}, "slurm.gpus_per_node"),
        ({}, {"accelerator": "tpu"}, "trainer.accelerator"),
        ({}, {"accelerator": ["gpu"]}, "trainer.accelerator"),
    ],
)
def test_job_and_trainer_agree_on_the_size(slurm: dict[str, Any], trainer: dict[str, Any], field: str):
    values = recipe(slurm, trainer)
    with pytest.raises(ConfigError) as caught:
        plan_job(values, check_recipe(values, "audit").slurm)
    assert caught.value.field == field


def test_flags_win_over_the_recipe_in_both_sections_and_say_so():
    values = recipe({"nodes": 4, "gpus_per_node": 8})
    replaced = put_job_size(values, nodes=16, gpus_per_node=4)
    assert len(replaced) == 4
    values["data"]["global_batch_size"] = 128
    job = plan_job(values, check_recipe(values, "fit").slurm)
    assert (job.nodes, job.tasks_per_node, job.gpus_per_node, job.world_size) == (16, 4, 4, 64)


@pytest.mark.parametrize("given", ["foo", ["a"], 5, False])
@pytest.mark.parametrize("section", ["slurm", "trainer"])
def test_a_section_that_is_none_is_not_replaced_in_silence(section: str, given: Any):
    with pytest.raises(ConfigError) as caught:
        put_job_size({**recipe(), section: given}, nodes=1, gpus_per_node=None)
    assert (caught.value.field, caught.value.allowed) == (section, "a mapping of keys to values")


def test_processes_on_cpus_ask_for_no_gpus():
    job, _ = planned({"gpus_per_node": 0}, trainer={"devices": 2, "accelerator": "cpu"})
    assert (job.tasks_per_node, job.gpus_per_node) == (2, 0)
