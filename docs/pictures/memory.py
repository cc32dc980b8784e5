"""GiB per GPU of Llama-3.1-8B on 8 GPUs by sharding strategy, from shapes; python docs/pictures/memory.py.

The sums are those at the head of recipes/llama3.1-8b_full_fsdp2_8x80gb.yaml, with another sharding.
"""

from __future__ import annotations

from drawing import BLUE, GREEN, GREY, ORANGE, RED, ROOT, VIOLET, figure, save


def main() -> None:
    """One bar per strategy."""
    from lit_fsdp.models.build import num_parameters
    from tests.configs.arithmetic import GIB, checked, gib_per_rank, meta_model

    run = checked(ROOT / "recipes/llama3.1-8b_full_fsdp2_8x80gb.yaml")
    model = meta_model(str(run.model.name))
    params, terms = num_parameters(model), gib_per_rank(run, model)
    transient = terms["unit"] + terms["inputs"] + terms["head"] + terms["logits"]
    ways = {  # ranks that share one copy, and whether weights stay gathered in bf16 from forward to backward
        "no_shard, ddp": (1, False),
        "hybrid_shard_zero2, 2 × 4": (4, True),
        "hybrid_shard, 2 × 4": (4, False),
        "shard_grad_op": (8, True),
        "full_shard": (8, False),
        "full_shard, cpu_offload": (None, False),
    }
    kinds = (("weights, fp32", 4, BLUE), ("gradients, fp32", 4, ORANGE), ("AdamW, fp32", 8, GREEN))
    drawn, axes = figure(7.4, 3.0)
    for place, (ranks, gathered) in enumerate(ways.values()):
        parts = [(name, size * params / ranks / GIB if ranks else 0.0, color) for name, size, color in kinds]
        parts.append(("weights while gathered, bf16", 2 * params / GIB if gathered else 0.0, VIOLET))
        parts.append(("largest unit, block inputs, head, logits", transient, GREY))
        left = 0.0
        for name, gib, color in parts:
            axes.barh(place, gib, left=left, color=color, label=name if place == 0 else None)
            left += gib
        axes.text(left + 1, place, f"{left:.0f}", va="center")
    axes.axvline(80e9 / GIB, color=RED, linestyle="--")
    axes.text(80e9 / GIB + 1, 5, "80 GB", color=RED, va="center")
    axes.set_yticks(range(len(ways)), list(ways))
    axes.invert_yaxis()
    axes.set(xlabel="GiB per GPU, by arithmetic", xlim=(0, 140))
    axes.legend(loc="lower left", fontsize=8, bbox_to_anchor=(0.54, 0.1))
    save(drawn, "memory")


if __name__ == "__main__":
    main()
