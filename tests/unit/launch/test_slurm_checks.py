"""What would have failed an hour later is said before; what is only assumed is a warning; wrong values are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.commands.slurm import checkpoint_bytes
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.slurm import SlurmConfig, time_seconds
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import GIB
from lit_fsdp.launch.slurm_checks import check_job
from tests.unit.launch.conftest import planned

ENOUGH = {"cpus_per_task": 8, "time": "2:00:00"}


def test_the_time_of_a_save_the_cores_of_a_rank_and_lines_of_ones_own(tmp_path: Path):
    cases: list[tuple[dict[str, Any], tuple[int | None, float | None], str, str]] = [
        ({}, (2**20, None), "", ""),
        ({"cpus_per_task": None}, (2**20, None), "", "SLURM gives each rank one core"),
        ({}, (None, None), "", "the time of a save is unknown"),
        ({}, (200 * GIB, None), "", "takes 200 s at an assumed 1.0 GiB/s"),
        ({"time": "2:00"}, (2**20, None), "", "set slurm.signal_lead_seconds: 30 for a short test"),
        ({"signal_lead_seconds": 180}, (2**20, 100.0), "", ""),
        ({"signal_lead_seconds": 120}, (2**20, 100.0), "fix:     set slurm.signal_lead_seconds: 180", ""),
        ({"setup": ["module load cuda"]}, (2**20, None), "", ""),
        ({"setup": ["if true; then"]}, (2**20, None), "valid bash lines", ""),
        ({"setup": ["srun hostname"]}, (2**20, None), "", "srun in slurm.setup or slurm.command"),
    ]
    for slurm, measured, error, warning in cases:
        job, run = planned({**ENOUGH, **slurm}, trainer={"default_root_dir": str(tmp_path)})
        errors, warnings = check_job(job, run, *measured)
        assert (len(errors), error in "".join(map(str, errors))) == (bool(error), True), slurm
        assert (len(warnings), warning in "".join(warnings)) == (bool(warning), True), slurm


def test_files_of_rows_that_are_not_there(tmp_path: Path):
    """They may be where the job runs."""
    (tmp_path / "there.jsonl").write_text("")
    names = [f"{tmp_path}/*.jsonl", f"{tmp_path}/none.csv", "org/name"]
    job, run = planned(data={"train": names, "val": "none.jsonl", "global_batch_size": 64})
    _, warnings = check_job(job, run, 2**20, None)
    assert [line.partition(" does")[0] for line in warnings if line.startswith("data.")] == [
        f"data.train: {tmp_path}/none.csv",
        "data.val: none.jsonl",
    ]


def test_a_checkpoint_of_adapters_is_without_the_base():
    recipe = ["--config", "llama3.2-3b_lora_fsdp2_1x24gb"]
    small, whole = (
        checkpoint_bytes(load_recipe([*recipe, *more], "audit").run) for more in ([], ["--model.lora=null"])
    )
    assert small is not None
    assert whole is not None
    assert small < 0.05 * whole
    assert whole > 3e9 * 12  # weights and two moments in fp32


def test_job_and_trainer_agree():
    for slurm, trainer, field in (
        ({"nodes": 4}, {}, "slurm.nodes"),
        ({"gpus_per_node": 4}, {}, "slurm.gpus_per_node"),
        ({}, {"devices": "auto"}, "trainer.devices"),
        ({}, {"default_root_dir": "/shared/back\\slash"}, "trainer.default_root_dir"),
    ):
        with pytest.raises(ConfigError) as caught:
            planned(slurm, trainer=trainer)
        assert caught.value.field == field


def test_a_time_limit_is_read_as_sbatch_reads_it():
    right = {"30": 1800, "5:30": 330, "12:00:00": 43200, "1-0": 86400, "1-06:30": 109800, "2-00:00:10": 172810}
    for text, seconds in {**right, "UNLIMITED": None, "infinite": None}.items():
        assert time_seconds(text) == seconds
    for text in ("", "0", "0:00", "soon", "1:2:3:4", "1-", "-5", "12h", "1-2-3"):
        with pytest.raises(ConfigError, match=r"^time: got"):
            SlurmConfig(time=text)
    for text, written in {"2h": "2:00:00", "90 min": "1:30:00", "3 Days": "72:00:00", "soon": "12:00:00"}.items():
        with pytest.raises(ConfigError) as caught:
            time_seconds(text)
        assert caught.value.fix == f'write time: "{written}"'


def test_a_wrong_value_is_named():
    taken = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "SLURM_NTASKS", "LIT_FSDP_EXIT_DIR")  # by the launch
    not_extra = ("exclusive", "--exclusive\n--wrap=x", "--ntasks=16", "-n16", "-n 16", "--exclusive --array=0-3")
    not_extra += ("--gres=gpu:8", "--signal=B:USR1@60", "--no-requeue", "--output=x", "-M other", "--time=1")
    cases: tuple[tuple[str, Any], ...] = (
        ("time", 43200),
        ("gpus_per_node", -1),
        ("mem", "5x"),
        ("mem", "1.5G"),
        ("signal_lead_seconds", 70000),
        ("env", {"A B": "1"}),
        *(("env", {name: "1"}) for name in taken),
        ("command", []),
        ("partition", "a\nb"),
        ("job_name", "a\x1b[31m"),
        ("account", " "),
        ("container", "image\n#SBATCH --wrap=x"),
        ("container", "{image: my/image.sqsh}"),
        ("container_mounts", [""]),
        *(("extra", [option]) for option in not_extra),
    )
    for field, value in cases:
        with pytest.raises(ConfigError) as caught:
            SlurmConfig(**{field: value})
        assert caught.value.field.split("[")[0].split(".")[0] == field
