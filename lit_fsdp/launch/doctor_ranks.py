"""Checks of ``lit-fsdp doctor`` with several ranks: rendezvous, run folder, a timed all-reduce and a trial save.

Each process, started by srun, torchrun or alone, runs its rank in a child process, so that a rank that hangs or dies
becomes a row instead of ending the table. All messages go through the ``TCPStore`` of the launch.
"""

import contextlib
import glob
import json
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lit_fsdp.host import GIB
from lit_fsdp.launch.doctor import MIB, Report, Row, Wanted, judged, nearest

ARRIVE_SECONDS = 180.0
COLLECTIVE_SECONDS = 60.0
RANKS_SECONDS = 300.0  # total for the ranks, including imports
_SEE_SECONDS = 5.0
_SAVE_BYTES = 48 * MIB
_REPEATS = 5  # of an all-reduce
_SIZES = {"gloo": (64 * 1024, MIB, 16 * MIB, 64 * MIB), "nccl": (MIB, 16 * MIB, 128 * MIB, 512 * MIB)}
_WAY_OUT = {
    "gloo": "open all TCP ports between the nodes; set GLOO_SOCKET_IFNAME to their shared network (one node: lo)",
    "nccl": "run the same command with NCCL_DEBUG=INFO; see nvidia-smi topo -m and NCCL_SOCKET_IFNAME",
}
_SAME_ON_ALL = ("Python", "torch", "lightning", "transformers", "datasets")
_log = logging.getLogger(__name__)


def device_facts() -> dict[str, Any]:
    """Collect torch's build and the GPUs that this process may use."""
    from torch.utils import collect_env

    why_not, cuda = "", torch.version.cuda
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        why_not = str(error).split("\n")[0]
    gpus = [] if why_not else [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "build": f"CUDA {cuda}" if cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU",
        "why_not": why_not,
        "device_files": len(glob.glob("/dev/nvidia[0-9]*")),
        "gpus": [{"name": gpu.name, "gib": gpu.total_memory / GIB, "has_bf16": gpu.major >= 8} for gpu in gpus],
        "driver": collect_env.get_nvidia_driver_version(collect_env.run),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus and dist.is_nccl_available() else None,
    }


def examine(rows: Sequence[Row], wanted: Wanted, num_gpus: int) -> Report:
    """Examine all nodes together with the other processes of this launch; the report is empty except on rank 0.

    The variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` identify this process;
    the ``rows`` are the results of the first process of each node.

    Raises:
        torch.distributed.DistError: The rendezvous failed, or rank 0 has ended.
    """
    arrive, report = timedelta(seconds=ARRIVE_SECONDS), Report()
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _connect(is_master=rank == 0 and not has_store, timeout=arrive)
    with contextlib.ExitStack() as stack:
        if rank == 0:
            report.rows += rows
            store.set("folder", _scratch(stack, wanted, report.rows))
        folder = store.get("folder").decode()
        store.set(f"arrived/{rank}", json.dumps(_arrival(rank, rows, folder)))
        if rank == 0:
            arrived = [json.loads(text) for text in _collect(store, "arrived", started, ARRIVE_SECONDS) if text]
            report.rows += judge_arrivals(arrived, started, wanted, report.rows)
            plan: dict[str, Any] = {}
            if len(arrived) == started and all(one["sees"] for one in arrived):
                on_gpu = bool(num_gpus) and wanted.accelerator != "cpu"
                own = min(wanted.devices or num_gpus, num_gpus) if on_gpu else 2
                nodes = sum(one["is_leader"] for one in arrived)
                world, backend = started if started > 1 else own, "nccl" if on_gpu else "gloo"
                plan = {"backend": backend, "world": world, "nodes": nodes, "folder": folder}
                _log.info("measuring on %d rank(s) with %s", world, backend)
            store.set("plan", json.dumps(plan))
        store.wait(["plan"], 2 * arrive)
        if plan := json.loads(store.get("plan")):
            problems = _run_ranks(store, plan, rank, plan["world"] if started == 1 else 1)
            store.set(f"ended/{rank}", json.dumps(problems))
            if rank == 0:
                _report_ranks(store, plan, started, report)
    return report


def _connect(**options: Any) -> dist.Store:
    tcp = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), **options)
    return dist.PrefixStore("lit_fsdp_doctor", tcp)


def _collect(store: dist.Store, key: str, count: int, seconds: float = 0.0) -> list[str]:
    """Collect the values of ``key`` from ``count`` ranks until all are set or time is up; missing values are empty."""
    names, deadline = [f"{key}/{rank}" for rank in range(count)], time.monotonic() + seconds
    for name in names:
        left = deadline - time.monotonic()
        with contextlib.suppress(dist.DistError):
            if left > 0:
                store.wait([name], timedelta(seconds=left))
    return [store.get(name).decode() if store.check([name]) else "" for name in names]


def _scratch(stack: contextlib.ExitStack, wanted: Wanted, rows: list[Row]) -> str:
    """Create a hidden folder where checkpoints will be, removed with ``stack``; return "" if that fails."""
    folder = nearest(wanted.run_folder / "checkpoints")
    try:
        made = tempfile.TemporaryDirectory(prefix=".lit-fsdp-doctor-", dir=folder, ignore_cleanup_errors=True)
        return stack.enter_context(made)
    except OSError as error:
        fix = f"set trainer.default_root_dir to a folder that you may write; see findmnt -T {folder}"
        rows.append(Row("write to the run folder", f"{folder}: {error.strerror}", "fail", fix))
        return ""


def _arrival(rank: int, rows: Sequence[Row], folder: str) -> dict[str, Any]:
    """Describe this process's node, and whether it sees the folder created by rank 0."""
    deadline = time.monotonic() + _SEE_SECONDS
    while folder and not os.path.isdir(folder) and time.monotonic() < deadline:  # a network file system may lag
        time.sleep(0.2)
    return {
        "rank": rank,
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "is_leader": os.environ["LOCAL_RANK"] == "0",
        "rows": [asdict(row) for row in rows],
        "sees": os.path.isdir(folder),
    }


def judge_arrivals(
    arrived: Sequence[Mapping[str, Any]], started: int, wanted: Wanted, here: Sequence[Row]
) -> list[Row]:
    """Judge which processes arrived, what their nodes share, and problems of other nodes that are not ``here``."""
    leaders = [one for one in arrived if one["is_leader"]]
    rows = []
    if len(leaders) != wanted.nodes:
        fix = f"srun --nodes={wanted.nodes} --ntasks-per-node={wanted.devices or 1} in front of the same command"
        found = f"{wanted.nodes} requested, {len(leaders)} checked"
        rows.append(Row("nodes", found, "fail" if started > 1 else "warn", fix))
    if started > 1:
        absent = sorted({*range(started)} - {one["rank"] for one in arrived})
        found = f"{started} on {', '.join(one['node'] for one in leaders)}"
        found += f"; missing: {', '.join(map(str, absent))}" if absent else ""
        fix = "see their standard error; open all TCP ports between the nodes"
        rows.append(judged("ranks", found, not absent, fix))
    if len(leaders) > 1 and arrived[0]["sees"]:
        blind = ", ".join(dict.fromkeys(one["node"] for one in arrived if not one["sees"]))
        found = f"{wanted.run_folder} is {f'not shared with {blind}' if blind else 'shared'}"
        fix = "set trainer.default_root_dir to a folder on a shared file system"
        rows.append(judged("shared run folder", found, not blind, fix))
    for one in leaders[1:]:
        for row in (Row(**values) for values in one["rows"]):
            name = f"{row.name} on {one['node']}"
            if row.name in _SAME_ON_ALL and row not in here:
                rows.append(Row(name, row.found, "fail", "use one installation on a shared file system"))
            elif row.fix and row not in here:
                rows.append(Row(name, row.found, row.grade, row.fix))
    return rows


def _run_ranks(store: dist.Store, plan: Mapping[str, Any], first: int, count: int) -> list[str]:
    """Run the ranks from ``first`` on until they end; return one line for each failed rank."""
    ranks = mp.start_processes(run_rank, ({**plan, "parent": os.getpid()}, first), count, join=False, daemon=True)
    deadline, problems = time.monotonic() + RANKS_SECONDS, []
    try:
        with contextlib.suppress(mp.ProcessExitedException, mp.ProcessRaisedException):
            while not ranks.join(0.5, grace_period=5) and time.monotonic() < deadline:
                pass
        for rank, process in enumerate(ranks.processes, first):
            code, keys = process.exitcode, (f"phase/{rank}", f"error/{rank}")
            phase, what = (store.get(key).decode() if store.check([key]) else "" for key in keys)
            if code is not None and code < 0 and code != -signal.SIGTERM:  # torch ends waiting ranks with it
                what = f"killed by {signal.Signals(-code).name}"
            if code != 0:
                problems.append(f"rank {rank} in {phase or 'its imports'}: {what or 'did not finish'}")
    finally:
        for process in ranks.processes:
            process.kill()
    return problems


def run_rank(index: int, plan: Mapping[str, Any], first: int) -> None:
    """Run one rank: rendezvous, all-reduce, trial save, each announced in the store before it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch sends it when the parent has ended
    os.dup2(2, 1)  # NCCL_DEBUG writes to standard output, which is reserved for the report
    if os.getppid() != plan["parent"]:  # the parent ended before it could be watched
        return
    store = _connect(is_master=False)
    rank, device, backend = first + index, torch.device("cpu"), "gloo"
    try:
        store.set(f"phase/{rank}", "rendezvous")
        torch.set_num_threads(1)
        if plan["backend"] == "nccl":
            local_rank = int(os.environ["LOCAL_RANK"]) + index
            device, backend = torch.device("cuda", local_rank % torch.cuda.device_count()), "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(device)
        group, limit = dist.PrefixStore("ranks", store), timedelta(seconds=COLLECTIVE_SECONDS)
        dist.init_process_group(backend, store=group, rank=rank, world_size=plan["world"], timeout=limit)
        rates = []
        for size in _SIZES[plan["backend"]] if plan["world"] > 1 else ():
            store.set(f"phase/{rank}", f"all-reduce of {size} bytes")
            rates.append((size, time_all_reduce(size, device)))
        store.set(f"rates/{rank}", json.dumps(rates))
        store.set(f"phase/{rank}", "trial save")
        saved = trial_save(Path(plan["folder"], "step-00000001"), _SAVE_BYTES * plan["nodes"], device)
        store.set("saved", json.dumps(saved))
        dist.destroy_process_group()
        os._exit(0)  # remaining gloo threads can abort an interpreter that shuts down
    except Exception as error:
        store.set(f"error/{rank}", " ".join(f"{type(error).__name__}: {error}".split())[:600])
        os._exit(1)  # an orderly shutdown of a broken group could wait forever


def time_all_reduce(num_bytes: int, device: torch.device) -> float:
    """Check the sums of an all-reduce in fp32 and time it, in milliseconds; collective."""
    tensor = torch.ones(num_bytes // 4, device=device)
    dist.all_reduce(tensor)  # also creates connections and buffers
    if not bool((tensor == dist.get_world_size()).all()):
        raise RuntimeError("wrong sums")
    tensor.zero_()  # stays finite in repeated sums
    tensor[0].item()  # waits for the device
    start = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(tensor)
    tensor[0].item()
    return (time.perf_counter() - start) * 1000 / _REPEATS


def trial_save(folder: Path, num_bytes: int, device: torch.device) -> tuple[int, float]:
    """Save and verify a checkpoint with the code of a run; return bytes and seconds; collective."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from lit_fsdp.checkpoint.store import save_checkpoint, verify_files

    rank, world = dist.get_rank(), dist.get_world_size()
    local = torch.randn(max(1, num_bytes // 4096 // world), 1024, device=device)
    tensor = DTensor.from_local(local, init_device_mesh(device.type, (world,)), [Shard(0)], run_check=False)
    start = time.perf_counter()
    save_checkpoint(folder, {"model/trial": tensor}, {"trial": True}, {"global_step": 1}, "sharded", rank_state=rank)
    seconds = time.perf_counter() - start
    verify_files(folder)
    return tensor.numel() * 4, seconds


def _report_ranks(store: dist.Store, plan: Mapping[str, Any], started: int, report: Report) -> None:
    """Add rates and rows after the ranks of all processes have ended."""
    name, world = f"all-reduce by {plan['backend']}", plan["world"]
    ended = _collect(store, "ended", started, RANKS_SECONDS)
    problems = [f"rank {rank}: killed, with its parent" for rank, text in enumerate(ended) if not text]
    problems += [problem for text in ended if text for problem in json.loads(text)]
    problems.sort(key=lambda text: (": killed" not in text, "did not finish" in text))  # the cause first
    found, way_out = "; ".join(problems[:3]), _WAY_OUT[plan["backend"]]
    rates = [json.loads(text) for text in _collect(store, "rates", world) if text]
    for of_size in zip(*rates, strict=True):
        size, ms = of_size[0][0], max(ms for _, ms in of_size)
        bus = size / ms / 1e6 * 2 * (world - 1) / world
        report.rates.append({"bytes": size, "ms": ms, "ranks": world, "bus_gb_per_second": bus})
    if found and len(rates) < world:
        fix = "see dmesg: it may have run out of memory" if "SIGKILL" in found else way_out
        report.rows.append(Row(name, found, "fail", fix))
        return
    if report.rates:
        last = report.rates[-1]
        text = f"{last['bus_gb_per_second']:.2f} GB/s bus at {last['bytes']:,} bytes on {world} ranks"
        report.rows.append(Row(name, text))
    if found:
        fix = "free space, see the owner of the run folder, or set another trainer.default_root_dir"
        report.rows.append(Row("trial save", found, "fail", fix))
    else:
        num_bytes, seconds = json.loads(store.get("saved"))
        rate = num_bytes / seconds / MIB
        text = f"{num_bytes / MIB:.0f} MiB by {world} rank(s) at {rate:.0f} MiB/s, verified"
        report.rows.append(Row("trial save", text))


if __name__ == "__main__":
    print(json.dumps(device_facts()), flush=True)
