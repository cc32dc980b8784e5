"""The slurm section: what it refuses, and how it reads a time limit."""

from __future__ import annotations

from typing import Any

import pytest

from lit_fsdp.config.slurm import SlurmConfig, time_seconds
from lit_fsdp.config.typed import build
from lit_fsdp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("5:30", 330),
        ("12:00:00", 43200),
        ("1-0", 86400),
        ("1-06:30", 109800),
        ("2-00:00:10", 172810),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text: str, seconds: int | None):
    assert time_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0:00", "soon", "1:2:3:4", "1-", "-5", "12h", "1-2-3"])
def test_what_is_no_time_limit_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"slurm\.time"):
        build(SlurmConfig, {"time": text}, "slurm")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("time", 43200),
        ("gpus_per_node", -1),
        ("cpus_per_task", 0),
        ("max_requeues", -1),
        ("signal_lead_seconds", 0),
        ("signal_lead_seconds", 70000),
        ("seeds", []),
        ("seeds", [1, 1]),
        ("seeds", [-1]),
        ("env", {"A B": "1"}),
        ("env", {"1A": "1"}),
        ("env", {"A": "1\0"}),
        ("env", {"A": None}),
        ("setup", ["module\0 load"]),
        ("command", []),
        ("partition", "a\nb"),
        ("job_name", "a\x1b[31m"),
        ("account", " "),
        ("container", "image\n#SBATCH --wrap=x"),
        ("extra", ["exclusive"]),
        ("extra", ["--exclusive\n--wrap=x"]),
        ("container_mounts", [""]),
        ("container_runtime", "docker"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any):
    with pytest.raises(ConfigError, match=rf"slurm\.{field}"):
        build(SlurmConfig, {field: value}, "slurm")
