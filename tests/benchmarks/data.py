"""Rows per second from files of rows to tokens on disk: ours beside ``datasets.map`` with the same fast tokenizer.

    python tests/benchmarks/data.py [--rows 50000] [--processes 2] [--rounds 5] [--sides ours datasets …]

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("ours", "datasets", "datasets, mask")
LONGEST = 2048
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    if sys.argv[1:2] == ["--once"]:
        print(json.dumps(once(*sys.argv[2:])))
        return
    from record import bench, in_turns

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    options = parser.parse_args()
    with bench("data", packages=("datasets", "tokenizers")) as (record, folder):
        for kind, file in files(folder, options.rows):
            sides = [side for side in options.sides if kind == "chat" or side != "datasets, mask"]
            once_each = {side: functools.partial(measure, side, kind, file, options.processes) for side in sides}
            runs = in_turns(once_each, options.rounds)
            what = f"rows/s, {options.rows} rows of {kind} (dict-jargon) to tokens, {options.processes} processes"
            record["results"].append({"what": what, "summary": summary(runs, options.rows), "runs": runs})


def files(folder: Path, num_rows: int) -> list[tuple[str, Path]]:
    """Kind and file of the rows that are tokenized."""
    from jargon import jargon_rows

    rows = jargon_rows(ROOT / "runs" / "bench" / "jargon")
    texts = [{"text": row["messages"][-1]["content"]} for row in rows]
    found = []
    for kind, part in (("chat", rows), ("text", texts)):
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(part[i % len(part)]) + "\n" for i in range(num_rows)), encoding="utf-8")
        found.append((kind, path))
    return found


def measure(side: str, kind: str, file: Path, processes: int) -> dict[str, float]:
    """Seconds of one side in a process of its own."""
    from workload import smollm2_folder

    with tempfile.TemporaryDirectory(dir=file.parent) as cache:
        command = [sys.executable, __file__, "--once", side, kind, str(file), str(processes), cache]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HOME": cache, "HF_HUB_OFFLINE": "1"}
        environment["LIT_FSDP_MODELS"] = str(smollm2_folder())
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{side} failed:\n{done.stderr}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def once(side: str, kind: str, file: str, processes: str, cache: str) -> dict[str, float]:
    """One measurement, in this process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.environ["LIT_FSDP_MODELS"])
    tokenizer.model_max_length = 10**9
    run = _ours if side == "ours" else _datasets
    return run(tokenizer, side, kind, file, int(processes), cache)


def _ours(tokenizer: Any, side: str, kind: str, file: str, processes: int, cache: str) -> dict[str, float]:
    from lit_fsdp.config.data import DataConfig
    from lit_fsdp.data.cache import prepare_rows
    from lit_fsdp.data.encode import RowEncoder

    config = DataConfig(train=file, max_seq_length=LONGEST, cache_dir=cache, num_tokenizers=processes)
    start = time.monotonic()
    rows = prepare_rows(file, config, RowEncoder(tokenizer, config))
    seconds = time.monotonic() - start
    return {"seconds": seconds, "seconds_with_loading": seconds, "tokens": rows.meta["tokens"]}


def _datasets(tokenizer: Any, side: str, kind: str, file: str, processes: int, cache: str) -> dict[str, float]:
    import datasets

    datasets.disable_progress_bars()
    start = time.monotonic()
    rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
    loaded = time.monotonic()
    work: Callable[[dict[str, Any]], Any] = (
        _Texts(tokenizer) if kind == "text" else _Talks(tokenizer, side != "datasets")
    )
    done = rows.map(work, batched=True, num_proc=processes, remove_columns=rows.column_names)
    seconds = time.monotonic() - loaded
    tokens = sum(map(len, done["input_ids"]))
    return {"seconds": seconds, "seconds_with_loading": seconds + loaded - start, "tokens": tokens}


class _Texts:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, batch: dict[str, Any]) -> Any:
        return {"input_ids": self.tokenizer([text + self.tokenizer.eos_token for text in batch["text"]])["input_ids"]}


class _Talks:
    def __init__(self, tokenizer: Any, mask: bool) -> None:
        self.tokenizer = tokenizer
        self.more = {"chat_template": MARKED, "return_assistant_tokens_mask": True} if mask else {}

    def __call__(self, batch: dict[str, Any]) -> Any:
        made = self.tokenizer.apply_chat_template(batch["messages"], tokenize=True, return_dict=True, **self.more)
        return {key: made[key] for key in ("input_ids", "assistant_masks") if key in made}


def summary(runs: dict[str, list[dict[str, Any]]], num_rows: int) -> str:
    """Medians with their spread, and the ratio of ours to each of the others: the median over rounds."""
    parts = []
    for side, found in runs.items():
        rates = sorted(num_rows / result["seconds"] for result in found)
        part = f"{side} {statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f})"
        if side != "ours" and "ours" in runs:
            for name, key in (("ours / map alone", "seconds"), ("with loading", "seconds_with_loading")):
                ratios = [theirs[key] / ours[key] for ours, theirs in zip(runs["ours"], found, strict=True)]
                part += f", {name} **{statistics.median(ratios):.2f}**"
        parts.append(part)
    return "; ".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
