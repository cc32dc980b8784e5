"""Limits, memory, GPUs, driver and NCCL: every outcome by injected facts."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.launch.checks.devices import judge_devices
from lit_fsdp.launch.checks.host import HostFacts, host_facts, judge_host
from lit_fsdp.launch.checks.row import GIB, MIB, Row, Wanted
from lit_fsdp.launch.checks.torch_facts import ask_torch

WANTED = Wanted(run_folder=Path("/shared/run"), cache=Path("/shared/cache"), accelerator="gpu", devices=2)
HOST = HostFacts(
    shm_total=32 * GIB,
    shm_free=30 * GIB,
    open_files=65536,
    open_files_hard=1048576,
    memlock=-1,
    memory_total=512 * GIB,
    memory_available=500 * GIB,
    cores=64,
    is_task=False,
    has_infiniband=True,
)
H100 = {"name": "NVIDIA H100", "memory_bytes": 80 * GIB, "capability": [9, 0]}
GPUS: dict[str, Any] = {
    "torch": "2.13.0+cu128",
    "cuda_build": "12.8",
    "hip_build": None,
    "available": True,
    "driver_cuda": "12.8",
    "nvidia_files": ["/dev/nvidia0", "/dev/nvidia1"],
    "visible": None,
    "devices": [H100, H100],
    "bf16": True,
    "no_peer": [],
    "gloo": True,
    "nccl": True,
    "nccl_runs": "2.27.5",
    "nccl_package": "2.27.5",
    "nccl_loaded": [],
    "nccl_elsewhere": [],
}
CPU = {**GPUS, "cuda_build": None, "driver_cuda": None, "nvidia_files": [], "devices": [], "bf16": False}


def host(wanted: Wanted = WANTED, **change: Any) -> dict[str, Row]:
    return {row.name: row for row in judge_host(dataclasses.replace(HOST, **change), wanted, 8)}


def devices(facts: dict[str, Any] = GPUS, wanted: Wanted = WANTED, **change: Any) -> dict[str, Row]:
    return {row.name: row for row in judge_devices({**facts, **change}, wanted)}


def test_a_good_host_is_good():
    found = host()
    assert list(found) == ["/dev/shm", "open files", "locked memory", "host memory", "cores"]
    assert {row.grade for row in found.values()} == {"good"}


@pytest.mark.parametrize(
    ("change", "name", "grade"),
    [
        ({"shm_total": None, "shm_free": None}, "/dev/shm", "bad"),
        ({"shm_total": 64 * MIB, "shm_free": 64 * MIB}, "/dev/shm", "bad"),
        ({"shm_total": GIB, "shm_free": 500 * MIB}, "/dev/shm", "warning"),
        ({"open_files": 256}, "open files", "bad"),
        ({"open_files": 1024}, "open files", "warning"),
        ({"open_files": -1}, "open files", "good"),
        ({"open_files": 512, "open_files_hard": 1024}, "open files", "bad"),
        ({"memlock": MIB}, "locked memory", "bad"),
        ({"memlock": GIB}, "locked memory", "warning"),
        ({"memlock": MIB, "has_infiniband": False}, "locked memory", "good"),
        ({"memory_total": None, "memory_available": None}, "host memory", "warning"),
        ({"cores": 1}, "cores", "warning"),
        ({"cores": 4, "is_task": True}, "cores", "good"),
        ({"cores": 1, "is_task": True}, "cores", "warning"),
    ],
)
def test_a_host_that_lacks_something(change: dict[str, Any], name: str, grade: str):
    row = host(**change)[name]
    assert row.grade == grade
    assert bool(row.fix) == (grade != "good")


def test_memory_is_compared_with_a_nodes_part_of_a_checkpoint():
    wanted = dataclasses.replace(WANTED, checkpoint_bytes=1600 * GIB, nodes=2, copies_to_host=True)
    assert host(wanted)["host memory"].grade == "bad"
    assert host(dataclasses.replace(wanted, nodes=4))["host memory"].grade == "good"
    assert host(dataclasses.replace(wanted, copies_to_host=False))["host memory"].grade == "good"


def test_a_hard_limit_that_is_too_low_is_named():
    assert "hard limit is 1024" in host(open_files=512, open_files_hard=1024)["open files"].fix
    assert "ulimit -n" not in host(open_files=512, open_files_hard=1024)["open files"].fix  # it would be too low too
    assert "ulimit -n 65536" in host(open_files=512, open_files_hard=-1)["open files"].fix
    assert "ulimit -n 8192" in host(open_files=512, open_files_hard=8192)["open files"].fix


def test_limits_of_a_process_are_read():
    code = (
        "import dataclasses, json, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))\n"
        "from lit_fsdp.launch.checks.host import host_facts; print(json.dumps(dataclasses.asdict(host_facts())))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = HostFacts(**json.loads(done.stdout))
    found = {row.name: row for row in judge_host(dataclasses.replace(facts, has_infiniband=True), WANTED, 1)}
    assert found["open files"].grade == found["locked memory"].grade == "bad"
    assert found["open files"].found.startswith("300 ")


def test_this_host_has_facts():
    facts = host_facts()
    assert facts.cores >= 1
    assert facts.memory_total is None or facts.memory_total > facts.memory_available > 0


def test_good_gpus_are_good():
    found = devices()
    assert list(found) == ["GPUs", "kind of GPU", "driver", "dtypes", "NCCL", "peer access", "gloo"]
    assert {row.grade for row in found.values()} == {"good"}
    assert found["kind of GPU"].found == "2 × NVIDIA H100, 80 GiB, compute capability 9.0"


@pytest.mark.parametrize(
    ("change", "name", "grade", "word"),
    [
        ({"devices": [H100]}, "GPUs", "bad", "asks for 2"),
        ({"devices": [H100, {**H100, "name": "A100"}]}, "kind of GPU", "warning", "A100"),
        ({"driver_cuda": "11.8"}, "driver", "bad", "11.8"),
        ({"driver_cuda": "12.2"}, "driver", "good", "12.2"),  # any driver of a major version runs its builds
        ({"driver_cuda": None}, "driver", "warning", "version"),
        ({"bf16": False}, "dtypes", "warning", "not in hardware"),
        ({"nccl_runs": None}, "NCCL", "bad", "without"),
        ({"nccl_runs": "2.21.5", "nccl_elsewhere": ["/somewhere/libnccl.so.2"]}, "NCCL", "bad", "2.27.5"),
        ({"nccl_elsewhere": ["/somewhere/libnccl.so.2"]}, "NCCL", "warning", "/somewhere/libnccl.so.2"),
        ({"no_peer": [[0, 1], [1, 0]]}, "peer access", "warning", "0→1, 1→0"),
        ({"gloo": False}, "gloo", "bad", "without"),
    ],
)
def test_gpus_that_lack_something(change: dict[str, Any], name: str, grade: str, word: str):
    row = devices(**change)[name]
    assert (row.grade, word in row.found) == (grade, True), row
    assert bool(row.fix) == (grade != "good")


@pytest.mark.parametrize(
    ("dtype", "change", "grade"),
    [
        ("bf16", {}, "good"),
        ("bf16", {"bf16": False}, "bad"),
        ("fp32", {"bf16": False}, "good"),
        ("fp8", {}, "good"),
        ("fp8", {"devices": [{**H100, "capability": [8, 0]}] * 2}, "bad"),
    ],
)
def test_the_dtype_of_the_recipe(dtype: str, change: dict[str, Any], grade: str):
    assert devices(wanted=dataclasses.replace(WANTED, compute_dtype=dtype), **change)["dtypes"].grade == grade


@pytest.mark.parametrize(
    ("accelerator", "change", "grade"),
    [
        ("gpu", {}, "bad"),
        ("auto", {}, "warning"),
        ("cpu", {}, "good"),
        ("gpu", {"nvidia_files": ["/dev/nvidia0"]}, "bad"),
        ("auto", {"nvidia_files": ["/dev/nvidia0"]}, "warning"),  # a CPU build beside a GPU
        ("auto", {"nvidia_files": ["/dev/nvidia0"], "cuda_build": "13.0", "driver_cuda": "12.4"}, "bad"),
        ("auto", {"nvidia_files": ["/dev/nvidia0"], "cuda_build": "13.0", "visible": ""}, "warning"),
    ],
)
def test_without_a_gpu(accelerator: Any, change: dict[str, Any], grade: str):
    row = devices(CPU, dataclasses.replace(WANTED, accelerator=accelerator), **change)["GPUs"]
    assert row.grade == grade
    if change.get("driver_cuda"):
        assert "CUDA 12.4" in row.fix


def test_a_torch_that_cannot_be_loaded_is_bad():
    (row,) = judge_devices({"error": "ImportError: libcudart.so.12"}, WANTED)
    assert (row.grade, row.found) == ("bad", "ImportError: libcudart.so.12")


def test_a_torch_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch):
    def silent(words: list[str], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(words, options["timeout"])

    monkeypatch.setattr(subprocess, "run", silent)
    assert ask_torch(7) == {"error": "no answer in 7 s"}


def test_one_without_an_answer_is_said_with_its_last_words(monkeypatch: pytest.MonkeyPatch):
    done = subprocess.CompletedProcess([], 1, stdout="x\n", stderr="OSError: libtorch.so")
    monkeypatch.setattr(subprocess, "run", lambda words, **options: done)
    assert ask_torch() == {"error": "OSError: libtorch.so"}
