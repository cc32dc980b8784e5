"""Verbs before training: ``audit`` shows what a recipe would do, ``plan`` estimates memory and speed, and
``model prepare`` fetches its model.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import gc
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_fsdp.commands import parsing
from lit_fsdp.commands.parsing import RECIPE, columns, verb_parser
from lit_fsdp.config.parser import LoadedRecipe, load_recipe
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.strategy import check_accumulation
from lit_fsdp.errors import require
from lit_fsdp.host import heavy_imports, size_words
from lit_fsdp.redaction import redact_values

if TYPE_CHECKING:
    from lit_fsdp.metrics.hardware import Gpu
    from lit_fsdp.plan.memory import RankMemory


def run_audit(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp audit`` and return the exit code."""
    text = "Show the FSDP units, mesh, dtypes and bytes per rank of a recipe, without weights or training."
    example = "lit-fsdp audit --config recipes/llama3.1-8b_full_fsdp2_8x80gb.yaml --ranks 16"
    parser = verb_parser("audit", text, example, RECIPE)
    parser.add_argument("--ranks", type=int, help="total ranks of the run; default: the recipe's devices and nodes")
    parser.add_argument("--nodes", type=int, help="number of nodes; default: 1 with --ranks")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = parser.parse_known_args(argv)
    with heavy_imports():
        from lit_fsdp.audit import audit_recipe, print_recipe_audit

    record = audit_recipe(_loaded(parser, words, options.ranks, options.nodes, "--ranks").run)
    print(json.dumps(record, indent=1)) if options.json else print_recipe_audit(record)
    return 0


def _loaded(
    parser: argparse.ArgumentParser, words: list[str], ranks: int | None, nodes: int | None, flag: str
) -> LoadedRecipe:
    """Load a recipe with our own model and strategy, on the number of ranks given by ``flag``, if any."""
    also = parsing.flags_of(parser)
    require(ranks or not nodes, "--nodes", f"{nodes} without {flag}", "both or neither", f"add {flag} N")
    if ranks is not None:
        nodes = nodes or 1
        spread = ranks >= nodes >= 1 and ranks % nodes == 0
        require(spread, "--nodes", f"{nodes} for {ranks} ranks", f"a divisor of {ranks}, both >= 1")
        short = {"trainer.devices": (flag, ranks // nodes), "trainer.num_nodes": ("--nodes", nodes)}
        parsing.refuse_two_values(short, words, also)
        words = [*words, *(f"--{key}={value}" for key, (_, value) in short.items())]
    loaded = load_recipe(words, "audit", also)
    run = loaded.run
    fix = f"add {flag} N to the command"
    require(run.world_size, "trainer.devices", run.trainer["devices"], "a number of ranks", fix)
    given, allowed = f"a third-party {', '.join(run.foreign)}", "lit_fsdp's own model and strategy"
    fix = "lit-fsdp fit prints the units and dtypes of a module of your own before step 1"
    require(not run.foreign - {"data"}, parser.prog.rpartition(" ")[2], given, allowed, fix)
    return loaded


def run_plan(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp plan`` and return the exit code: 1 if the recipe does not fit, or with --write if nothing does."""
    text = "Estimate whether a recipe fits: bytes per rank, largest micro-batch, seconds per step, best settings."
    example = "lit-fsdp plan --config recipes/qwen3-8b_full_fsdp2_4x80gb.yaml --gpu h100-80gb"
    parser = verb_parser("plan", text, example, RECIPE)
    parser.add_argument("--gpu", help="name of the GPU: h100-80gb, a100-40gb, rtx4090, ...")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of a GPU in GiB; default: that of --gpu")
    parser.add_argument(
        "--host-memory", type=float, metavar="GIB", help="host memory of a node in GiB; on CPUs, default: of this host"
    )
    parser.add_argument("--gpus", type=int, help="total GPUs of the run; default: the recipe's devices and nodes")
    parser.add_argument("--nodes", type=int, help="number of nodes")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs per node; default: --gpus / --nodes")
    parser.add_argument("--search", action="store_true", help="evaluate all combinations, fastest first")
    parser.add_argument("--write", type=Path, metavar="OUT.yaml", help="write the recommended recipe")
    parser.add_argument("--savings", action="store_true", help="only options that save memory, with flags to paste")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = parser.parse_known_args(argv)
    for name in ("memory", "host_memory", "gpus", "nodes", "gpus_per_node"):
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        require(value is None or value > 0, flag, value, "a number greater than 0")
    require(not (options.savings and options.json), "--json", "with --savings", "only one of them")
    if options.gpu or options.memory:
        words.append("--trainer.accelerator=gpu")
    gpus, nodes = _gpus_and_nodes(options)
    run = _loaded(parser, words, gpus, nodes, "--gpus").run
    steps = run.accumulation_steps()
    check_accumulation(run.strategy, steps, STRATEGY, f"data.micro_batch_size: {steps * run.data.micro_batch_size}")
    data = dataclasses.replace(run.data, global_batch_size=steps * run.data.micro_batch_size * run.data_ranks)
    run = dataclasses.replace(run, data=data, trainer={**run.trainer, "accumulate_grad_batches": None})
    gc.set_threshold(100_000)  # there is little garbage, and collecting it takes a fifth of the time
    with heavy_imports():
        from lit_fsdp.metrics.hardware import host_bytes
        from lit_fsdp.plan import memory, search

    gpu = _gpu(options.gpu) if options.gpu else None
    gib = options.memory or (gpu.memory_gib if gpu else None)
    is_sized = gib or not (options.search or options.write)
    require(is_sized, "--search, --write", "no GPU memory size", "--gpu NAME or --memory GIB", "add --gpu h100-80gb")
    found = memory.rank_memory(run)
    on_cpu, host_gib = run.trainer.get("accelerator") == "cpu", options.host_memory or math.inf
    if on_cpu and not options.host_memory:
        host_gib = host_bytes() / 2**30
    host = memory.host_memory(run)
    too_much = host["total"] / 2**30 - host_gib * memory.HOST_USABLE
    fits_host = "fits" if too_much <= 0 else f"does not fit: exceeds it by {too_much:.1f} GiB"
    fits_host = f"a host of {host_gib:.4g} GiB ({memory.HOST_USABLE:.0%} of it usable): {fits_host}"
    if options.savings:
        given = "with --savings, which compares the memory of GPUs"
        require(on_cpu or not options.host_memory, "--host-memory", given, "only one of them")
        room = found.room(gib) if gib else None
        if on_cpu:  # of one rank, as the ranks of a node share its memory
            room = -too_much * 2**30 * run.num_nodes / (run.world_size or 1)
            print(f"this recipe on {fits_host}.")
        _print_savings(run, found, room, gib, gpu)
        return 0
    taken = memory.step_time(run, gpu)
    record: dict[str, Any] = {
        "gpu": None if gpu is None else dataclasses.asdict(gpu),
        "memory_gib": gib,
        "memory": {
            **dataclasses.asdict(found),
            "peak": found.peak,
            "overhead": memory.OVERHEAD_BYTES * ("peaks" not in host),
        },
        "host": host,
        "host_memory_gib": host_gib if host_gib < math.inf else None,
        "fits_host": too_much <= 0,
        "zero": memory.zero_table(run),
        "step": taken,
    }
    heads = ["parameters, gradients and AdamW", *record["zero"]]
    cells = [f"GiB per rank on {run.world_size}", *(f"{size / 2**30:.2f}" for size in record["zero"].values())]
    lines = [_memory_table(found, host), "", columns([heads, cells], right=heads[1:]), ""]
    if (sent := memory.expert_bytes(run)) is not None:
        record["experts"] = sent
        lines.append(_experts(sent))
    if host_gib < math.inf:
        lines.append(f"this recipe on {fits_host}")
    if taken is not None:
        lines.append(_speed(taken))
    elif gpu is not None:
        lines.append("seconds per step: unknown FLOPs of this architecture, or unknown rate of this precision")
    if gib is None:
        fits = "plan for GPUs" if on_cpu else "check whether it fits"
        lines.append(f"add --gpu NAME, such as h100-80gb, to {fits} and to estimate the speed")
    best = None
    if gib is not None:
        room, rows = found.room(gib), search.largest_rows(run, gib)
        verdict = f"micro-batch {run.data.micro_batch_size} {_verdict(found, gib)}"
        lines += [f"{verdict}; largest micro-batch that fits: {rows or 'none'}"]
        lines += ["add --savings for options that save memory, in the order to try them"] * (room < 0) + [""]
        best, tried = search.recommend(run, gib, gpu, options.search, host_gib)
        record |= {"fits": room >= 0, "largest_micro_batch": rows, "tried": tried, "recommended": best}
        if options.search:
            lines += [_search_table(tried), ""]
        else:
            lines += [_too_large(one, host_gib) for one in tried if not one["fits"]]
    if best is not None:
        has_room = gib is not None and found.room(gib) >= 0 and too_much <= 0
        lines.append(_recommended(best, taken, has_room and not (options.search or options.write)))
        if not options.search:
            lines.append("add --search for all choices, their host memory, and adapters (LoRA, QLoRA)")
    elif gib is not None:
        lines.append(f"nothing fits into {gib:g} GiB: use more or larger GPUs, or a shorter data.max_seq_length")
    if options.write and best is not None:
        batch = {"data.global_batch_size": run.data.global_batch_size, "trainer.accumulate_grad_batches": None}
        words += [word for flag in search.flags_of({**best["changes"], **batch}) for word in shlex.split(flag)]
        values = _loaded(parser, words, gpus, nodes, "--gpus").values
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(yaml.safe_dump(redact_values(values), sort_keys=False), encoding="utf-8")
        lines.append(f"written: {options.write}")
    print(json.dumps(record, indent=1) if options.json else "\n".join(lines))
    if options.write:
        return 0 if best is not None else 1
    return 0 if too_much <= 0 and (gib is None or found.room(gib) >= 0) else 1


def _gpus_and_nodes(options: argparse.Namespace) -> tuple[int | None, int | None]:
    """The numbers of GPUs and nodes; the GPUs per node may stand in for one of them."""
    gpus, nodes, each = options.gpus, options.nodes, options.gpus_per_node
    if each:
        nodes = nodes or max(1, (gpus or each) // each)
        gpus = nodes * each if gpus is None else gpus
        fits = gpus == nodes * min(each, gpus)  # a single node may be used partially
        numbers, allowed = f"{each} on {nodes} node(s) for {gpus} GPUs", "--gpus / --nodes; omit one of the three"
        require(fits, "--gpus-per-node", numbers, allowed)
    return gpus, nodes


def _print_savings(run: RunConfig, found: RankMemory, room: float | None, gib: float | None, gpu: Gpu | None) -> None:
    """Print the options that save memory, and for GPUs a combination if none is enough alone.

    The ``room`` is the free memory of a rank in bytes, negative if the run does not fit, None if the size is unknown.
    """
    from lit_fsdp.audit import device_type
    from lit_fsdp.plan import memory, search

    is_sized = room is not None
    lighter = [["less", *["then fits"] * is_sized, "what changes", "to paste"]]
    for one in search.savings(run):
        saved = one["num_bytes"]
        then = [] if room is None else ["?" if saved is None else "no" if room + saved < 0 else "yes"]
        lighter.append(["?" if saved is None else size_words(saved), *then, one["remark"], one["flags"]])
    if len(lighter) == 1:
        lighter.append(["-", *["-"] * is_sized, "no other option of the planner", "-"])
    peak = size_words(found.peak + memory.OVERHEAD_BYTES * (device_type(run) != "cpu"))
    fits = f"; it {_verdict(found, gib)}" if gib else ""
    print(f"predicted peak per rank ({found.step.moment}): {peak}{fits}.")
    print("Each of these options alone saves memory; try them in this order:")
    print(columns(lighter, right=("less",)))
    if gib and (room or 0) < 0 and not any("yes" in row for row in lighter):
        best, _ = search.recommend(run, gib, gpu, False)
        flags = search.flags_of(best["changes"]) if best else ["none; lit-fsdp plan --search also tries adapters"]
        print(f"None of them is enough alone. A combination that fits: {' '.join(flags)}")


def _experts(sent: Mapping[str, float]) -> str:
    """Format what a rank sends with and without expert parallel."""
    degree = int(sent["degree"])
    better = "expert_parallel: 1" if sent["weights"] <= sent["tokens"] else f"expert_parallel: {degree}"
    return (
        f"experts: a rank sends {size_words(sent['weights'])} of weights per step, or "
        f"{size_words(sent['tokens'])} of tokens and weights with expert_parallel: {degree}; {better} sends less"
    )


def _speed(taken: Mapping[str, float]) -> str:
    """Format the time of a step and its parts."""
    from lit_fsdp.plan.memory import NETWORK_GB_PER_SECOND, PEAK_SHARE

    kinds = {
        "communication": "communication",
        "copies": "copying from and to the host",
        "activations": "copying activations from and to the host",
    }
    moved = " and ".join(f"{taken[kind]:.2f} s {text}" for kind, text in kinds.items() if taken[kind])
    rate = f" (a node sends {NETWORK_GB_PER_SECOND:g} GB/s)"
    return (
        f"{taken['compute'] + taken['exposed'] + taken['host']:.3g} seconds per step: {taken['compute']:.3g} "
        f"computing at {PEAK_SHARE:.0%} of the peak"
        + (f", {taken['host']:.3g} waiting and stepping on the host; " if taken["host"] else "; ")
        + (f"{taken['exposed']:.2f} s of {moved} is exposed{rate}; " if moved else "")
        + f"{taken['tokens_per_second']:,.0f} tokens/s"
    )


def _recommended(best: Mapping[str, Any], taken: Mapping[str, float] | None, may_stay: bool) -> str:
    """Format the best choice, with its flags to paste; if it is not faster, the recipe, which ``may_stay``."""
    from lit_fsdp.plan.search import flags_of

    changes = "".join(f"\n  {flag}" for flag in flags_of(best["changes"])) or " (same as the recipe)"
    needs = f", {best['host'] / 2**30:.0f} GiB of host memory per node" if "cpu_offload" in best["choice"] else ""
    rate = best["tokens_per_second"]
    if rate is not None and taken is not None:
        gain = f"{rate / taken['tokens_per_second']:.2f} × the recipe's"
        if may_stay and rate <= 1.02 * taken["tokens_per_second"] and best["changes"]:
            other = f"{best['choice']}, micro-batch {best['micro_batch_size']}"
            return f"recommended: the recipe; {other} has {gain} tokens/s"
        needs += f", {rate:,.0f} tokens/s ({gain})"
    return f"recommended: {best['choice']}, micro-batch {best['micro_batch_size']}{needs}{changes}"


def _too_large(tried: Mapping[str, Any], host_gib: float) -> str:
    """Format a choice that does not fit, with the memory that is too small for it."""
    from lit_fsdp.plan.memory import HOST_USABLE, OVERHEAD_BYTES

    host, choice = tried["host"] / 2**30, tried["choice"]
    choice += "" if "recompute" in choice else ", without recomputation,"
    if host > host_gib * HOST_USABLE:
        return f"{choice} does not fit: it needs {host:.0f} GiB of host memory per node"
    least = (tried["peak"] + OVERHEAD_BYTES) / 2**30
    return f"{choice} does not fit: it needs at least {least:.1f} GiB per GPU"


def _verdict(found: RankMemory, gib: float) -> str:
    from lit_fsdp.plan.memory import USABLE

    room, usable = found.room(gib) / 2**30, f"{gib:g} GiB ({USABLE:.0%} of it usable)"
    return f"fits into {usable}" if room >= 0 else f"does not fit into {usable}: exceeds it by {-room:.1f} GiB"


def _gpu(name: str) -> Gpu:
    from lit_fsdp.metrics.hardware import gpus

    known = {gpu.name: gpu for gpu in gpus()}
    near = [one for one in known if one.startswith(name.lower())]  # h100: 80 GB or 94 GB
    near = near or difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.3)
    near = [one for one in near if _number_in(one).startswith(_number_in(name))]  # rtx3060 is not rtx3090
    if size := re.fullmatch(r"(\d+) *gi?b?", name.lower()):
        near = []
    fix = f"write {near[0]}; or --memory GIB for other GPUs" if near else f"write --memory {size[1] if size else 'GIB'}"
    require(name.lower() in known, "--gpu", name, ", ".join(known), fix)
    return known[name.lower()]


def _number_in(name: str) -> str:
    """Return the first number in the name of a GPU, which names its model."""
    return next(iter(re.findall(r"\d+", name)), "")


_HOST_KINDS = {"activations": "offloaded activations", "peaks": "peaks of its ranks, which train on the CPU"}


def _memory_table(found: RankMemory, host: Mapping[str, int]) -> str:
    from lit_fsdp.plan.memory import OVERHEAD_BYTES

    step, where = found.step, " (in host memory)" if found.offloads else ""
    overhead = 0 if "peaks" in host else OVERHEAD_BYTES
    kinds = [
        (f"parameters{where}", found.parameters),
        (f"optimizer state{where}", found.optimizer),
        (f"gradients{where}", found.gradients if found.offloads else step.gradients),
        ("saved activations of all blocks", step.kept),
        ("peak of one active block", step.block),
        ("peak of head, logits and loss", step.loss),
        ("gathered weights, in use and prefetched", step.gathered),
        ("gradients being reduced", step.reduced),
        *([("framework (assumed: context, NCCL, cuBLAS)", overhead)] if overhead else []),
        (f"peak of the device ({step.moment}; block and head peaks do not coincide)", found.peak + overhead),
        (f"between steps{where}", found.parameters + found.optimizer + found.gradients),
        ("while loading", found.parameters + found.largest_tensor),
        ("host of a node: state of cpu_offload", host["state"]),
        *((f"host of a node: {kind}", host[name]) for name, kind in _HOST_KINDS.items() if name in host),
        ("host of a node: rounding of its pinned blocks", host["rounding"]),
        ("host of a node: copy for background saves", host["staged"]),
        ("host of a node: processes (assumed)", host["processes"]),
        ("host of a node, total", host["total"]),
    ]
    rows = [("bytes of the largest rank", "GiB"), *((kind, f"{size / 2**30:.2f}") for kind, size in kinds)]
    return columns(rows, right=("GiB",))


def _search_table(results: Sequence[dict[str, Any]]) -> str:
    from lit_fsdp.plan.memory import OVERHEAD_BYTES

    heads = ("choice", "micro-batch", "GiB", "host GiB", "tokens/s")
    rows = []
    for found in results:
        rate = f"{found['tokens_per_second']:,.0f}" if found["tokens_per_second"] else "-"
        sizes = f"{(found['peak'] + OVERHEAD_BYTES) / 2**30:.1f}", f"{found['host'] / 2**30:.0f}"
        rows.append((found["choice"], str(found["micro_batch_size"] or "none"), *sizes, rate))
    return columns([heads, *rows], right=heads[1:])


def run_model(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp model prepare`` and return the exit code."""
    text = "download or convert a model and its tokenizer into the caches"
    return parsing.run_one_of("model", {"prepare": (text, _prepare)}, argv)


def _prepare(argv: Sequence[str]) -> int:
    text = (
        "Download a model and its tokenizer from the Hub, or convert them, into the caches that a run reads, e.g. on a "
        "login node for compute nodes without a network. Existing cache entries are reused."
    )
    example = "lit-fsdp model prepare --name HuggingFaceTB/SmolLM2-135M-Instruct"
    parser = verb_parser("model prepare", text, example, RECIPE)
    parser.add_argument("--name", help="hub name, folder or GGUF file; default: model.name of the recipe")
    options, words = parser.parse_known_args(argv)
    words += [f"--model.name={options.name}"] if options.name else []
    config = load_recipe(words, "model", parsing.flags_of(parser)).run.model
    from lit_fsdp.logs import setup_logging
    from lit_fsdp.models.resolve import prepare_model

    setup_logging()
    for what, folder in prepare_model(config).items():
        print(f"{what:<10}{folder or 'made here, nothing to download'}")
    return 0
