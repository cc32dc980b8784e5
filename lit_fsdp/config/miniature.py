"""What trying a recipe out in miniature replaces beyond the values of the fragment itself."""

from __future__ import annotations

from typing import Any

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
        devices = trainer.get("devices")
        copies = args.get("replicate_degree")
        if args.get("sharding") == "hybrid_shard" and isinstance(devices, int) and (not copies or devices % copies):
            replace(args, path, "replicate_degree", min(2, devices), f"{devices} ranks on one node")
        wrap = args.get("wrap")
        if isinstance(wrap, dict) and (wrap.get("min_num_params") or 0) > _SMALL_UNIT:
            replace(wrap, f"{path}.wrap", "min_num_params", _SMALL_UNIT, "the miniature is small")
    optim = model.get("optim")
    steps = trainer.get("max_steps")
    if isinstance(optim, dict) and isinstance(steps, int) and (optim.get("warmup_steps") or 0) > steps:
        replace(optim, "model.optim", "warmup_steps", 1, f"{steps} steps")
    return said
