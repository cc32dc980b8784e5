"""What ``doctor`` makes of facts: every grade of every row, who came from which node, and its command line."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_fsdp.commands.doctor import _wanted
from lit_fsdp.commands.slurm import checkpoint_bytes
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.launch import doctor
from lit_fsdp.launch.doctor import Row, Wanted

H100 = {"name": "NVIDIA H100", "gib": 80.0, "has_bf16": True}
GPUS: dict[str, Any] = {"build": "CUDA 12.8", "why_not": "", "device_files": 2, "gpus": [H100, H100], "driver": "570"}
GPUS["nccl"] = "2.27.5"
NONE = {**GPUS, "gpus": [], "device_files": 0, "why_not": "no NVIDIA driver", "nccl": None}


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


def test_a_checkpoint_of_adapters_is_without_the_base() -> None:
    words = ["--config", "recipes/llama3.1-70b_lora_fsdp2_8x80gb.yaml"]
    recipe = load_recipe(words, "doctor")
    wanted = _wanted(recipe, None, can_measure=True)
    assert wanted.checkpoint_bytes == checkpoint_bytes(recipe.run)
    assert wanted.checkpoint_bytes < 2**30 * 4 < 70e9 * 2  # the base in bf16
    assert (wanted.devices, wanted.num_checkpoints) == (8, 4)


def test_devices_are_held_against_the_recipe() -> None:
    good = {"GPUs": "ok", "NCCL": "ok"}
    for facts, asked, processes, expected in (
        (GPUS, {}, 2, good),
        (GPUS, {}, 4, {**good, "GPUs": "fail"}),
        ({**GPUS, "nccl": None}, {}, 2, {**good, "NCCL": "fail"}),
        ({**GPUS, "gpus": [H100, H100 | {"has_bf16": False}]}, {}, 2, {**good, "bf16": "warn"}),
        (NONE, {}, 2, {"GPUs": "warn"}),
        ({**NONE, "device_files": 8}, {}, 2, {"GPUs": "fail"}),  # they are there, but torch cannot use them
        (NONE, {"accelerator": "gpu"}, 2, {"GPUs": "fail"}),
        (NONE, {"accelerator": "cpu"}, 2, {"GPUs": "ok"}),
        ({"error": "undefined symbol"}, {}, 2, {"torch loads": "fail"}),
    ):
        wanted = Wanted(run_folder=Path(), **asked)
        assert grades(doctor.judge_devices(facts, wanted, processes)) == expected
