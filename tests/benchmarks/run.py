"""``make bench``: lit_fsdp beside what one would write by hand, interleaved, as medians of ratios.

    python tests/benchmarks/run.py [--only one packed two start] [--repeats 5] …

Aims of the measures below are no tests; a shared machine decides nothing. Of ``start`` the tokenized rows are cached.

Both sides load the same weights and see the same rows in the same order with the same number of threads; their losses
are printed beside the speeds. The model has the shape of SmolLM2-135M with random weights. Precision is ``auto``: bf16
compute where the CPU has instructions for it, else fp32.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from record import bench, compared, in_turns, python
from work import LORA, data_module, fit, random_rows, save_random_model, save_rows, write_recipe

from lit_fsdp.host import free_port

HERE = Path(__file__).parent
WARMUP_STEPS = 2
ROWS = 4  # per optimizer step
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"family": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 256}
MIXTURE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "num_experts_per_tok": 4, "vocab_size": 4096}
# ranks, tokens of a row or pack, what is compared, the aim
MEASURES = {
    "one": (1, 128, "tokens/s of `lit-fsdp fit`, one process ÷ plain PyTorch loop", ">= 0.98"),
    "two": (2, 128, "tokens/s of `lit-fsdp fit`, two processes ÷ `fully_shard` loop", ">= 0.97"),
    "packed": (1, 512, "tokens/s of `lit-fsdp fit`, packed, one process ÷ loop with torch's chunked head", ">= 0.98"),
    "lora": (1, 512, "tokens/s of `lit-fsdp fit`, packed, with adapters, one process ÷ loop with peft", ">= 1.15"),
    "context": (2, 4096, "tokens/s of `lit-fsdp fit`, two processes that share rows ÷ that have their own", ">= 0.85"),
    "experts": (
        1,
        512,
        "tokens/s of `lit-fsdp fit`, 16 experts, one process ÷ plain PyTorch loop",
        ">= 1.3",
    ),
    "experts-64": (
        1,
        2048,
        "tokens/s of `lit-fsdp fit`, four active of 64 experts ÷ of 8, 8,192 tokens per step",
        ">= 0.8",
    ),
    "experts-divided": (
        2,
        512,
        "tokens/s of `lit-fsdp fit`, 64 experts, two processes that divide them ÷ that gather all",
        ">= 1.5",
    ),
    "start": (2, 64, "launch to first step of `lit-fsdp fit` on two processes ÷ minimal Lightning script", "<= 1.05"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES, help="measures to take (default all)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs per measure (default 5)")
    parser.add_argument("--steps", type=int, default=7, help="steps per run, two of them warm-up (default 7)")
    parser.add_argument("--layers", type=int, default=30, help="blocks of the model (default 30)")
    options = parser.parse_args()
    with bench("run") as (record, folder):
        for name in options.only:
            record["results"].append(measure(name, folder / name, options))


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Ours ÷ the peer's: tokens per second after the warm-up, or seconds to the end of the first step."""
    ranks, length, what, aim = MEASURES[name]
    is_start, packing = name == "start", name in ("packed", "lora")
    adapters = {"lora": LORA} if name == "lora" else {}
    steps = 1 if is_start else options.steps
    folder.mkdir()
    sizes: dict[str, Any] = TINY if is_start else {"num_hidden_layers": options.layers}
    if name.startswith("experts"):
        sizes = {**MIXTURE, "num_experts": 16 if name == "experts" else 64}
    model = save_random_model(folder / "model", **sizes)
    words = (length // 16, length // 4) if packing else (length, length)
    rows = save_rows(folder / "rows.jsonl", random_rows(ROWS * steps * (4 if packing else 1), *words))
    data = {"train": str(rows), "max_seq_length": length, "packing": packing}
    data |= {"global_batch_size": ROWS, "micro_batch_size": ROWS // ranks}
    options_of = {"devices": ranks, "max_steps": steps, "log_every_n_steps": 5}
    write_recipe(folder / "recipe.yaml", model, {}, data, adapters, **options_of)
    if name == "experts-64":
        fewer = save_random_model(folder / "fewer", **{**MIXTURE, "num_experts": 8})
        write_recipe(folder / "peer.yaml", fewer, {}, data, **options_of)
    elif name == "experts-divided":
        write_recipe(folder / "recipe.yaml", model, {"expert_parallel": ranks}, data, **options_of)
        write_recipe(folder / "peer.yaml", model, {}, data, **options_of)
    elif name == "context":  # both two rows at a time
        data |= {"global_batch_size": ranks}
        for side, degree, micro in (("recipe", ranks, ranks), ("peer", 1, 1)):
            strategy = {"context_parallel": degree, "activation_checkpointing": "full"}
            write_recipe(folder / f"{side}.yaml", model, strategy, {**data, "micro_batch_size": micro}, **options_of)
    else:
        save_batches(folder, data, ranks, steps)
    sides = {
        "ours": lambda: fit(folder / "recipe.yaml", ranks),
        "peer": lambda: peer(folder, ranks, is_start, **adapters),
    }
    if (folder / "peer.yaml").is_file():
        sides["peer"] = lambda: fit(folder / "peer.yaml", ranks)
    runs = in_turns(sides, options.repeats + is_start)
    for side, found in runs.items():
        print(f"losses, {side}: {'  '.join(f'{loss:.4f}' for loss in found[0]['losses'])}")
    if is_start:  # the first ones fill the caches
        seconds = [[run["times"][0] - run["launched"] for run in found[1:]] for found in runs.values()]
        return compared(what, *seconds, unit="s", aim=aim)
    tokens = length * (ranks if name == "context" else ROWS) * (steps - WARMUP_STEPS)
    rates = [[tokens / (r["times"][-1] - r["times"][WARMUP_STEPS - 1]) for r in found] for found in runs.values()]
    return compared(what, *rates, unit="tokens/s", aim=aim)


def save_batches(folder: Path, data: dict[str, Any], ranks: int, steps: int) -> None:
    """What each rank of a run gets; one forward per step, so a batch is a step."""
    module, _ = data_module(folder / "model", {"cache_dir": str(folder / "cache"), **data})
    for rank in range(ranks):
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        module.trainer = SimpleNamespace(world_size=ranks, global_rank=rank, global_step=0, strategy=strategy)
        batches = list(itertools.islice(module.train_dataloader(), steps))
        torch.save(batches, folder / f"batches-{rank}-of-{ranks}.pt")


def peer(folder: Path, ranks: int, is_start: bool, **adapters: Any) -> dict[str, Any]:
    """The loop without Lightning, or the minimal Lightning script, which starts its second rank itself."""
    out = folder / "record.json"
    place = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if is_start:
        launched = python([HERE / "minimal_lightning.py", folder, out, ranks], ranks)
    else:
        places = [{"RANK": rank, **place} for rank in range(ranks)]
        launched = python([HERE / "hand_written.py", folder, out, *adapters], ranks, places)
    return {"launched": launched, **json.loads(out.read_text())}


if __name__ == "__main__":
    main()
