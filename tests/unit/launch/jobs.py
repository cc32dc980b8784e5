"""Jobs for the tests of scripts and lint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_fsdp.config.parser import check_recipe
from lit_fsdp.config.run import RunConfig
from lit_fsdp.launch.slurm_job import Job, plan_job

MODEL = str(Path(__file__).parents[3] / "configs" / "model" / "SmolLM2-135M-Instruct.json")


def recipe(
    slurm: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **sections: Any
) -> dict[str, Any]:
    """A recipe of two nodes with eight GPUs each, changed as told."""
    return {
        "trainer": {
            "accelerator": "gpu",
            "devices": 8,
            "num_nodes": 2,
            "max_steps": 100,
            "default_root_dir": "/shared/runs/finetune",
            **(trainer or {}),
        },
        "model": {"name": MODEL},
        "data": {"train": "generated:640", "global_batch_size": 64},
        "slurm": dict(slurm or {}),
        **sections,
    }


def planned(slurm: dict[str, Any] | None = None, **more: Any) -> tuple[Job, RunConfig]:
    """The job of :func:`recipe`, and its checked recipe."""
    values = recipe(slurm, **more)
    run = check_recipe(values, "fit")
    return plan_job(values, run.slurm), run
