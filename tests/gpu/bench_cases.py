"""What ``tests.gpu.bench_gpu`` measures: models, and one row of its table per case."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.record import ROOT

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1B": ("Llama-3.2-1B", {}),
    "3B": ("Llama-3.2-1B", {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}),
    "8B": ("Llama-3.1-8B", {}),
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process that trains, and one row of the table."""

    group: str
    model: str = "1B"
    side: str = "ours"
    """``ours`` or ``trl``."""
    engine: str = "fsdp2"
    precision: str = "mixed"
    recompute: str = "none"
    attention: str = "sdpa"
    compile: bool = False
    loss: str = "chunked"
    """For TRL: ``liger`` or ``plain``."""
    lora: bool = False
    micro_batch_size: int = 4

    @property
    def name(self) -> str:
        """In the table."""
        parts = [self.model, "LoRA" if self.lora else "full fine-tuning", self.precision]
        parts += [self.engine] if self.side == "ours" else ["TRL"]
        parts += [self.attention, self.loss, *(["compile"] if self.compile else []), f"recompute {self.recompute}"]
        return ", ".join(parts)


def cases(groups: list[str]) -> list[Case]:
    """Those of the groups, each once, in the order of the table."""
    found = [case for case in _all_cases() if case.group in groups]
    return list({dataclasses.replace(case, group=""): case for case in found}.values())


def _all_cases() -> list[Case]:
    flash = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    engines = [
        Case(group="engines", engine=engine, recompute=recompute)
        for engine in ("single", "fsdp2", "fsdp1")
        for recompute in ("none", "full")
    ]
    kernels = [
        Case(group="kernels", attention=attention, compile=compile, loss=loss)
        for attention in ("sdpa", "flex_attention", *(["flash_attention_2"] if flash != "sdpa" else []))
        for compile in (False, True)
        for loss in ("chunked", "liger")
    ]
    trained: list[dict[str, Any]] = [
        {"model": "1B"},
        {"model": "3B", "recompute": "full"},
        {"model": "8B", "precision": "low_precision", "recompute": "full", "micro_batch_size": 2},
        {"model": "8B", "precision": "low_precision", "lora": True, "micro_batch_size": 2},
    ]
    sizes = [
        case
        for shape in trained
        for case in (
            *(Case(group="sizes", attention=flash, compile=compile, **shape) for compile in (False, True)),
            *(Case(group="sizes", side="trl", attention=flash, loss=loss, **shape) for loss in ("liger", "plain")),
        )
    ]
    return [*engines, *kernels, *sizes]


def impossible(case: Case, dry_run: bool) -> str | None:
    """Why a case cannot run here, or None."""
    needs = {"liger": "liger_kernel", "flash_attention_2": "flash_attn"}
    for word in (case.loss, case.attention):
        if word in needs and importlib.util.find_spec(needs[word]) is None:
            return f"the package {needs[word]} is not installed"
    if case.side == "trl" and importlib.util.find_spec("trl") is None:
        return "the package trl is not installed: pip install -c constraints.txt -e .[peers]"
    if dry_run and case.attention == "flex_attention":
        return "FlexAttention has no backward pass on a CPU"
    return None


def model_config(case: Case, dry_run: bool) -> dict[str, Any]:
    """The model's config as a mapping; in a dry run with two tiny blocks."""
    base, changes = _SHAPES[case.model]
    values = json.loads((ROOT / f"configs/model/{base}.json").read_text())
    values.pop("_hub_names", None)
    return {**values, **changes, **(_TINY if dry_run else {})}
