"""``make bench-train``: lit_fsdp beside TRL, the Transformers Trainer and LitGPT, interleaved.

    python tests/benchmarks/train.py [--sides ours-packed trl-packed] [--repeats 3] [--rows 96] [--length 512] [--lora]

SmolLM2-135M on definitions of the Jargon File (variable length, at most 512 tokens), one process, fp32 weights, bf16
autocast where the CPU has instructions for it, fused AdamW, no recomputation. Every side trains one epoch over the same
tokens of the same rows, each in processes of its own, in turns. The first two optimizer steps are not counted. With
``--lora`` all linear layers get adapters of rank 16, and the base is kept as each side keeps it by default. Only sides
of one kind can be compared:

- ``ours-padded``, ``trl-padded``, ``trainer-padded``: batches of rows padded to the longest
- ``ours-packed``: packs of 512 (``--length``) tokens by best-fit decreasing, one per forward pass
- ``trl-packed``, ``trl-packed-1``: TRL's packs, without padding; three and one per forward pass, whichever is faster
- ``litgpt-padded``: one row per forward pass, which is LitGPT's default; it has no packs
- ``ours-long``, ``trl-long``: rows of ``--length`` tokens each, one per step, with recomputation
- ``ours-dpo``, ``trl-dpo``, ``trl-dpo-precomputed``: pairs, four per step, whose prompts quote another definition; ours
  compares with a reference that was computed beforehand, TRL in every step or beforehand

Speed is supervised tokens per second, memory the largest resident set after the first step. The start is in CPU seconds
of the process, with rows that are tokenized. Losses are means over the supervised tokens of the epoch (DPO: over its
steps): sides differ in the order of the rows, which moves them a little.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from record import bench, compared, in_turns, python
from work import LORA, SEED, chat, data_module, fit, jargon_rows, save_rows, smollm2_folder, write_recipe

WARMUP_STEPS = 2
ROWS_PER_STEP, MICRO_PACKS = 8, 3
PAIRS_PER_STEP = 4
SIDES = ("ours-packed", "trl-packed", "trl-packed-1", "ours-padded", "trl-padded", "trainer-padded", "litgpt-padded")
LONG, DPO = ("ours-long", "trl-long"), ("ours-dpo", "trl-dpo", "trl-dpo-precomputed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    choices = (*SIDES, *LONG, *DPO)
    parser.add_argument("--sides", nargs="+", choices=choices, default=SIDES, help="what to run (default SFT, all)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all sides (default 3)")
    parser.add_argument("--rows", type=int, default=96, help="rows of the epoch (default 96)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a pack, and most of a row (default 512)")
    parser.add_argument("--lora", action="store_true", help="adapters instead of all weights")
    options = parser.parse_args()
    kinds = [kind for kind in (SIDES, LONG, DPO) if set(options.sides) <= set(kind)]
    if not kinds:
        parser.error(f"--sides {' '.join(options.sides)}: sides of one kind, such as {' '.join(DPO)}")
    packages = ("trl", "accelerate", "peft", *(["litgpt"] if "litgpt-padded" in options.sides else []))
    with bench("train", *packages) as (record, folder):
        at_once = 1 if "trl-packed" not in options.sides else MICRO_PACKS
        makers = {SIDES: partial(make_work, at_once=at_once), LONG: make_long_work, DPO: make_pairs}
        makers[kinds[0]](folder, options.rows, options.length, options.lora)
        sides = {side: lambda side=side: one_side(folder, side) for side in options.sides}
        runs = in_turns(sides, options.repeats)
        supervised = {side: sum(found[0]["supervised"]) for side, found in runs.items()}
        if len(set(supervised.values())) != 1:
            raise RuntimeError(f"sides trained on different numbers of tokens: {supervised}")
        what = f"{'LoRA' if options.lora else 'full'}{', DPO' if kinds[0] is DPO else ''}"
        how = f"{what}, SmolLM2-135M on dict-jargon, {options.length} tokens"
        for side, found in runs.items():
            record["results"].append({"what": f"{how}, {side}", "summary": summary(found), "runs": found})
        record["results"] += ratios(runs)


def make_work(folder: Path, num_rows: int, length: int, lora: bool, at_once: int) -> None:
    """Rows and recipes for us; for the peers the tokens that our data module makes of the same rows.

    A step has a multiple of ``at_once`` packs.
    """
    rows = jargon_rows()
    random.Random(SEED).shuffle(rows)
    data, tokens = save_tokens(folder, rows[:num_rows], length)
    mean = sum(len(row["input_ids"]) for row in tokens) / len(tokens)
    packs = max(1, round(ROWS_PER_STEP * mean / length / at_once)) * at_once
    for name, per_step, micro in (("padded", ROWS_PER_STEP, ROWS_PER_STEP), ("packed", packs, 1)):
        sizes = {"global_batch_size": per_step, "micro_batch_size": micro, "packing": name == "packed"}
        save_recipe(folder / f"ours-{name}.yaml", {**data, **sizes}, lora)
    save_work(folder, tokens=tokens, packs_per_step=packs, length=length, lora=lora)


def make_long_work(folder: Path, num_rows: int, length: int, lora: bool) -> None:
    """Rows that are cut off at ``length`` tokens."""
    answers = [row["messages"][1]["content"] for row in jargon_rows()]
    random.Random(SEED).shuffle(answers)
    texts = ["", *(" ".join(answers[i::num_rows])[: 8 * length] for i in range(num_rows))][1:]
    data, tokens = save_tokens(folder, [chat("Quote the Jargon File.", text) for text in texts], length)
    if {len(row["input_ids"]) for row in tokens} != {length}:
        raise SystemExit(f"the Jargon File is too short for {num_rows} rows of {length} tokens: --rows")
    save_recipe(folder / "ours-long.yaml", {**data, "global_batch_size": 1, "micro_batch_size": 1}, lora, mode="full")
    save_work(folder, tokens=tokens, packs_per_step=1, length=length, lora=lora)


def make_pairs(folder: Path, num_rows: int, length: int, lora: bool) -> None:
    """Pairs of which the chosen answer is the definition that was asked for, the rejected one that of another word."""
    rows = jargon_rows()
    random.Random(SEED).shuffle(rows)
    asked, others, quoted = (rows[i * num_rows : (i + 1) * num_rows] for i in range(3))
    pairs = []
    for chosen, rejected, quote in zip(asked, others, quoted, strict=True):
        (question, answer), (_, other) = (row["messages"] for row in (chosen, rejected))
        text = f"A definition: {quote['messages'][1]['content'][:1000]}\n\n{question['content']}"
        prompt = [{"role": "user", "content": text}]
        pairs.append({"prompt": prompt, "chosen": [answer], "rejected": [other]})
    data, tokens = save_tokens(folder, pairs, length, format="preference")
    found = []
    for chosen, rejected in zip(tokens[::2], tokens[1::2], strict=True):
        start = next(i for i, label in enumerate(chosen["labels"]) if label != -100)
        sides = {"chosen_ids": chosen["input_ids"][start:], "rejected_ids": rejected["input_ids"][start:]}
        found.append({"prompt": "", "prompt_ids": chosen["input_ids"][:start], **sides})
    sizes = {"global_batch_size": PAIRS_PER_STEP, "micro_batch_size": PAIRS_PER_STEP}
    save_recipe(folder / "ours-dpo.yaml", {**data, **sizes}, lora, class_path="lit_fsdp.PreferenceModule")
    save_work(folder, tokens=found, packs_per_step=0, length=length, lora=lora)


def save_tokens(
    folder: Path, rows: list[dict[str, Any]], length: int, **data: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The ``data`` section of our recipes, and what our data module makes of the rows."""
    data |= {"train": str(save_rows(folder / "rows.jsonl", rows)), "max_seq_length": length}
    _, samples = data_module(smollm2_folder(), {**data, "num_tokenizers": 1, "cache_dir": str(folder / "cache")})
    tokens = [
        {"input_ids": ids.tolist(), "labels": [int(i) if s else -100 for i, s in zip(ids, mask, strict=True)]}
        for ids, mask in (samples.rows.row(int(row)) for row in samples.row_ids)
    ]
    return data, tokens


def save_work(folder: Path, **work: Any) -> None:
    """What the peers read."""
    (folder / "work.json").write_text(json.dumps({"model": str(smollm2_folder()), **work}))


def save_recipe(file: Path, data: dict[str, Any], lora: bool, mode: str = "none", **model: Any) -> None:
    """One epoch for us."""
    adapters = {"lora": LORA} if lora else {}
    strategy = {"engine": "single", "activation_checkpointing": {"mode": mode}}
    options = {"devices": 1, "max_epochs": 1, "log_every_n_steps": 1}
    write_recipe(file, smollm2_folder(), strategy, data, {**adapters, **model}, **options)


def one_side(folder: Path, side: str) -> dict[str, Any]:
    """Times, losses and supervised tokens per optimizer step, and the peak, of one epoch."""
    if side.startswith("ours-"):
        return fit(folder / f"{side}.yaml")
    script = "train_litgpt.py" if side.startswith("litgpt") else "train_peer.py"
    python([Path(__file__).with_name(script), folder, side])
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
    """Ours ÷ the peers', round by round, as medians; of packs beside padded rows, as each does it best."""
    found, ours = [], next((runs[side] for side in ("ours-packed", *LONG[:1], *DPO[:1]) if side in runs), [])
    groups: dict[str, list[str]] = {"TRL's best": [side for side in runs if side.startswith("trl-")]}
    groups |= {side: [side] for side in runs if side.startswith(("trainer-", "litgpt-")) or side in DPO[1:]}
    for what, sides in groups.items():
        best = [max(same_round, key=speed) for same_round in zip(*(runs[side] for side in sides), strict=True)]
        if ours and best:
            rates = [[speed(run) for run in side] for side in (ours, best)]
            peaks = [[run["peak_bytes"] / 2**30 for run in side] for side in (ours, best)]
            found.append(compared(f"speed, ours ÷ {what}", *rates, unit="tokens/s"))
            found.append(compared(f"peak memory, ours ÷ {what}", *peaks, unit="GiB"))
            if what.startswith("TRL"):
                starts = [[run["start_cpu_seconds"] for run in side] for side in (ours, best)]
                found.append(compared(f"launch to first step, CPU seconds, ours ÷ {what}", *starts, unit="s"))
    return found


if __name__ == "__main__":
    main()
