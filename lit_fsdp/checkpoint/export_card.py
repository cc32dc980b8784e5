"""The model card of an export: what the checkpoint itself can vouch for, and nothing else.

No path, no user, no host: of the recipe only numbers and plain words of a few known keys are told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from lit_fsdp.checkpoint.export_plan import ExportPlan
from lit_fsdp.checkpoint.manifest import Manifest
from lit_fsdp.checkpoint.store import load_state
from lit_fsdp.errors import CheckpointError

_RECIPE = "recipe.yaml"
_HUB_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)?")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_.\-]{1,40}")
_KEYS = (
    *("trainer.max_steps", "trainer.max_epochs", "trainer.gradient_clip_val"),
    *(f"trainer.strategy.init_args.{key}" for key in ("engine", "sharding", "precision", "activation_checkpointing")),
    *(f"model.optim.{key}" for key in ("lr", "schedule", "warmup_steps", "min_lr_ratio", "weight_decay")),
    *(f"model.lora.{key}" for key in ("r", "alpha", "dropout", "target_modules", "use_dora", "modules_to_save")),
    *("model.freeze", "model.train_only", "data.max_seq_length", "data.global_batch_size", "data.shuffle"),
    "seed_everything",
)


def model_card(manifest: Manifest, plan: ExportPlan) -> str:
    """README.md for the export of a checkpoint: YAML front matter of the hub, then a few tables.

    Args:
        manifest: Of the checkpoint; its recipe and data position are read from the checkpoint's folder.
        plan: What is exported.
    """
    base, hub_name = str(plan.entry.get("base") or "a model"), plan.entry.get("hub_name")
    is_adapter = plan.form == "adapter"
    head: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers", "pipeline_tag": "text-generation"}
    if isinstance(hub_name, str) and _HUB_NAME.fullmatch(hub_name):
        head["base_model"] = hub_name
    head["tags"] = ["lit_fsdp", *(["lora"] if plan.form != "model" else [])]
    kind = {"model": "Model", "adapter": "Adapter", "merge": "Model with its adapter merged"}[plan.form]
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        "",
        f"# {kind} trained from {_plain_text(base)}",
        "",
        f"Written by lit_fsdp from the checkpoint of step {manifest.global_step}. What it was trained for, on whose "
        "data, how it was evaluated and under which licence it may be used is not known here: add it.",
        "",
        *_table("Recipe", _recipe(manifest)),
        *_table("Data", [(f"fingerprint of {name}", f"`{text}`") for name, text in _fingerprints(manifest)]),
        *_table("Logged with this checkpoint", [(n, f"{v:.6g}") for n, v in manifest.metrics.items() if v == v]),
        *_table("Versions", sorted(manifest.versions.items())),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    if not rows:
        return []
    return [f"## {title}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]


def _recipe(manifest: Manifest) -> list[tuple[str, str]]:
    """Known keys of the resolved recipe whose values are numbers or plain words."""
    if _RECIPE not in manifest.files:
        return []
    path = manifest.file(_RECIPE)
    try:
        recipe = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError) as error:
        raise CheckpointError(f"{path}: no YAML ({error})") from error
    found = []
    for key in _KEYS:
        value: Any = recipe
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        words = value if isinstance(value, list) else [value]
        if value is not None and words and all(_is_plain(word) for word in words):
            found.append((key.replace(".init_args", ""), ", ".join(map(str, words)).lower()))
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return _PLAIN_WORD.fullmatch(value) is not None
    return isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))


def _fingerprints(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """What identifies the rows trained on, from the saved position in them."""
    if "state.json" not in manifest.files:
        return
    state = load_state(manifest.folder)
    for name, value in state.items() if isinstance(state, Mapping) else ():
        fingerprint = value.get("fingerprint") if isinstance(value, Mapping) and "DataModule" in str(name) else None
        if isinstance(fingerprint, str) and _PLAIN_WORD.fullmatch(fingerprint[:40]):
            yield "train", fingerprint


def _plain_text(text: str) -> str:
    """Without anything that Markdown would act on."""
    return re.sub(r"[^\w.,()\- ]", " ", text)[:100].strip()
