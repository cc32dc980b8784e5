"""What the Hugging Face libraries will do: where their cache is, whether they may ask the hub, and what they need."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.launch.checks.row import Row, Wanted

_TRUE = ("1", "ON", "YES", "TRUE")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class HubFacts:
    """State of the hub's files; never a token's value."""

    home: Path
    is_offline: bool
    token_from: str | None
    """Where a token is; ``None``: there is none."""
    is_writable: bool
    model: str | None
    """``path`` | ``cached`` | ``incomplete`` | ``missing``, of the recipe's model; ``None`` without one."""
    lacks: str = ""
    """What an incomplete model lacks."""


def hub_facts(environment: Mapping[str, str], wanted: Wanted) -> HubFacts:
    """Look at variables and folders, and ask nobody."""
    environment = {name: _with_variables(value, environment) for name, value in environment.items()}
    default = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    home = Path(environment.get("HF_HOME") or default).expanduser()
    cache = Path(
        environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or home / "hub"
    ).expanduser()
    offline = environment.get("HF_HUB_OFFLINE", environment.get("TRANSFORMERS_OFFLINE", "")).upper() in _TRUE
    state, lacks = (None, "") if wanted.model is None else _model(wanted, cache)
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.is_dir())
    return HubFacts(home, offline, _token(environment, home), os.access(existing, os.W_OK), state, lacks)


def _with_variables(text: str, environment: Mapping[str, str]) -> str:
    """As huggingface_hub reads its folders; what is not set stays."""
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: environment.get(found[1] or found[2], found[0]), text)


def judge_hub(facts: HubFacts, wanted: Wanted) -> list[Row]:
    """Rows on hub state and on the recipe's model."""
    where = "offline (HF_HUB_OFFLINE)" if facts.is_offline else "may be asked"
    found = f"{where}; cache {facts.home}; token {'from ' + facts.token_from if facts.token_from else 'none'}"
    hub = Row("hub", found)
    if not facts.is_writable:
        hub = Row("hub", f"{found}; its cache cannot be written", "warning", "set HF_HOME to a folder you may write")
    if facts.model is None:
        return [hub]
    name, model = "model", str(wanted.model)
    fetch = f"hf download {wanted.model}, where there is a network, with the same HF_HOME"
    if facts.model in ("path", "cached"):
        return [hub, Row(name, f"{model}: on disk" if facts.model == "path" else f"{model}: in the hub's cache")]
    text = f"{model}: " + ("not in the hub's cache" if facts.model == "missing" else f"lacks {facts.lacks}")
    if _is_path(model) or Path(model).expanduser().is_dir():
        fix = "check model.name, and that this machine sees that folder"
        return [hub, Row(name, f"{model} does not exist" if facts.model == "missing" else text, "bad", fix)]
    if facts.is_offline:
        return [hub, Row(name, f"{text}, and the hub may not be asked", "bad", fetch)]
    gated = "" if facts.token_from else "; a gated one needs hf auth login"
    return [hub, Row(name, f"{text}: fetched when the run starts{gated}", "warning", fetch)]


def _token(environment: Mapping[str, str], home: Path) -> str | None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environment.get(name):
            return name
    file = Path(environment.get("HF_TOKEN_PATH") or home / "token").expanduser()
    try:
        return str(file) if file.stat().st_size else None
    except OSError:
        return None


def _model(wanted: Wanted, cache: Path) -> tuple[str, str]:
    name = str(wanted.model)
    path = Path(name).expanduser()
    if path.is_file():
        return "path", ""
    if path.is_dir():
        lacks = _lacks(path, wanted.needs_weights)
        return ("incomplete", lacks) if lacks else ("path", "")
    snapshots = sorted((cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    if _is_path(name) or not snapshots:
        return "missing", ""
    missing = [_lacks(folder, wanted.needs_weights) for folder in snapshots]
    return ("cached", "") if "" in missing else ("incomplete", missing[-1])


def _lacks(folder: Path, needs_weights: bool) -> str:
    """What a model folder lacks, or nothing; a link to a file that is gone counts as missing."""
    if not (folder / "config.json").exists():
        return "config.json"
    if not needs_weights:
        return ""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError):
            return f"a readable {index.name}"
        gone = [name for name in shards if not (folder / name).exists()]
        return f"{gone[0]}" + (f" and {len(gone) - 1} more" if len(gone) > 1 else "") if gone else ""
    there = any(path.exists() for pattern in _WEIGHTS for path in folder.glob(pattern))
    return "" if there else "weights (model.safetensors)"


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".json", ".gguf"))
