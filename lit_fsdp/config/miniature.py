"""What trying a recipe out in miniature replaces beyond the values of the fragment itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from lit_fsdp.config.model import GPU_ATTENTION
from lit_fsdp.config.wrap import wrap_from_words

_SMALL_UNIT = 1.0e4


def adapt_to_miniature(values: dict[str, Any], replaced: list[str]) -> list[str]:
    """Replace what a miniature on a few CPU ranks cannot keep, in place, and say so.

    Args:
        values: The merged recipe; untouched unless ``model.miniature`` is true.
        replaced: What files replaced already, one line each.

    Returns:
        All replacements, one line each; empty unless ``model.miniature`` is true.
    """
    model, trainer = values.get("model"), values.get("trainer")
    if not (isinstance(model, dict) and model.get("miniature") is True) or not isinstance(trainer, dict):
        return []
    said = list(replaced)

    def replace(section: dict[str, Any], path: str, key: str, new: Any, why: str) -> None:
        said.append(f"{path}.{key}: {section.get(key)!r} → {new!r} ({why})")
        section[key] = new

    if trainer.get("accumulate_grad_batches") is not None:
        replace(trainer, "trainer", "accumulate_grad_batches", None, "follows from the batch sizes and ranks")
    strategy = trainer.get("strategy")
    args = strategy.get("init_args") if isinstance(strategy, dict) else None
    if isinstance(args, dict):
        path = "trainer.strategy.init_args"
        devices: Any = trainer.get("devices")
        if _number(devices):
            _fit_degrees(args, devices, lambda key, new, why: replace(args, path, key, new, why))
        if args.get("engine") == "single" and devices != 1:
            replace(trainer, "trainer", "devices", 1, "engine single")
        if trainer.get("accelerator") == "cpu":
            _fit_cpu(args, lambda key, new, why: replace(args, path, key, new, why))
        if isinstance(model.get("name"), str) and os.path.exists(model["name"]):
            _keep_vocabulary(args, lambda key, new, why: replace(args, path, key, new, why))
        wrap = args.get("wrap")
        if isinstance(wrap, dict) and _number(wrap.get("min_num_params")) > _SMALL_UNIT:
            replace(wrap, f"{path}.wrap", "min_num_params", _SMALL_UNIT, "the miniature is small")
    attention = model.get("attn_implementation")
    if trainer.get("accelerator") == "cpu" and attention in GPU_ATTENTION:
        replace(model, "model", "attn_implementation", None, f"{attention} is trained with on GPUs only")
    loss = model.get("loss")
    if trainer.get("accelerator") == "cpu" and isinstance(loss, dict) and loss.get("backend") in ("liger", "cce"):
        replace(loss, "model.loss", "backend", "chunked", f"{loss['backend']} needs a GPU")
    optim = model.get("optim")
    steps = trainer.get("max_steps")
    if isinstance(optim, dict) and _number(steps) and _number(optim.get("warmup_steps")) > steps:
        replace(optim, "model.optim", "warmup_steps", 1, f"{steps} steps")
    return said


def _fit_degrees(args: dict[str, Any], devices: int, replace: Callable[[str, Any, str], None]) -> None:
    """Degrees that were meant for more ranks, on the few of one node."""
    copies, shards = _number(args.get("replicate_degree")), _number(args.get("shard_degree"))
    why = f"{devices} ranks on one node"
    if args.get("sharding") in ("hybrid_shard", "hybrid_shard_zero2"):
        if shards > 0 and (devices % shards or (copies > 0 and copies * shards != devices)):
            replace("shard_degree", -1, why)
            shards = 0
        if (copies == 0 and shards == 0) or (copies > 0 and devices % copies):
            replace("replicate_degree", min(2, devices), why)
    elif shards > 1 and shards != devices:
        replace("shard_degree", -1, why)


def _keep_vocabulary(args: dict[str, Any], replace: Callable[[str, Any, str], None]) -> None:
    """A model on disk keeps its tokenizer, whose embedding is nearly all of a miniature and stays in the root."""
    wrap = args.get("wrap")
    if isinstance(wrap, list):
        words = wrap_from_words([str(word) for word in wrap])
        wrap = {key: names for key, names in (("classes", words.classes), ("patterns", words.patterns)) if names}
    elif wrap == "manual":
        wrap = {"manual": True}
    elif not isinstance(wrap, dict):
        wrap = {}
    replace("wrap", {**wrap, "max_root_share": 1.0}, "the miniature keeps the whole vocabulary")


def _fit_cpu(args: dict[str, Any], replace: Callable[[str, Any, str], None]) -> None:
    """What needs a GPU, replaced by what a CPU has."""
    if args.get("engine") == "fsdp1" and args.get("cpu_offload") is True:
        replace("cpu_offload", False, "engine fsdp1 offloads from GPUs only")
    if "nccl" in str(args.get("process_group_backend")):
        replace("process_group_backend", None, "the CPU has gloo")
    precision = args.get("precision")
    if precision == "fp8":
        replace("precision", "auto", "fp8 needs a Hopper GPU")
    elif isinstance(precision, dict) and precision.get("mode") == "fp8":
        kept = {key: value for key, value in precision.items() if key != "fp8_skip"}
        replace("precision", {**kept, "mode": "auto"}, "fp8 needs a Hopper GPU")


def _number(value: Any) -> Any:
    """``value`` if it is one; what is none is refused where the recipe is checked."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0
