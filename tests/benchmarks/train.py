"""``make bench-train``: lit_fsdp beside TRL's SFTTrainer and the Transformers Trainer, interleaved.

    python tests/benchmarks/train.py [--sides ours-packed trl-packed] [--repeats 3] [--rows 96] [--length 512] [--lora]

SmolLM2-135M on definitions of the Jargon File (variable length, at most 512 tokens), one process, fp32 weights, bf16
autocast where the CPU has instructions for it, fused AdamW, no recomputation. Every side trains one epoch over the same
tokens of the same rows, each in processes of its own, in turns. The first two optimizer steps are not counted. With
``--lora`` all linear layers get adapters of rank 16, and the base is kept as each side keeps it by default.

- ``ours-padded``, ``trl-padded``, ``trainer-padded``: batches of rows padded to the longest
- ``ours-packed``: packs of 512 (``--length``) tokens by best-fit decreasing, one per forward pass
- ``trl-packed``, ``trl-packed-1``: TRL's packs, without padding; three and one per forward pass, whichever is faster

Speed is supervised tokens per second, memory the largest resident set after the first step. Losses are means over the
supervised tokens of the epoch: sides differ in the order of the rows, which moves them a little.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from record import bench, compared, in_turns, python
from work import SEED, data_module, fit, jargon_rows, save_rows, smollm2_folder, write_recipe

WARMUP_STEPS = 2
ROWS_PER_STEP, MICRO_PACKS = 8, 3
SIDES = ("ours-packed", "trl-packed", "trl-packed-1", "ours-padded", "trl-padded", "trainer-padded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="what to run (default all)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all sides (default 3)")
    parser.add_argument("--rows", type=int, default=96, help="rows of the epoch (default 96)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a pack, and most of a row (default 512)")
    parser.add_argument("--lora", action="store_true", help="adapters instead of all weights")
    options = parser.parse_args()
    with bench("train", "trl", "accelerate", "peft") as (record, folder):
        make_work(folder, options.rows, options.length, options.lora)
        sides = {side: lambda side=side: one_side(folder, side) for side in options.sides}
        runs = in_turns(sides, options.repeats)
        supervised = {side: sum(found[0]["supervised"]) for side, found in runs.items()}
        if len(set(supervised.values())) != 1:
            raise RuntimeError(f"sides trained on different numbers of tokens: {supervised}")
        how = f"{'LoRA' if options.lora else 'SFT'} of SmolLM2-135M on dict-jargon, {options.length} tokens"
        for side, found in runs.items():
            record["results"].append({"what": f"{how}, {side}", "summary": summary(found), "runs": found})
        record["results"] += ratios(runs)


def make_work(folder: Path, num_rows: int, length: int, lora: bool) -> None:
    """Rows and recipes for us; for the peers the tokens that our data module makes of the same rows."""
    rows = jargon_rows()
    random.Random(SEED).shuffle(rows)
    data = {"train": str(save_rows(folder / "rows.jsonl", rows[:num_rows])), "max_seq_length": length}
    model = smollm2_folder()
    _, samples = data_module(model, {**data, "num_tokenizers": 1, "cache_dir": str(folder / "cache")})
    tokens = [
        {"input_ids": ids.tolist(), "labels": [int(i) if s else -100 for i, s in zip(ids, mask, strict=True)]}
        for ids, mask in (samples.rows.row(int(row)) for row in samples.row_ids)
    ]
    mean = sum(len(row["input_ids"]) for row in tokens) / len(tokens)
    packs = max(1, round(ROWS_PER_STEP * mean / length / MICRO_PACKS)) * MICRO_PACKS
    work = {"model": str(model), "tokens": tokens, "packs_per_step": packs, "length": length, "lora": lora}
    (folder / "work.json").write_text(json.dumps(work))
    adapters = {"lora": {"r": 16, "alpha": 32.0, "target_modules": "all-linear"}} if lora else {}
    for name, per_step, micro in (("padded", ROWS_PER_STEP, ROWS_PER_STEP), ("packed", packs, 1)):
        sizes = {"global_batch_size": per_step, "micro_batch_size": micro, "packing": name == "packed"}
        options = {"devices": 1, "max_epochs": 1, "log_every_n_steps": 1}
        write_recipe(folder / f"ours-{name}.yaml", model, {"engine": "single"}, {**data, **sizes}, adapters, **options)


def one_side(folder: Path, side: str) -> dict[str, Any]:
    """Times, losses and supervised tokens per optimizer step, and the peak, of one epoch."""
    if side.startswith("ours-"):
        return fit(folder / f"{side}.yaml")
    python([Path(__file__).with_name("train_peer.py"), folder, side])
    return json.loads((folder / "record.json").read_text())


def speed(run: dict[str, Any]) -> float:
    """Supervised tokens per second after the warm-up."""
    return sum(run["supervised"][WARMUP_STEPS:]) / (run["times"][-1] - run["times"][WARMUP_STEPS - 1])


def summary(runs: list[dict[str, Any]]) -> str:
    """Medians over the runs of a side, and the mean loss over the supervised tokens of the first."""
    losses, counts = runs[0]["losses"], runs[0]["supervised"]
    loss = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    peak = statistics.median(run["peak_bytes"] for run in runs) / 2**30
    rate = statistics.median(speed(run) for run in runs)
    return f"{rate:.0f} supervised tokens/s, peak {peak:.2f} GiB, mean loss {loss:.3f}"


def ratios(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Ours packed ÷ the peers', round by round, as medians."""
    found, ours = [], runs.get("ours-packed", [])
    trl = [runs[side] for side in SIDES if side.startswith("trl-") and side in runs]
    best = [max(same_round, key=speed) for same_round in zip(*trl, strict=True)]
    for what, peer, aim in (("TRL's best", best, ">= 1.5"), ("padded Trainer", runs.get("trainer-padded", []), "")):
        if ours and peer:
            rates = [[speed(run) for run in side] for side in (ours, peer)]
            peaks = [[run["peak_bytes"] / 2**30 for run in side] for side in (ours, peer)]
            found.append(compared(f"speed, ours packed ÷ {what}", *rates, unit="tokens/s", aim=aim))
            found.append(compared(f"peak memory, ours packed ÷ {what}", *peaks, unit="GiB", aim="<= 0.8"))
    return found


if __name__ == "__main__":
    main()
