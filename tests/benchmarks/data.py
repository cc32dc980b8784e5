"""Rows per second from files of rows to tokens on disk: ours beside ``datasets.map`` with the same fast tokenizer.

    python tests/benchmarks/data.py [--rows 50000] [--rounds 5]

Chat: the definitions of dict-jargon as questions and answers, repeated, with the ChatML template of SmolLM2, which has
no generation marks. ``datasets`` calls ``apply_chat_template(tokenize=True)``, which gives no mask at all, and
``datasets, mask`` the same with ``return_assistant_tokens_mask=True`` and a ChatML template that has marks; ours makes
the exact mask each time. Text: the definitions alone, EOS added, without a template.

Every figure is of a fresh process; the sides take turns, every other round backwards. Ours is timed from the file to
memory-mapped rows: hashing, parsing, masks, writing and syncing included. Theirs is timed for ``map`` alone, on rows
that ``load_dataset`` has parsed and written as Arrow before; the time of both together is printed beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import bench, in_turns, python
from work import jargon_rows, save_rows, smollm2_folder

SIDES = ("ours", "datasets", "datasets, mask")
PROCESSES = len(os.sched_getaffinity(0))
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with bench("data", "datasets", "tokenizers") as (record, folder):
        chats = jargon_rows()
        kinds = {"chat": chats, "text": [{"text": row["messages"][-1]["content"]} for row in chats]}
        for kind, rows in kinds.items():
            repeated = [rows[number % len(rows)] for number in range(options.rows)]
            file = save_rows(folder / f"{kind}.jsonl", repeated)
            sides = {s: functools.partial(measure, s, file) for s in SIDES if kind == "chat" or s != "datasets, mask"}
            runs = in_turns(sides, options.rounds)
            what = f"rows/s, {options.rows} rows of {kind} (dict-jargon) to tokens, {PROCESSES} processes"
            record["results"].append({"what": what, "summary": summary(runs, options.rows), "runs": runs})


def measure(side: str, file: Path) -> dict[str, float]:
    """Seconds of one side in a process of its own."""
    with tempfile.TemporaryDirectory(dir=file.parent) as cache:
        python([__file__, "--once", side, file, cache, smollm2_folder()], HF_HOME=cache)
        return json.loads(Path(cache, "seconds.json").read_text())


def once(side: str, file: str, cache: str, model: str) -> None:
    """One measurement, in this process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.model_max_length = 10**9
    if side == "ours":
        from lit_fsdp.config.data import DataConfig
        from lit_fsdp.data.cache import prepare_rows
        from lit_fsdp.data.encode import RowEncoder

        config = DataConfig(train=file, max_seq_length=2048, cache_dir=cache, num_tokenizers=PROCESSES)
        start = loaded = time.monotonic()
        prepare_rows(file, config, RowEncoder(tokenizer, config))
    else:
        import datasets

        datasets.disable_progress_bars()
        start = time.monotonic()
        rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
        loaded = time.monotonic()
        mask = {"chat_template": MARKED, "return_assistant_tokens_mask": True} if side == "datasets, mask" else {}
        work = functools.partial(_tokenized, tokenizer, mask)
        rows.map(work, batched=True, num_proc=PROCESSES, remove_columns=rows.column_names)
    end = time.monotonic()
    Path(cache, "seconds.json").write_text(json.dumps({"map": end - loaded, "whole": end - start}))


def _tokenized(tokenizer: Any, mask: dict[str, Any], batch: dict[str, Any]) -> Any:
    if "text" in batch:
        return {"input_ids": tokenizer([text + tokenizer.eos_token for text in batch["text"]])["input_ids"]}
    made = tokenizer.apply_chat_template(batch["messages"], tokenize=True, return_dict=True, **mask)
    return {key: made[key] for key in ("input_ids", "assistant_masks") if key in made}


def summary(runs: dict[str, list[dict[str, float]]], num_rows: int) -> str:
    """Medians with their spread, and the ratio of ours to each of the others: the median over rounds."""
    parts = []
    for side, found in runs.items():
        rates = sorted(num_rows / result["map"] for result in found)
        parts.append(f"{side} {statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})")
        for name, key in (("ours / map alone", "map"), ("with loading", "whole")):
            if side != "ours":
                ratios = [theirs[key] / ours[key] for ours, theirs in zip(runs["ours"], found, strict=True)]
                parts[-1] += f", {name} **{statistics.median(ratios):.2f}**"
    return "; ".join(parts)


if __name__ == "__main__":
    once(*sys.argv[2:]) if sys.argv[1:2] == ["--once"] else main()
