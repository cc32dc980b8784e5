"""``python tests/benchmarks/checkpointing.py``: what a checkpoint costs, as medians of ratios taken side by side.

    python tests/benchmarks/checkpointing.py [--mib 500] [--repeats 5] [--folder SOMEWHERE]

One process with a group of its own (gloo), a state of float32 matrices on the CPU, one file system. The measures:

- ``save``      seconds of a raw ``write`` + ``fsync`` of the same bytes ÷ a save with sync, hashes and manifest;
                aim >= 0.85
- ``plain``     seconds of plain ``torch.distributed.checkpoint`` (no hash, its own fsync) ÷ ours
- ``load``      seconds of a plain DCP load ÷ a load that verifies every hash; aim >= 0.75
- ``blocked``   seconds for which a save in the background holds training up ÷ a save that training waits for;
                aim <= 0.1; the first one, which also makes the memory, is not counted
- ``beside``    steps per second of a small training loop while a save is being written ÷ while a thread writes and
                syncs the same bytes; aim >= 0.9

The sides follow each other, every other round backwards.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import bench, compared, in_turns
from torch.distributed import checkpoint as dcp

from lit_fsdp.checkpoint.store import BackgroundSaver, load_tensors, save_checkpoint, verify_files

MIB = 2**20
# what is compared, and the aim; the sides are methods of Bench
MEASURES = {
    "save": ("raw write + fsync ÷ save with sync, hashes and manifest", "raw_write", "own_save", ">= 0.85"),
    "plain": ("plain DCP save ÷ save with sync, hashes and manifest", "plain_save", "own_save", ""),
    "load": ("plain DCP load ÷ verified load", "plain_load", "own_load", ">= 0.75"),
    "blocked": ("training held up by a save in the background ÷ by one it waits for", "blocked", "own_save", "<= 0.1"),
    "beside": ("training step beside a plain write ÷ beside a save", "beside_a_write", "while_saving", ">= 0.9"),
}
_REST: dict[str, Any] = {"state": {}, "manifest": {"global_step": 1}, "layout": "sharded"}


class Bench:
    """A state and a folder to save it to; each public method returns the seconds of one side.

    Args:
        folder: Empty; on the file system to be measured.
        mib: Size of the state.
    """

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder
        torch.manual_seed(0)
        rows = mib * MIB // 16 // 4 // 1024
        self.tensors = {f"model/layers.{index}": torch.randn(rows, 1024) for index in range(16)}
        self._into = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self._saver = BackgroundSaver(torch.device("cpu"), 60.0)
        self._weight = torch.randn(768, 768, requires_grad=True)
        self._input = torch.randn(768, 768)

    def raw_write(self) -> float:
        """The same bytes into one file, synced."""

        def write(path: Path) -> None:
            path.mkdir()
            with (path / "bytes").open("wb") as file:
                for tensor in self.tensors.values():
                    file.write(memoryview(tensor.numpy()).cast("B"))
                file.flush()
                os.fsync(file.fileno())

        return self._saved(write)

    def plain_save(self) -> float:
        """DCP as it comes, which syncs its files."""
        return self._saved(lambda path: dcp.save(dict(self.tensors), checkpoint_id=path))

    def own_save(self) -> float:
        """Synced, hashed, described, renamed."""
        return self._saved(lambda path: save_checkpoint(path, self.tensors, **_REST))

    def blocked(self) -> float:
        """Until a save in the background lets training go on; then it is waited for."""
        return self._saved(self._begin_saving)

    def plain_load(self) -> float:
        """DCP as it comes."""
        return seconds(lambda: dcp.load(dict(self._into), checkpoint_id=self.folder / "plain"))

    def own_load(self) -> float:
        """With every hash verified."""
        return seconds(lambda: (verify_files(self.folder / "loaded"), load_tensors(self.folder / "loaded", self._into)))

    def beside_a_write(self) -> float:
        """Seconds per step while a thread writes and syncs the same bytes."""
        with ThreadPoolExecutor(1) as pool:
            return self._steps_until(pool.submit(self.raw_write).done)

    def while_saving(self) -> float:
        """Seconds per step while a save is being written."""
        found: list[float] = []

        def train(path: Path) -> None:
            self._begin_saving(path)
            found.append(self._steps_until(lambda: not self._saver.is_writing))

        self._saved(train)
        return found[0]

    def _begin_saving(self, path: Path) -> None:
        save_checkpoint(path, tensors=self.tensors, background=self._saver, **_REST)

    def _saved(self, save: Callable[[Path], Any]) -> float:
        """Seconds of a save into a folder nobody has written to, which is removed when all of it is there."""
        path = self.folder / f"step-{time.monotonic_ns()}"
        found = seconds(lambda: save(path))
        self._saver.wait()
        shutil.rmtree(path)
        return found

    def _steps_until(self, is_done: Callable[[], bool]) -> float:
        """Seconds per training step, each of which keeps a core busy for some ten milliseconds."""
        steps, start = 0, time.perf_counter()
        while not is_done():
            (torch.relu(self._input @ self._weight) @ self._weight).square().mean().backward()
            self._weight.grad = None
            steps += 1
        return (time.perf_counter() - start) / max(1, steps)


def seconds(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def main() -> None:
    """Measure what is asked for; a round of each pair is thrown away before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mib", type=int, default=500, help="size of the state (default 500)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs per measure (default 5)")
    parser.add_argument("--folder", type=Path, help="an existing folder to write to (default runs/bench)")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES, help="measures (default all)")
    options = parser.parse_args()
    with bench("checkpointing", where=options.folder) as (record, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        state = Bench(folder, options.mib)
        save_checkpoint(folder / "loaded", state.tensors, **_REST)
        dcp.save(dict(state.tensors), checkpoint_id=folder / "plain")
        for what, first, second, aim in (MEASURES[name] for name in options.only):
            found = in_turns({side: getattr(state, side) for side in (first, second)}, options.repeats + 1)
            sides = [seconds[1:] for seconds in found.values()]
            record["results"].append(compared(f"{what}, {options.mib} MiB", *sides, unit="s", aim=aim))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
