"""GiB per GPU of Llama-3.1-8B on 8 GPUs by sharding strategy, as the planner has it; python docs/pictures/memory.py."""

from __future__ import annotations

from drawing import BLUE, GREEN, GREY, ORANGE, RED, ROOT, figure, save

GIB = 2**30
WAYS = {  # arguments of the strategy
    "no_shard, ddp": ["sharding=no_shard"],
    "hybrid_shard_zero2, 2 × 4": ["sharding=hybrid_shard_zero2", "replicate_degree=2"],
    "hybrid_shard, 2 × 4": ["sharding=hybrid_shard", "replicate_degree=2"],
    "shard_grad_op": ["sharding=shard_grad_op"],
    "full_shard": ["sharding=full_shard"],
    "full_shard, cpu_offload": ["cpu_offload=true"],
}


def main() -> None:
    """One bar per strategy."""
    from lit_fsdp.config.parser import load_recipe
    from lit_fsdp.plan.memory import rank_memory

    drawn, axes = figure(7.4, 3.0)
    for place, flags in enumerate(WAYS.values()):
        words = [f"--trainer.strategy.init_args.{flag}" for flag in flags]
        recipe = ROOT / "recipes/llama3.1-8b_full_fsdp2_8x80gb.yaml"
        found = rank_memory(load_recipe(["--config", str(recipe), *words], "fit").run)
        on_device = 0 if found.offloads else 1
        parts = [
            ("weights", on_device * found.parameters, BLUE),
            ("AdamW", on_device * found.optimizer, ORANGE),
            ("gradients", on_device * found.step.gradients, GREEN),
            ("gathered, activations, head, logits", found.step.total - found.step.gradients, GREY),
        ]
        left = 0.0
        for name, num_bytes, color in parts:
            axes.barh(place, num_bytes / GIB, left=left, color=color, label=name if place == 0 else None)
            left += num_bytes / GIB
        axes.text(left + 1, place, f"{left:.0f}", va="center")
    axes.axvline(80e9 / GIB, color=RED, linestyle="--")
    axes.text(80e9 / GIB + 1, 5, "80 GB", color=RED, va="center")
    axes.set_yticks(range(len(WAYS)), list(WAYS))
    axes.invert_yaxis()
    axes.set(xlabel="GiB per GPU at the highest moment, planned", xlim=(0, 140))
    axes.legend(loc="lower left", fontsize=8, bbox_to_anchor=(0.54, 0.1))
    save(drawn, "memory")


if __name__ == "__main__":
    main()
