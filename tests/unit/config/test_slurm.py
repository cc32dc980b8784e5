"""The slurm section: what it refuses, and how it reads a time limit."""

from __future__ import annotations

from typing import Any

import pytest

from lit_fsdp.config.parser import build, read_recipe
from lit_fsdp.config.slurm import SlurmConfig, time_seconds
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
        ("cpu_bind", "banana"),
        ("cpu_bind", "cores,verbose"),
        ("cpu_bind", "map_cpu:"),
        ("cpu_bind", "mask_cpu:$(id)"),
        ("cpu_bind", "cores\n"),
        ("mem", -1),
        ("mem", True),
        ("signal_lead_seconds", 0),
        ("signal_lead_seconds", 70000),
        ("seeds", []),
        ("seeds", [1, 1]),
        ("seeds", [-1]),
        ("seeds", [1, 2**32]),
        ("env", {"A B": "1"}),
        ("env", {"1A": "1"}),
        ("env", {"A": "1\0"}),
        ("env", {"A": None}),
        *(("env", {name: "1"}) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK")),
        *(("env", {name: "1"}) for name in ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_CPU_BIND")),
        ("master_addr", "$(id)"),
        ("master_addr", "{host}-ib0"),
        ("master_addr", ""),
        ("master_addr", "a b"),
        ("master_port", 0),
        ("master_port", 65536),
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


@pytest.mark.parametrize("given", [0, 480, "0", "480"])
def test_memory_may_be_a_number(given: str | int):
    assert build(SlurmConfig, {"mem": given}, "slurm").mem == str(given)


def test_a_number_in_place_of_text_belongs_in_quotes():
    """YAML reads 007 as 7, and what was meant is not known any more."""
    with pytest.raises(ConfigError) as caught:
        build(SlurmConfig, {"account": 7}, "slurm")
    assert caught.value.fix == 'write it in quotes, digit by digit as it is meant: slurm.account: "7"'


@pytest.mark.parametrize(
    ("flag", "given", "value"),
    [
        ("account", "007", "007"),
        ("partition", "5", "5"),
        ("job_name", "1e3", "1e3"),
        ("qos", "true", "true"),
        ("qos", "'high'", "high"),
        ("dependency", "1234", "1234"),
        ("time", "12:00:00", "12:00:00"),
        ("mem", "0", "0"),
        ("account", "null", None),
        ("master_addr", "{node}-ib0", "{node}-ib0"),
        ("master_addr", "{node}", "{node}"),
        ("constraint", "[rack1|rack2]", "[rack1|rack2]"),
        ("env.NCCL_IB_GID_INDEX", "03", "03"),
        ("nodes", "2", 2),
        ("seeds", "[1, 2]", [1, 2]),
        ("requeue", "false", False),
    ],
)
def test_a_flag_of_a_text_is_text(flag: str, given: str, value: Any):
    values = read_recipe([f"--slurm.{flag}", given]).values["slurm"]
    built = getattr(build(SlurmConfig, values, "slurm"), flag.partition(".")[0])
    assert (built["NCCL_IB_GID_INDEX"] if flag.startswith("env.") else built) == value


@pytest.mark.parametrize(
    ("given", "value"),
    [
        *((word, word) for word in ("cores", "v,cores", "quiet,rank_ldoms", "map_cpu:0,4,8", "mask_cpu:0xf,0xF0*2")),
        *((word, "none") for word in ("none", "None", "NONE")),
    ],
)
def test_cores_are_bound_as_srun_knows_it(given: str, value: str):
    assert build(SlurmConfig, {"cpu_bind": given}, "slurm").cpu_bind == value


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("--clusters=other", "drop --clusters"),
        ("--cluster other", "drop --cluster"),
        ("--clu=other", "drop --clu"),
        ("-M other", "drop -M"),
        ("-Mother", "drop -Mother"),
        ("--exclusive -M other", "drop -M"),
        ("--overcommit", "drop --overcommit"),
        ("-O", "drop -O"),
        ("--test-only", "drop --test-only"),
        ("--het-group=1", "drop --het-group"),
        ("--spread-job", "drop --spread-job"),
        ("-Hn4", "write one option per entry"),
        ("-vn4", "write one option per entry"),
        ("-vvM other", "write one option per entry"),
        ("--exclusive -sM=other", "write one option per entry"),
    ],
)
def test_an_option_that_no_job_may_have_is_refused_however_it_is_written(option: str, fix: str):
    with pytest.raises(ConfigError) as caught:
        build(SlurmConfig, {"extra": ["--exclusive", option]}, "slurm")
    assert (caught.value.field, caught.value.given) == ("slurm.extra[1]", option)
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize(
    "option",
    ["--cluster-constraint=fast", "-vv", "-H", "-x n3", "-xn3", "-w nHn4", "--comment=-M other", "--exclusive", "-s"],
)
def test_any_other_option_of_sbatch_is_kept(option: str):
    assert build(SlurmConfig, {"extra": [option]}, "slurm").extra == [option]


def test_a_variable_of_the_meeting_point_has_a_key():
    """The script sets it after everything that users add, and would win in silence."""
    with pytest.raises(ConfigError) as caught:
        build(SlurmConfig, {"env": {"NCCL_DEBUG": "WARN", "MASTER_PORT": "4444"}}, "slurm")
    assert (caught.value.field, caught.value.fix) == ("slurm.env.MASTER_PORT", "set slurm.master_port")


def test_options_of_srun_that_are_variables_stay_the_users():
    given = {"SLURM_MPI_TYPE": "pmix", "SLURM_HINT": "nomultithread", "SLURM_OVERLAP": "1"}
    assert SlurmConfig(env=given).env == given
