"""The model card of an export: what the checkpoint itself can vouch for; no path, no user, no host, no recipe."""

from __future__ import annotations

import re
from typing import Any

import yaml

from lit_fsdp.checkpoint.export_plan import ExportPlan
from lit_fsdp.checkpoint.manifest import Manifest

_HUB_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)?")
_KINDS = {"model": "Model", "adapter": "Adapter", "merge": "Model with its adapter merged"}


def model_card(manifest: Manifest, plan: ExportPlan) -> str:
    """Return README.md for an export: the hub's YAML front matter, the step, its metrics and the versions."""
    base = str(plan.entry.get("hub_name") or "")
    is_known = _HUB_NAME.fullmatch(base) is not None  # a local model has a path
    head: dict[str, Any] = {
        "library_name": "peft" if plan.form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if is_known else {}),
        "tags": ["lit_fsdp", *(["lora"] if plan.form != "model" else [])],
    }
    metrics = {name: f"{value:.6g}" for name, value in manifest.metrics.items() if value == value}
    rows = "".join(f"| {name} | {value} |\n" for name, value in {**metrics, **manifest.versions}.items())
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {_KINDS[plan.form]} trained from "
        f"{base if is_known else 'a local model'}\n\nWritten by lit_fsdp from the checkpoint of step "
        f"{manifest.global_step}. What it was trained for, on whose data, how it was evaluated and under which license "
        f"it may be used is not known here: add it.\n\n| | |\n|---|---|\n{rows}"
    )
