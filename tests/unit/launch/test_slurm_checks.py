"""What would have failed an hour later is said before; what is only assumed is a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.slurm import SlurmConfig, time_seconds
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import GIB
from lit_fsdp.launch import slurm_checks
from lit_fsdp.launch.slurm_checks import Facts, check_job
from tests.unit.launch.conftest import planned

SINFO = """\
Welcome to our site
gpu*|1-00:00:00|6|64|512000|gpu:a100:8(S:0-1)
gpu*|1-00:00:00|2|128+|1000000+|gpu:h100:4,gpu:a100:4,nvme:1
small|1:00:00|10|32|64000|gpu:2
cpu|infinite|100|96|256000|(null)
"""
ENOUGH = {"cpus_per_task": 8, "time": "2:00:00"}


@pytest.fixture(autouse=True)
def _a_shared_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    monkeypatch.setattr(slurm_checks, "node_local", lambda path: None)


def found(
    slurm: dict[str, Any] | None = None, ckpt_path: str | None = None, facts: dict[str, Any] | None = None, **more: Any
) -> tuple[dict[str, str], str]:
    """Errors by field, and all warnings."""
    job, run = planned({**ENOUGH, **(slurm or {})}, ckpt_path, **more)
    errors, warnings = check_job(job, run, Facts(**{"sinfo": SINFO, "checkpoint_bytes": 2**20, **(facts or {})}))
    return {error.field: str(error) for error in errors}, "\n".join(warnings)


def test_what_no_partition_can_give():
    data = {"train": "generated:640", "global_batch_size": 960}
    for slurm, nodes, devices, field, says in (
        ({"partition": "gpus"}, 2, 8, "slurm.partition", "set slurm.partition: gpu"),
        ({"time": "2-0"}, 2, 8, "slurm.time", "at most 1-00:00:00"),
        ({"partition": "small", "time": "61"}, 2, 2, "slurm.time", "at most 1:00:00"),
        ({"mem": "600G"}, 4, 8, "slurm.nodes", "at most 2"),
        ({"cpus_per_task": 16}, 3, 8, "slurm.nodes", "at most 2"),  # two of its nodes have 128 cores
        ({"partition": "cpu"}, 2, 8, "slurm.gpus_per_node", "100 with 0 GPUs"),
        ({"partition": "cpu,gpu"}, 2, 8, "", ""),  # one that can is enough
    ):
        errors, _ = found(slurm, trainer={"num_nodes": nodes, "devices": devices}, data=data)
        assert list(errors) == ([field] if field else []), slurm
        assert says in errors.get(field, "")


def test_what_is_only_assumed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"sinfo": None}, "the cluster's limits are not compared"),
        ({"cpus_per_task": None}, {}, "SLURM gives each rank one core"),
        ({}, {"checkpoint_bytes": 200 * GIB}, "takes 200 s if the disk takes 1.0 GiB/s, which nobody has measured"),
        ({"time": "2:00"}, {}, "set slurm.signal_lead_seconds: 30 to rehearse"),
        ({"command": ["/nodes/only/python"]}, {}, "/nodes/only/python: not on this machine"),
    ]
    for slurm, facts, says in cases:
        errors, warnings = found(slurm, facts=facts)
        assert (errors, says in warnings) == ({}, True), (slurm, facts, warnings)
    monkeypatch.undo()
    errors, warnings = found(trainer={"default_root_dir": "/tmp/run"})
    assert (errors, "trainer.default_root_dir /tmp/run (/tmp is a node's own)" in warnings) == ({}, True)


def test_a_measured_save_has_to_fit_into_the_lead():
    errors, _ = found({"signal_lead_seconds": 120}, facts={"save_seconds": 100.0})
    assert "fix:     set slurm.signal_lead_seconds: 180" in errors["slurm.signal_lead_seconds"]
    assert found({"signal_lead_seconds": 180}, facts={"save_seconds": 100.0}) == ({}, "")


def test_a_launcher_inside_of_the_job_is_worth_a_warning(tmp_path: Path):
    file = tmp_path / "env.sh"
    for lines, launcher in (
        (["srun hostname"], "srun"),
        (["export A=1; exec torchrun x"], "torchrun"),
        (["srun() { echo no; }", "echo srun x", "module load mpirun"], ""),  # defined, or only spoken of
    ):
        file.write_text("\n".join(lines))
        for slurm in ({"setup": lines}, {"env_file": str(file)}):
            errors, warnings = found(slurm)
            assert (errors, warnings.partition(" in setup")[0]) == ({}, launcher)


def test_a_used_run_folder_is_resumed_or_refused():
    run, free = "trainer.default_root_dir", {"num_kept": 0}
    for word, facts, field, says in (
        (None, {"num_kept": 3}, run, "holds 3 checkpoint(s)"),
        ("/no/such/step", free, "ckpt_path", "a checkpoint's folder"),
        (None, {"living_jobs": ["12"]}, run, "scancel 12, or name another"),
        ("best", {"num_kept": 3}, "", ""),
    ):
        errors, _ = found(ckpt_path=word, facts=facts)
        assert list(errors) == ([field] if field else []), word
        assert says in errors.get(field, "")
    assert found({"dependency": "afterany:12"}, facts={"living_jobs": ["12"]}) == ({}, "")


def test_what_is_named_exists(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    for train, is_there in ((f"{tmp_path}/*.jsonl", True), (f"{tmp_path}/*.csv", False), ("rows.jsonl", False)):
        errors, _ = found(data={"train": train, "global_batch_size": 64})
        assert list(errors) == ([] if is_there else ["data.train"])
    rows = [str(tmp_path / "a.csv"), str(tmp_path / "a.jsonl")]
    assert list(found(data={"train": rows, "global_batch_size": 64})[0]) == ["data.train"]
    errors, _ = found({"env_file": "no.sh", "container": "./no.sif"}, data={"train": "x.csv", "global_batch_size": 64})
    assert list(errors) == ["slurm.env_file", "slurm.container"]  # the image brings the rest
    assert list(found(model={"name": "./no/model"})[0]) == ["model.name"]


def test_lines_that_bash_cannot_read(tmp_path: Path):
    (tmp_path / "env.sh").write_text("if true; then\n")
    errors, _ = found({"setup": ["for x in"], "env_file": str(tmp_path / "env.sh")})
    assert list(errors) == ["slurm.setup", "slurm.env_file"]
    assert "syntax error" in errors["slurm.setup"]


def test_a_time_limit_is_read_as_sbatch_reads_it():
    right = {"30": 1800, "5:30": 330, "12:00:00": 43200, "1-0": 86400, "1-06:30": 109800, "2-00:00:10": 172810}
    for text, seconds in {**right, "UNLIMITED": None, "infinite": None}.items():
        assert time_seconds(text) == seconds
    for text in ("", "0", "0:00", "soon", "1:2:3:4", "1-", "-5", "12h", "1-2-3"):
        with pytest.raises(ConfigError, match=r"^time: got"):
            SlurmConfig(time=text)


def test_a_wrong_value_is_named():
    taken = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "SLURM_NTASKS", "LIT_FSDP_EXIT_DIR")  # by the launch
    not_extra = ("exclusive", "--exclusive\n--wrap=x", "--ntasks=16", "-n16", "-n 16", "--gpus-per-task=1")
    not_extra += ("--gres=gpu:8", "--signal=B:USR1@60", "--no-requeue", "--output=x", "-M other", "--time=1")
    cases: tuple[tuple[str, Any], ...] = (
        ("time", 43200),
        ("gpus_per_node", -1),
        ("signal_lead_seconds", 70000),
        ("env", {"A B": "1"}),
        *(("env", {name: "1"}) for name in taken),
        ("command", []),
        ("partition", "a\nb"),
        ("job_name", "a\x1b[31m"),
        ("account", " "),
        ("container", "image\n#SBATCH --wrap=x"),
        ("container_mounts", [""]),
        *(("extra", [option]) for option in (*not_extra, "--exclusive --array=0-3")),
    )
    for field, value in cases:
        with pytest.raises(ConfigError) as caught:
            SlurmConfig(**{field: value})
        assert caught.value.field.split("[")[0].split(".")[0] == field
