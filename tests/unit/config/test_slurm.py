"""The slurm section: what it refuses, and how it reads a time limit."""

from __future__ import annotations

from typing import Any

import pytest

from lit_fsdp.config.slurm import SlurmConfig, time_seconds
from lit_fsdp.errors import ConfigError


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


def test_what_is_taken():
    options = ["--cluster-constraint=fast", "-x n3", "-w nHn4", "--comment=-M other", "--exclusive", "-vv"]
    given = {"SLURM_MPI_TYPE": "pmix", "SLURM_HINT": "nomultithread"}  # options of srun stay the user's
    config = SlurmConfig(extra=options, env=given, mem=0, master_addr="{node}-ib0")
    assert (config.extra, config.env, config.mem) == (options, given, "0")
