"""The table of choices: which combinations are run, what they must agree with, and how closely.

``python -m tests.dist.matrix`` runs every cell and writes the table into the manual; test_matrix.py holds both against
each other. Cells are chosen by greedy all-pairs covering (the method of AETG: Cohen et al., 1997): each step takes, out
of all combinations that the factory accepts, the one with the most pairs of values not seen yet.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_fsdp.config.parser import strategy_config
from lit_fsdp.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "verification.md"
BEGIN, END = "<!-- table of choices: begin -->", "<!-- table of choices: end -->"
COLUMNS: dict[str, dict[str, Any]] = {
    "engine": {"fsdp2": "fsdp2", "fsdp1": "fsdp1"},
    "sharding": {
        name: name for name in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
    },
    "wrap": {
        "auto": "auto",
        "classes": ["LlamaDecoderLayer"],
        "patterns": ["model.model.layers.*.mlp", "model.model.layers.*.self_attn"],
        "min_num_params": {"min_num_params": 9000, "max_root_share": 0.6},
    },
    "activation_checkpointing": {
        "none": "none",
        "full": "full",
        "every_n": "every_n",
        "selective": "selective",
        "full, offloaded": {"mode": "full", "offload_activations": True},
    },
    "precision": {name: name for name in ("mixed", "low_precision", "fp32", "fp16_mixed", "fp8")},
    "cpu_offload": {"no": False, "yes": True},
}
# Largest relative difference of any of ten losses from the fp32 loop in one process. For fp32 only the order of
# summation differs; the others round activations (and low_precision the weights, by half a unit in the 8th bit).
TOLERANCE = {"fp32": 1e-5, "fp16_mixed": 1e-3, "mixed": 5e-3, "low_precision": 5e-2}
Cell = dict[str, str]


def cells() -> list[Cell]:
    """On each engine every pair of values that it accepts, in few combinations; ddp and single at the end."""
    names = list(COLUMNS)
    possible = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*COLUMNS.values())
        if _is_accepted(dict(zip(names, values, strict=True)))
    ]
    covered: set[Any] = set()
    chosen: list[Cell] = []
    for candidates in ([c for c in possible if not needs_gpu(c)], [c for c in possible if needs_gpu(c)]):
        chosen += cover(candidates, _pairs, covered)
    whole = [
        dict(zip(names, (engine, "no_shard", "auto", "full", precision, "no"), strict=True))
        for engine in ("ddp", "single")
        for precision in TOLERANCE
    ]
    return sorted(chosen, key=lambda cell: (needs_gpu(cell), cell["engine"] != "fsdp2")) + whole


def cover(candidates: list[Any], pairs: Callable[[Any], set[Any]], covered: set[Any]) -> list[Any]:
    """Few candidates that together have every pair that any of them has, beside those in ``covered``, which grows."""
    chosen = []
    missing = set().union(*(pairs(candidate) for candidate in candidates)) - covered
    while missing:
        best = max(candidates, key=lambda candidate: len(pairs(candidate) & missing))
        missing -= pairs(best)
        covered |= pairs(best)
        chosen.append(best)
    return chosen


def needs_gpu(cell: Cell) -> bool:
    """FSDP1's offload and fp8 have no CPU kernels."""
    return cell["precision"] == "fp8" or (cell["engine"] == "fsdp1" and cell["cpu_offload"] == "yes")


def num_ranks(cell: Cell) -> int:
    """Two copies of two shards for hybrid sharding."""
    return 4 if cell["sharding"].startswith("hybrid") else 1 if cell["engine"] == "single" else 2


def strategy_options(cell: Cell) -> dict[str, Any]:
    """The factory's arguments of a cell."""
    options = {name: COLUMNS[name].get(value, value) for name, value in cell.items()}
    return {**options, "replicate_degree": 2} if num_ranks(cell) == 4 else options


def worst_difference(losses: list[float], wanted: list[float]) -> float:
    """Largest relative difference of two runs of the same length."""
    assert len(losses) == len(wanted) == 10
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


def rows_of_the_manual() -> list[dict[str, str]]:
    """The table as it stands in the manual."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [line for line in text.partition(BEGIN)[2].partition(END)[0].splitlines() if line.startswith("|")]
    head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in body]


def _is_accepted(cell: Cell) -> bool:
    try:
        strategy_config(strategy_options(cell))
    except ConfigError:
        return False
    return True


def _pairs(cell: Cell) -> set[Any]:
    """Pairs of values beside the engine, on that engine."""
    values = [item for item in cell.items() if item[0] != "engine"]
    return {(cell["engine"], *pair) for pair in itertools.combinations(values, 2)}


def _write_table() -> None:
    import tempfile

    import torch
    from transformers import LlamaForCausalLM

    from lit_fsdp.models.tokenizers import miniature_tokenizer
    from tests.dist.reference import TINY, reference_losses
    from tests.dist.workers import Workers

    workers = Workers()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(TINY).save_pretrained(folder)
        miniature_tokenizer().save_pretrained(folder)
        wanted = reference_losses(folder)
        lines = [f"| {' | '.join([*COLUMNS, 'ranks', 'difference', 'tolerance'])} |", "|" + "---|" * (len(COLUMNS) + 3)]
        for cell in cells():
            found = ["-", "GPU only", "-"]
            if not needs_gpu(cell):
                results = workers.run("train", num_ranks(cell), folder=folder, strategy=strategy_options(cell))
                difference = worst_difference(results[0]["losses"], wanted)
                found = [str(num_ranks(cell)), f"{difference:.1e}", f"{TOLERANCE[cell['precision']]:.0e}"]
            lines.append(f"| {' | '.join([*cell.values(), *found])} |")
            print(lines[-1], file=sys.stderr, flush=True)
    workers.close()
    table = "\n".join([BEGIN, *lines, END])
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    _write_table()
