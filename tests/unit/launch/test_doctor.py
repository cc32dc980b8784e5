"""What ``doctor`` makes of facts: every grade of every row, who came from which node, and its command line."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from lit_fsdp.host import GIB
from lit_fsdp.launch import doctor
from lit_fsdp.launch.doctor import Row, Wanted

H100 = {"name": "NVIDIA H100", "gib": 80.0}
GPUS: dict[str, Any] = {"build": "CUDA 12.8", "why_not": "", "device_files": 2, "gpus": [H100, H100], "driver": "570"}
GPUS |= {"bf16": True, "fp8": True, "nccl": "2.27.5"}
NONE = {**GPUS, "gpus": [], "device_files": 0, "why_not": "no NVIDIA driver", "bf16": False, "fp8": False, "nccl": None}
MODEL = Path(__file__).parents[3] / "configs" / "model" / "SmolLM2-135M-Instruct.json"
Usage = namedtuple("Usage", "total used free")


def grades(rows: list[Row]) -> dict[str, str]:
    """Grade by name; what is not ok has a fix."""
    assert all(bool(row.fix) == (row.grade != "ok") for row in rows)
    return {row.name: row.grade for row in rows}


def test_versions_are_held_against_the_floors_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch": "2.11.0a0+git12", "lightning": "2.6.5", "rich": "14.0", "peft": "0.1"}
    needs = ["torch>=2.11", "lightning>=2.6.6", "rich>=13", "datasets>=4.0", 'peft>=0.17; extra == "lora"']

    def distributions(name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(version=found[name])] if name in found else []

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    monkeypatch.setattr(importlib.metadata, "distributions", distributions)
    rows = doctor.judge_versions()
    assert grades(rows) == {"Python": "ok", "torch": "ok", "lightning": "fail", "rich": "ok", "datasets": "fail"}
    assert [row.fix for row in rows if row.name == "datasets"] == ['python -m pip install "datasets>=4.0"']


def test_devices_are_held_against_the_recipe() -> None:
    good = {"GPUs": "ok", "precision": "ok", "NCCL": "ok"}
    for facts, asked, processes, expected in (
        (GPUS, {"precision": "fp8"}, 2, good),
        (GPUS, {}, 4, {**good, "GPUs": "fail"}),
        ({**GPUS, "fp8": False}, {"precision": "fp8"}, 2, {**good, "precision": "fail"}),
        ({**GPUS, "bf16": False}, {"precision": "mixed"}, 2, {**good, "precision": "fail"}),
        ({**GPUS, "bf16": False}, {"precision": "auto"}, 2, good),
        ({**GPUS, "nccl": None}, {}, 2, {**good, "NCCL": "fail"}),
        (NONE, {}, 2, {"GPUs": "warn"}),
        ({**NONE, "device_files": 8}, {}, 2, {"GPUs": "fail"}),  # they are there, but torch cannot use them
        (NONE, {"accelerator": "gpu"}, 2, {"GPUs": "fail"}),
        (NONE, {"accelerator": "cpu"}, 2, {"GPUs": "ok"}),
        ({"error": "undefined symbol"}, {}, 2, {"torch loads": "fail"}),
    ):
        wanted = Wanted(run_folder=Path(), cache=Path(), **asked)
        assert grades(doctor.judge_devices(facts, wanted, processes)) == expected


def test_room_is_held_against_what_is_kept_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for free, num_bytes, count, expected in (
        (5 * GIB, None, 0, ["ok", "ok"]),
        (5 * GIB, GIB, 4, ["ok", "ok"]),
        (3 * GIB, GIB, 4, ["fail", "ok"]),
        (5 * GIB, None, 4, ["warn", "ok"]),
        (GIB, None, 0, ["ok", "warn"]),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: Usage(9 * GIB, 0, free))
        asked = {"checkpoint_bytes": num_bytes, "num_checkpoints": count}
        wanted = Wanted(run_folder=tmp_path / "a" / "b", cache=tmp_path, **asked)
        assert [row.grade for row in doctor.judge_disks(wanted)] == expected
    assert os.listdir(tmp_path) == []


def test_a_model_is_looked_for_where_the_run_will(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    (tmp_path / "config.json").write_text("{}")
    for name, expected in ((tmp_path, "ok"), (MODEL, "ok"), ("./no", "fail"), ("org/name", "fail")):
        rows = doctor.judge_hub(str(name))
        assert "hf_secret" not in str(rows)
        assert grades(rows) == {"hub": "ok", "model": expected}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert grades(doctor.judge_hub("org/name")) == {"hub": "warn", "model": "warn"}
