"""One rank of ``doctor``: meets the others, measures, saves, and says each step on standard output."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

Say = Callable[[dict[str, Any]], None]


def main() -> int:
    """Read the plan from standard input and follow it; returns the exit code."""
    from lit_fsdp.launch.rank_processes import MARK

    plan = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(event: dict[str, Any]) -> None:
        sys.stdout.write(MARK + json.dumps(event) + "\n")
        sys.stdout.flush()

    try:
        _follow(plan, say)
    except Exception as error:
        say({"error": " ".join(f"{type(error).__name__}: {error}".split())[:600]})
        sys.stdout.flush()
        os._exit(1)  # destroying a group that is broken could wait for ever
    say({"done": True})
    sys.stdout.flush()
    os._exit(0)


def _end_with_parent() -> None:
    """Standard input closes when the parent is gone, however it went."""
    with contextlib.suppress(OSError, ValueError):
        while os.read(sys.stdin.fileno(), 1024):
            pass
    os._exit(1)


def _follow(plan: dict[str, Any], say: Say) -> None:
    import torch
    import torch.distributed as dist

    from lit_fsdp.launch.bandwidth import measure_collectives, measure_pairs

    torch.set_num_threads(1)
    on_gpu = plan["backend"] == "nccl"
    device = torch.device("cuda", plan["device"] % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    say({"phase": "meeting the other ranks"})
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"tcp://{plan['address']}:{plan['port']}",
        rank=plan["rank"],
        world_size=plan["world"],
        timeout=timedelta(seconds=plan["timeout"]),
    )
    if plan["sizes"] and plan["world"] > 1:
        measure_collectives(device, plan["sizes"], plan["repeats"], say)
        if len(plan["leaders"]) > 1:
            measure_pairs(device, plan["leaders"], say)
    if plan["save_folder"]:
        _trial_save(Path(plan["save_folder"]), int(plan["save_bytes"]), device, say)
    say({"phase": "parting"})
    dist.destroy_process_group()


def _trial_save(folder: Path, num_bytes: int, device: Any, say: Say) -> None:
    """A checkpoint by the code that a run saves and resumes with; every byte is compared."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from lit_fsdp.checkpoint.store import load_tensors, save_checkpoint, verify_files

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(1234 + dist.get_rank())
    rows = max(1, num_bytes // 4096 // dist.get_world_size())
    local = torch.randn(rows, 1024, generator=generator).to(device)
    tensors = {"model/trial": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    say({"phase": "trial save"})
    start = time.perf_counter()
    save_checkpoint(folder, tensors, {"trial": True}, {"global_step": 1}, "sharded", rank_state=dist.get_rank())
    seconds = time.perf_counter() - start
    say({"phase": "verifying the trial save"})
    verify_files(folder)
    into = {"model/trial": DTensor.from_local(torch.zeros_like(local), mesh, [Shard(0)], run_check=False)}
    load_tensors(folder, into)
    if not torch.equal(into["model/trial"].to_local(), local):
        raise RuntimeError("the trial save reads back other numbers than were saved")
    say({"saved": {"bytes": rows * 4096 * dist.get_world_size(), "seconds": seconds}})


if __name__ == "__main__":
    sys.exit(main())
