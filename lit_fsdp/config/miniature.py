"""Replacements that adapt a recipe to a miniature trial run, beyond the values of the YAML fragment."""

import math
import os
from typing import Any

from lit_fsdp.config.model import GPU_ATTENTION
from lit_fsdp.config.run import STRATEGY
from lit_fsdp.config.strategy import wrap_from_words

_SMALL_UNIT = 1.0e4


def adapt_to_miniature(trainer: Any, strategy: Any, model: Any, data: Any) -> list[str]:
    """Replace in place what a miniature on a few CPU ranks cannot use, and return one line per replacement.

    All arguments are namespaces; pass None for a third-party strategy or data module.
    """
    replaced: list[str] = []

    def replace(section: Any, path: str, key: str, new: Any, why: str) -> None:
        if section[key] != new:
            replaced.append(f"{path}.{key}: {section[key]!r} → {new!r} ({why})")
            section[key] = new

    on_cpu, devices = trainer.accelerator == "cpu", trainer.devices
    if data is not None and data.global_batch_size is not None:
        replace(trainer, "trainer", "accumulate_grad_batches", None, "computed from the batch sizes and ranks")
    if strategy is not None:
        for key, new, why in _fitting_degrees(strategy, devices if isinstance(devices, int) else 0):
            replace(strategy, STRATEGY, key, new, why)
        is_hybrid = "hybrid" in strategy.sharding
        copies = max(1, strategy.replicate_degree or 1) if is_hybrid else 1
        shards, why = devices // copies if isinstance(devices, int) else 0, f"{devices} ranks on one node"
        given = strategy.context_parallel
        degree = given if isinstance(given, int) else given["degree"]
        if degree > 1 and shards % degree:
            fits = math.gcd(degree, shards)
            new = fits if isinstance(given, int) else {**dict(given), "degree": fits}
            replace(strategy, STRATEGY, "context_parallel", new, why)
        if strategy.expert_parallel > 1 and shards % strategy.expert_parallel:
            replace(strategy, STRATEGY, "expert_parallel", math.gcd(strategy.expert_parallel, shards), why)
        if strategy.engine == "single":
            replace(trainer, "trainer", "devices", 1, "engine single")
        if on_cpu and strategy.engine == "fsdp1":
            replace(strategy, STRATEGY, "cpu_offload", False, "engine fsdp1 offloads from GPUs only")
        if on_cpu and "nccl" in str(strategy.process_group_backend):
            replace(strategy, STRATEGY, "process_group_backend", None, "the CPU backend is gloo")
        mode = strategy.precision if isinstance(strategy.precision, str) else strategy.precision["mode"]
        if on_cpu and mode == "fp8":
            kept = {} if isinstance(strategy.precision, str) else {**dict(strategy.precision), "fp8_skip": None}
            new = {**kept, "mode": "auto"} if kept else "auto"
            replace(strategy, STRATEGY, "precision", new, "fp8 needs a Hopper GPU")
        wrap = strategy.wrap
        if not isinstance(wrap, (str, list)) and (wrap["min_num_params"] or 0) > _SMALL_UNIT:
            replace(wrap, f"{STRATEGY}.wrap", "min_num_params", _SMALL_UNIT, "the miniature is small")
        if isinstance(model.name, str) and os.path.isdir(model.name):  # its tokenizer and embedding are kept
            replace(strategy, STRATEGY, "wrap", _with_large_root(wrap), "the miniature keeps the full vocabulary")
    if on_cpu and model.attn_implementation in GPU_ATTENTION:
        why = f"{model.attn_implementation} trains on GPUs only"
        replace(model, "model", "attn_implementation", None, why)
    if on_cpu and model.loss.backend == "liger":
        replace(model.loss, "model.loss", "backend", "chunked", f"{model.loss.backend} needs a GPU")
    if 0 < trainer.max_steps < model.optim.warmup_steps:
        replace(model.optim, "model.optim", "warmup_steps", 1, f"{trainer.max_steps} steps")
    return replaced


def _fitting_degrees(strategy: Any, devices: int) -> list[tuple[str, Any, str]]:
    """Reduce degrees meant for more ranks to those of one node."""
    copies, shards, why = strategy.replicate_degree or 0, strategy.shard_degree or 0, f"{devices} ranks on one node"
    if not devices:
        return []
    if strategy.sharding not in ("hybrid_shard", "hybrid_shard_zero2"):
        return [("shard_degree", -1, why)] if shards > 1 and shards != devices else []
    found: list[tuple[str, Any, str]] = []
    if shards > 0 and (devices % shards or (copies > 0 and copies * shards != devices)):
        found.append(("shard_degree", -1, why))
        shards = 0
    if (copies == 0 and shards == 0) or (copies > 0 and devices % copies):
        found.append(("replicate_degree", min(2, devices), why))
    return found


def _with_large_root(wrap: Any) -> dict[str, Any]:
    if isinstance(wrap, list):
        words = wrap_from_words(wrap)
        wrap = {"classes": words.classes, "patterns": words.patterns}
    elif isinstance(wrap, str):
        wrap = {"manual": wrap == "manual"}
    return {**dict(wrap), "max_root_share": 1.0}
