"""The work all sides of ``make bench-train`` do: one epoch over the same tokens of the same rows.

Our own data module tokenizes the rows; the peers get its tokens and labels, so that every side learns the same ones.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml
from jargon import jargon_rows
from record import ROOT
from workload import SEED, smollm2_folder, training

MAX_LENGTH = 512


def make_work(folder: Path, num_rows: int, rows_per_step: int, micro_rows: int, micro_packs: int) -> dict[str, Any]:
    """Write ``rows.jsonl``, ``tokens.json``, ``work.json`` and the recipes.

    Args:
        folder: Does not exist yet.
        num_rows: Rows of the epoch.
        rows_per_step: Rows per optimizer step; packed sides take as many packs as hold about so many rows.
        micro_rows: Rows per forward pass of the padded sides.
        micro_packs: Packs per forward pass of TRL; ours takes one, and adds up gradients over as many as a step has.

    Returns:
        What ``work.json`` holds: model folder and batch sizes.
    """
    folder.mkdir()
    rows = jargon_rows(ROOT / "runs" / "bench" / "jargon")
    random.Random(SEED).shuffle(rows)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:num_rows]), encoding="utf-8")
    data = {"train": str(folder / "rows.jsonl"), "max_seq_length": MAX_LENGTH, "num_tokenizers": 1}
    data["cache_dir"] = str(folder / "cache")
    model = smollm2_folder()
    samples = tokenized(data, model)
    (folder / "tokens.json").write_text(json.dumps(samples))
    lengths = [len(row["input_ids"]) for row in samples]
    packs = round(rows_per_step * sum(lengths) / len(lengths) / MAX_LENGTH / micro_packs) * micro_packs
    padded = sum(
        max(lengths[at : at + micro_rows]) * len(lengths[at : at + micro_rows])
        for at in range(0, len(lengths), micro_rows)
    )
    work = {"model": str(model), "micro_rows": micro_rows, "micro_packs": micro_packs}
    work |= {"rows_per_step": rows_per_step, "packs_per_step": max(micro_packs, packs)}
    work["padded_fill"] = sum(lengths) / padded  # share of positions that hold a token when rows are padded
    (folder / "work.json").write_text(json.dumps(work))
    options = training(
        str(model), {"engine": "single", "precision": "auto"}, devices=1, max_epochs=1, log_every_n_steps=1
    )
    for name, what, micro in (("padded", "rows", micro_rows), ("packed", "packs", 1)):
        sizes = {"global_batch_size": work[f"{what}_per_step"], "micro_batch_size": micro, "packing": name == "packed"}
        (folder / f"recipe-{name}.yaml").write_text(yaml.safe_dump({**options, "data": {**data, **sizes}}))
    return work


def tokenized(data: dict[str, Any], model: Path) -> list[dict[str, list[int]]]:
    """Token ids and labels of every sample."""
    from transformers import AutoTokenizer

    from lit_fsdp import CausalLMDataModule

    module = CausalLMDataModule(**data)
    module.attach(AutoTokenizer.from_pretrained(model), SEED)
    samples = module.prepare(("train",))["train"]
    found = [samples.rows.row(int(row)) for row in samples.row_ids]
    return [
        {"input_ids": i.tolist(), "labels": [int(n) if s else -100 for n, s in zip(i, m, strict=True)]}
        for i, m in found
    ]
