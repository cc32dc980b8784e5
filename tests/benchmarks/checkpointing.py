"""``python tests/benchmarks/checkpointing.py``: what a checkpoint costs, as medians of ratios taken side by side.

    python tests/benchmarks/checkpointing.py [--mib 500] [--repeats 5] [--folder runs/bench]

One process with a group of its own (gloo), a state of float32 matrices on the CPU, one file system. The measures:

- ``save``      seconds of a raw ``write`` + ``fsync`` of the same bytes ÷ a save with sync, hashes and manifest;
                aim >= 0.85
- ``plain``     seconds of plain ``torch.distributed.checkpoint`` (no hash, its own fsync) ÷ ours
- ``load``      seconds of a plain DCP load ÷ a load that verifies every hash; aim >= 0.75
- ``blocked``   seconds for which a save in the background holds training up ÷ a save that training waits for;
                aim <= 0.1; the first one, which also makes the memory, is not counted
- ``beside``    steps per second of a small training loop while a save is being written ÷ while a thread writes and
                syncs the same bytes; aim >= 0.9

Within a repeat the sides follow each other, in the other order than in the repeat before.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import ROOT, command_line, describe, table_row
from rich.console import Console
from rich.table import Table
from torch.distributed import checkpoint as dcp

from lit_fsdp.checkpoint.store import BackgroundSaver, load_tensors, save_checkpoint, verify_files

MIB = 2**20
AIMS = {"save": ">= 0.85", "plain": "", "load": ">= 0.75", "blocked": "<= 0.1", "beside": ">= 0.9"}
WHAT = {
    "save": ("raw write + fsync ÷ save with sync, hashes and manifest", "raw write", "ours"),
    "plain": ("plain DCP save ÷ save with sync, hashes and manifest", "plain DCP", "ours"),
    "load": ("plain DCP load ÷ verified load", "plain DCP", "ours"),
    "blocked": ("training held up by a save in the background ÷ by one it waits for", "background", "waits"),
    "beside": ("training step beside a plain write ÷ beside a save", "plain write", "while saving"),
}


_REST: dict[str, Any] = {"state": {}, "manifest": {"global_step": 1}, "layout": "sharded"}


class Bench:
    """A state and a place to save it; each method takes the seconds of one side.

    Args:
        folder: Empty; on the file system to be measured.
        mib: Size of the state.
    """

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder
        torch.manual_seed(0)
        rows = mib * MIB // 16 // 4 // 1024
        self.tensors = {f"model/layers.{index}": torch.randn(rows, 1024) for index in range(16)}
        self.into = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self.saver = BackgroundSaver(torch.device("cpu"), 60.0)
        self._count = 0
        self._weight = torch.randn(768, 768, requires_grad=True)
        self._input = torch.randn(768, 768)

    def fresh(self) -> Path:
        """A place nobody has written to."""
        self._count += 1
        return self.folder / f"step-{self._count:08d}"

    def raw_write(self) -> float:
        """The same bytes into one file, synced."""
        with timed() as seconds, (path := self.fresh()).open("wb") as file:
            for tensor in self.tensors.values():
                file.write(memoryview(tensor.numpy()).cast("B"))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
        return seconds()

    def plain_save(self) -> float:
        """DCP as it comes, which syncs its files."""
        place = self.fresh()
        with timed() as seconds:
            dcp.save(dict(self.tensors), checkpoint_id=place)
        shutil.rmtree(place)
        return seconds()

    def own_save(self) -> float:
        """Synced, hashed, described, renamed."""
        place = self.fresh()
        with timed() as seconds:
            save_checkpoint(place, self.tensors, **_REST)
        shutil.rmtree(place)
        return seconds()

    def blocked(self) -> float:
        """Until a save in the background lets training go on; then it is waited for."""
        place = self.fresh()
        with timed() as seconds:
            self.saver.save(place, tensors=self.tensors, **_REST)
        self.saver.wait()
        shutil.rmtree(place)
        return seconds()

    def plain_load(self) -> float:
        """DCP as it comes."""
        with timed() as seconds:
            dcp.load(dict(self.into), checkpoint_id=self.folder / "plain")
        return seconds()

    def own_load(self) -> float:
        """With every hash verified."""
        with timed() as seconds:
            verify_files(self.folder / "loaded")
            load_tensors(self.folder / "loaded", self.into)
        return seconds()

    def step(self) -> None:
        """A training step that keeps a core busy for some ten milliseconds."""
        loss = (torch.relu(self._input @ self._weight) @ self._weight).square().mean()
        loss.backward()
        with torch.no_grad():
            self._weight.sub_(self._weight.grad, alpha=1e-9)
        self._weight.grad = None

    def beside_a_write(self) -> float:
        """Seconds per step while a thread writes and syncs the same bytes."""
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(self.raw_write)
            return self.steps_until(writing.done)

    def while_saving(self) -> float:
        """Seconds per step while a save is being written."""
        place = self.fresh()
        self.saver.save(place, tensors=self.tensors, **_REST)
        found = self.steps_until(lambda: self.saver.stands)
        self.saver.wait()
        shutil.rmtree(place)
        return found

    def steps_until(self, is_done: Callable[[], bool]) -> float:
        """Seconds per step of a training that ends with what is written beside it."""
        steps = 0
        with timed() as seconds:
            while not is_done():
                self.step()
                steps += 1
        return seconds() / max(1, steps)


class timed:  # noqa: N801 - reads as a statement
    """``with timed() as seconds: ...``; ``seconds()`` afterwards."""

    def __enter__(self) -> Callable[[], float]:
        self._start = self._end = time.perf_counter()
        return lambda: self._end - self._start

    def __exit__(self, *_: object) -> None:
        self._end = time.perf_counter()


def main() -> int:
    """Measure, print a table and rows for recipes/README.md, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mib", type=int, default=500, help="size of the state (default 500)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs per measure (default 5)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "bench", help="where to write (default runs/bench)"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(AIMS), default=tuple(AIMS), help="measures (default all)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    record = describe(command_line())
    folder = Path(tempfile.mkdtemp(prefix="checkpointing-", dir=options.folder))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    try:
        record["mib"], record["results"] = (
            options.mib,
            measure(Bench(folder, options.mib), options.only, options.repeats),
        )
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)
    path = options.folder / f"checkpointing-{datetime.datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    show(record)
    print(f"\nrows for recipes/README.md; everything is in {path}\n")
    for result in record["results"]:
        print(table_row(f"{result['what']}, {options.mib} MiB", result["summary"], record))
    return 0


def measure(bench: Bench, only: tuple[str, ...], repeats: int) -> list[dict[str, Any]]:
    """Every measure as pairs of seconds; one of each side is thrown away before."""
    save_checkpoint(bench.folder / "loaded", bench.tensors, **_REST)
    dcp.save(dict(bench.tensors), checkpoint_id=bench.folder / "plain")
    sides: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "save": (bench.raw_write, bench.own_save),
        "plain": (bench.plain_save, bench.own_save),
        "load": (bench.plain_load, bench.own_load),
        "blocked": (bench.blocked, bench.own_save),
        "beside": (bench.beside_a_write, bench.while_saving),
    }
    results = []
    for name in only:
        first, second = sides[name]
        pairs = []
        for repeat in range(repeats + 1):
            if repeat % 2:
                b, a = second(), first()
            else:
                a, b = first(), second()
            pairs.append((a, b))
            print(".", end="", file=sys.stderr, flush=True)
        ratios = [a / b for a, b in pairs[1:]]
        middle = [statistics.median(side) for side in zip(*pairs[1:], strict=True)]
        summary = f"{statistics.median(ratios):.2f} ({middle[0]:.3f} s ÷ {middle[1]:.3f} s)"
        results.append({"name": name, "what": WHAT[name][0], "pairs": pairs[1:], "ratios": ratios, "summary": summary})
    print(file=sys.stderr)
    return results


def show(record: dict[str, Any]) -> None:
    """The table for people."""
    table = Table(title=f"checkpoints of {record['mib']} MiB; medians", title_justify="left")
    for column in ("measure", "first", "second", "ratio", "lowest to highest", "aim"):
        table.add_column(column)
    for result in record["results"]:
        ratios, (_, first, second) = result["ratios"], WHAT[result["name"]]
        middle = [statistics.median(side) for side in zip(*result["pairs"], strict=True)]
        cells = [f"{first} {middle[0]:.3f} s", f"{second} {middle[1]:.3f} s", f"{statistics.median(ratios):.2f}"]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        table.add_row(result["what"], *cells, spread, AIMS[result["name"]])
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
