"""The table of choices: which combinations are run, what they must agree with, and how closely.

``python -m tests.dist.matrix`` runs every cell and writes the table into the manual. The cells are chosen so that every
value meets every engine, and, but for some pairs of sharding and activation checkpointing, every other value. What has
no CPU kernels, fp8 and the offload of fsdp1, is in ``tests/gpu``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from tests.dist.forks import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"
BEGIN, END = "<!-- table of choices: begin -->", "<!-- table of choices: end -->"
COLUMNS = "engine sharding wrap activation_checkpointing precision cpu_offload accumulation ranks".split()
_LINES = [
    line.split()
    for line in """
        fsdp2   full_shard          classes         none          fp32           yes  3  2
        fsdp2   full_shard          patterns        selective     fp16_mixed     no   3  2
        fsdp2   shard_grad_op       patterns        full          fp32           yes  3  2  long
        fsdp2   shard_grad_op       auto            every_n       mixed          yes  3  2
        fsdp2   shard_grad_op       min_num_params  selective     low_precision  no   1  2  long
        fsdp2   no_shard            auto            full+offload  low_precision  yes  1  2
        fsdp2   hybrid_shard        min_num_params  full          fp16_mixed     yes  3  4
        fsdp2   hybrid_shard_zero2  auto            selective     fp32           yes  1  4
        fsdp1   full_shard          auto            full          mixed          no   1  2
        fsdp1   full_shard          min_num_params  every_n       low_precision  no   1  2
        fsdp1   full_shard          auto            full          fp32           no   1  1
        fsdp1   shard_grad_op       classes         full+offload  fp16_mixed     no   1  2
        fsdp1   no_shard            min_num_params  full+offload  fp32           no   3  2  long
        fsdp1   no_shard            classes         selective     mixed          no   1  2
        fsdp1   no_shard            patterns        none          fp16_mixed     no   1  2  long
        fsdp1   hybrid_shard        classes         every_n       fp32           no   3  4
        fsdp1   hybrid_shard        patterns        full+offload  mixed          no   1  4  long
        fsdp1   hybrid_shard        auto            none          low_precision  no   3  4
        fsdp1   hybrid_shard_zero2  min_num_params  none          mixed          no   1  4  long
        fsdp1   hybrid_shard_zero2  classes         full          low_precision  no   1  4  long
        fsdp1   hybrid_shard_zero2  patterns        every_n       fp16_mixed     no   3  4
        ddp     no_shard            auto            none          fp32           no   3  2
        ddp     no_shard            auto            full          low_precision  no   1  2
        ddp     no_shard            auto            none          mixed          no   1  2
        single  no_shard            auto            full          fp16_mixed     no   1  1
        single  no_shard            auto            none          mixed          no   1  1
    """.strip().splitlines()
]
CELLS = [dict(zip(COLUMNS, words, strict=False)) for words in _LINES]
LONG = [words[-1] == "long" for words in _LINES]
"""Those whose values every engine has met in other cells."""
_VALUES: dict[str, Any] = {
    "classes": ["LlamaDecoderLayer"],
    "patterns": ["model.model.layers.*.mlp", "model.model.layers.*.self_attn"],
    "min_num_params": {"min_num_params": 9000, "max_root_share": 0.6},
    "full+offload": {"mode": "full", "offload_activations": True},
    "no": False,
    "yes": True,
}
# Largest relative difference of any of ten losses from the fp32 loop in one process. For fp32 only the order of
# summation differs; the others round activations (and low_precision the weights, by half a unit in the 8th bit).
TOLERANCE = {"fp32": 1e-5, "fp16_mixed": 1e-3, "mixed": 5e-3, "low_precision": 5e-2}


def run_cell(cell: dict[str, str], folder: Path) -> list[dict[str, Any]]:
    """What each rank finds in ten steps."""
    strategy = {name: _VALUES.get(cell[name], cell[name]) for name in COLUMNS[:6]}
    if cell["sharding"].startswith("hybrid"):
        strategy["replicate_degree"] = 2
    accumulation = {"accumulate_grad_batches": int(cell["accumulation"])}
    return on_ranks("train", int(cell["ranks"]), folder=str(folder), strategy=strategy, **accumulation)


def worst_difference(losses: list[float], wanted: list[float]) -> float:
    """Largest relative difference of two runs of the same length."""
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


def rows_of_the_manual() -> list[dict[str, str]]:
    """The table as it stands in the manual."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in body]


def _write_table() -> None:
    import tempfile

    from tests.dist.reference import TINY, reference_losses, save_tiny

    lines = [f"| {' | '.join([*COLUMNS, 'difference', 'tolerance'])} |", "|" + "---|" * (len(COLUMNS) + 2)]
    with tempfile.TemporaryDirectory() as folder:
        wanted = reference_losses(str(save_tiny(Path(folder), TINY)))
        for cell in CELLS:
            difference = worst_difference(run_cell(cell, Path(folder))[0]["losses"], wanted)
            found = [f"{difference:.1e}", f"{TOLERANCE[cell['precision']]:.0e}"]
            lines.append(f"| {' | '.join([*cell.values(), *found])} |")
            print(lines[-1], file=sys.stderr, flush=True)
    table, text = "\n".join([BEGIN, *lines, END]), PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    _write_table()
