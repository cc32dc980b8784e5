"""``python tests/benchmarks/checkpointing.py``: what a checkpoint costs, as medians of ratios taken side by side.

    python tests/benchmarks/checkpointing.py [--mib 500] [--repeats 5]

One process with a group of its own (gloo), a state of float32 matrices on the CPU, one file system. Beside raw writes
and plain ``torch.distributed.checkpoint``, which syncs its files and hashes nothing, are measured a save with sync,
hashes and manifest, a load that verifies every hash, the seconds for which a save in the background holds training up
(the first one, which also makes the memory, is not counted), and a small training loop while a save is written.
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

# what is compared, the sides, which are methods of Bench, and the aim
MEASURES = (
    ("raw write + fsync ÷ save with sync, hashes and manifest", "raw_write", "own_save", ">= 0.85"),
    ("plain DCP save ÷ save with sync, hashes and manifest", "plain_save", "own_save", ""),
    ("plain DCP load ÷ verified load", "plain_load", "own_load", ">= 0.75"),
    ("training held up by a save in the background ÷ by one it waits for", "blocked", "own_save", "<= 0.1"),
    ("training step beside a plain write ÷ beside a save", "beside_a_write", "while_saving", ">= 0.9"),
)
_REST: dict[str, Any] = {"state": {}, "manifest": {"global_step": 1}, "layout": "sharded"}


class Bench:
    """A state of so many MiB and an empty folder to save it to; each public method returns the seconds of one side."""

    def __init__(self, folder: Path, mib: int) -> None:
        self.folder = folder
        torch.manual_seed(0)
        rows = mib * 2**20 // 16 // 4 // 1024
        self.tensors = {f"model/layers.{index}": torch.randn(rows, 1024) for index in range(16)}
        self._into = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        self._saver = BackgroundSaver(torch.device("cpu"), None)
        self._weight = torch.randn(768, 768, requires_grad=True)
        self._input = torch.randn(768, 768)
        save_checkpoint(folder / "own", self.tensors, **_REST)
        dcp.save(dict(self.tensors), checkpoint_id=folder / "plain")

    def raw_write(self) -> float:
        def write(path: Path) -> None:
            path.mkdir()
            with (path / "bytes").open("wb") as file:
                for tensor in self.tensors.values():
                    file.write(memoryview(tensor.numpy()).cast("B"))
                file.flush()
                os.fsync(file.fileno())

        return self._saved(write)

    def plain_save(self) -> float:
        return self._saved(lambda path: dcp.save(dict(self.tensors), checkpoint_id=path))

    def own_save(self) -> float:
        return self._saved(lambda path: save_checkpoint(path, self.tensors, **_REST))

    def blocked(self) -> float:
        return self._saved(self._begin_saving)

    def plain_load(self) -> float:
        return seconds(lambda: dcp.load(dict(self._into), checkpoint_id=self.folder / "plain"))

    def own_load(self) -> float:
        return seconds(lambda: (verify_files(self.folder / "own"), load_tensors(self.folder / "own", self._into)))

    def beside_a_write(self) -> float:
        with ThreadPoolExecutor(1) as pool:
            return self._steps_until(pool.submit(self.raw_write).done)

    def while_saving(self) -> float:
        found: list[float] = []

        def train(path: Path) -> None:
            self._begin_saving(path)
            found.append(self._steps_until(lambda: all(save.done() for save in self._saver._pending)))

        self._saved(train)
        return found[0]

    def _begin_saving(self, path: Path) -> None:
        save_checkpoint(path, tensors=self.tensors, background=self._saver, **_REST)

    def _saved(self, save: Callable[[Path], Any]) -> float:
        """Seconds of a save into a new folder, which is removed when all of it is there."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mib", type=int, default=500, help="size of the state (default 500)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs per measure (default 5)")
    options = parser.parse_args()
    with bench("checkpointing") as (record, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        state = Bench(folder, options.mib)
        for what, first, second, aim in MEASURES:
            found = in_turns({side: getattr(state, side) for side in (first, second)}, options.repeats + 1)
            sides = [times[1:] for times in found.values()]  # the first round fills caches
            record["results"].append(compared(f"{what}, {options.mib} MiB", *sides, unit="s", aim=aim))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
