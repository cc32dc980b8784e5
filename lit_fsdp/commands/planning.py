"""Before anything is trained: ``audit``, what a recipe would do; ``plan``, whether it fits and how fast it may be;
``model prepare``, fetch its model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_fsdp.commands.parsing import (
    RECIPE,
    columns,
    example_lines,
    flags_of,
    run_one_of,
    size_words,
    verb_parser,
)
from lit_fsdp.errors import ConfigError, require

if TYPE_CHECKING:
    from lit_fsdp.config.parser import LoadedRecipe
    from lit_fsdp.config.run import RunConfig
    from lit_fsdp.plan.memory import StepTime


def run_audit(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp audit`` and return the exit code."""
    text = "The FSDP units, mesh, dtypes and bytes per rank of a recipe, without weights and without training."
    example = "lit-fsdp audit --config recipes/llama3.1-8b_full_fsdp2_8x80gb.yaml --ranks 16"
    parser = verb_parser("audit", text, example, RECIPE)
    parser.add_argument("--ranks", type=int, help="all ranks of the run; default: the recipe's devices and nodes")
    parser.add_argument("--nodes", type=int, help="nodes they are spread over; default: 1 with --ranks")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = parser.parse_known_args(argv)
    from lit_fsdp.config.data import accumulation_steps
    from lit_fsdp.config.run import STRATEGY

    run = _loaded(parser, words, options.ranks, options.nodes, "--ranks").run
    ranks = run.world_size or 1
    try:
        accumulation_steps(run.data, ranks, run.trainer["accumulate_grad_batches"])
    except ConfigError as error:  # on other ranks than the recipe's: the tables do not depend on it
        if not options.ranks:
            raise
        print(f"note: a run on {ranks} ranks would need other batch sizes: {error}", file=sys.stderr)
    from lit_fsdp.audit import audit_recipe, print_recipe_audit

    if run.trainer["accelerator"] == "cpu":
        from lit_fsdp.parallel.precision import check_device

        check_device(run.strategy, "cpu", STRATEGY)
    record = audit_recipe(run)
    print(json.dumps(record, indent=1)) if options.json else print_recipe_audit(record)
    return 0


def _loaded(
    parser: argparse.ArgumentParser, words: list[str], ranks: int | None, nodes: int | None, flag: str
) -> LoadedRecipe:
    """The recipe, on other ranks than its own where they are given by ``flag``, with our own model and strategy."""
    from lit_fsdp.config.parser import load_recipe

    require(ranks or not nodes, "--nodes", f"{nodes} without {flag}", "both, or neither", f"add {flag} N")
    if ranks is not None:
        nodes = nodes or 1
        spread = ranks >= nodes >= 1 and ranks % nodes == 0
        require(spread, "--nodes", f"{nodes} for {ranks} ranks", f"a divisor of {ranks}, both >= 1")
        words = [*words, f"--trainer.devices={ranks // nodes}", f"--trainer.num_nodes={nodes}"]
    loaded = load_recipe(words, "audit", flags_of(parser))
    run = loaded.run
    fix = f"add {flag} N to the command"
    require(run.world_size, "trainer.devices", run.trainer["devices"], "a number of ranks", fix)
    given, allowed = f"somebody else's {', '.join(run.foreign)}", "lit_fsdp's own model and strategy"
    require(not run.foreign - {"data"}, parser.prog.rpartition(" ")[2], given, allowed)
    return loaded


def run_plan(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp plan`` and return the exit code: 1 if nothing fits."""
    gc.disable()  # little is thrown away, and looking for it takes a fifth of the time
    try:
        return _plan(argv)
    finally:
        gc.enable()


def _plan(argv: Sequence[str]) -> int:
    text = (
        "Whether a recipe fits: bytes per rank by kind, the largest micro-batch, seconds per step, and what to choose."
    )
    example = "lit-fsdp plan --config recipes/qwen3-8b_full_fsdp2_4x80gb.yaml --gpu h100-80gb"
    parser = verb_parser("plan", text, example, RECIPE)
    parser.add_argument("--gpu", help="a GPU by name: h100-80gb, a100-40gb, rtx4090, ...")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of a GPU in GiB; default: that of --gpu")
    parser.add_argument("--gpus", type=int, help="all GPUs of the run; default: the recipe's devices and nodes")
    parser.add_argument("--nodes", type=int, help="nodes they are spread over")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs of a node; default: --gpus / --nodes")
    parser.add_argument("--peak-share", type=float, help="share of the peak rate at which it computes; default: 0.4")
    parser.add_argument("--network", type=float, metavar="GB", help="rate of a node in 10**9 bytes/s; default: 50")
    parser.add_argument("--search", action="store_true", help="judge every combination, the fastest first")
    parser.add_argument("--write", metavar="OUT.yaml", help="write the recipe as it is recommended")
    parser.add_argument("--savings", action="store_true", help="only what takes less memory: bytes, and flags to paste")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = parser.parse_known_args(argv)
    if options.gpu or options.memory:
        words.append("--trainer.accelerator=gpu")
    gpus, nodes, each = options.gpus, options.nodes, options.gpus_per_node
    if each:
        nodes = nodes or max(1, (gpus or each) // each)
        gpus = nodes * each if gpus is None else gpus
        fits = gpus == nodes * min(each, gpus)  # a single node may be used in part
        numbers = f"{each} on {nodes} node(s) for {gpus} GPUs"
        require(fits, "--gpus-per-node", numbers, "--gpus / --nodes", "leave one of the three out")
    given = run = _loaded(parser, words, gpus, nodes, "--gpus").run
    from lit_fsdp.plan import memory, search

    gpu = _gpu(options.gpu)
    gib = options.memory or (gpu.memory_gib if gpu else None)
    share, network = options.peak_share or memory.PEAK_SHARE, options.network or memory.NETWORK_GB_PER_SECOND
    require(0 < share <= 1, "--peak-share", share, "a share of the peak, > 0 and <= 1", "write --peak-share 0.4")
    for flag in ("search", "write"):
        is_sized = gib or not getattr(options, flag)
        require(is_sized, f"--{flag}", "no size of a GPU", "--gpu NAME or --memory GIB", "add --gpu h100-80gb")
    if options.write:
        out = Path(options.write)
        fix = f"mkdir -p {out.parent}, or name another"
        require(out.parent.is_dir() and not out.is_dir(), "--write", out, "a file in a folder that exists", fix)

    def time_of(run: RunConfig) -> StepTime | None:
        with contextlib.suppress(ValueError):  # no operations are known, or no rate
            return memory.step_time(run, gpu, share, network) if gpu else None
        return None

    asked, samples = run.data.global_batch_size, _global_batch(run)
    if asked not in (None, samples):
        note = f"note: data.global_batch_size {asked} → {samples}: what {run.world_size} ranks can share out"
        print(note, file=sys.stderr)
    run = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, global_batch_size=samples),
        trainer={**run.trainer, "accumulate_grad_batches": None},
    )
    found = memory.rank_memory(run)
    if options.savings:
        lighter = list(search.savings(run, bool(given.trainer["accumulate_grad_batches"])))
        as_json = [one._asdict() for one in lighter]
        print(json.dumps(as_json, indent=1) if options.json else _savings_table(found, lighter))
        return 0
    record: dict[str, Any] = {
        "gpu": None if gpu is None else dataclasses.asdict(gpu),
        "memory_gib": gib,
        "memory": {**dataclasses.asdict(found), "peak": found.peak, "overhead": memory.OVERHEAD_BYTES},
        "zero": memory.zero_table(run),
    }
    heads = ["parameters, gradients and AdamW", *record["zero"]]
    cells = [f"GiB per rank on {run.world_size}", *(f"{size / 2**30:.2f}" for size in record["zero"].values())]
    lines = [_memory_table(found), "", columns([heads, cells], right=heads[1:])]
    taken = time_of(run)
    if taken is not None:
        record["step"] = {**dataclasses.asdict(taken), "tokens_per_second": taken.tokens_per_second}
        lines += [
            "",
            f"seconds per step: {taken.seconds:.3g} = {taken.compute:.3g} computing at {share:.0%} of the peak + "
            f"{taken.exposed:.3g} of {taken.communication:.3g} sending that nothing hides",
            f"tokens per second: {taken.tokens_per_second:,.0f} (every sample as long as it may be; a node sends "
            f"{network:g} GB/s)",
        ]
    elif gpu is not None:
        lines += ["", "seconds per step: no operations are known for this architecture, or no rate for this precision"]
    best: Any = None
    reasons: list[str] = []
    if gib is not None:
        record["fits"], rows = found.room(gib) >= 0, search.largest_rows(run, gib)
        record["largest_micro_batch"] = rows
        verdict = "fits" if record["fits"] else f"does not fit: {-found.room(gib) / 2**30:.1f} GiB too much"
        lines += ["", f"on {gib:g} GiB: {verdict}; largest micro-batch: {rows or 'none'}"]
        if options.search:
            results = search.search(run, gib, time_of)
            record["search"] = [result for _, result in results]
            lines += ["", _search_table(record["search"])]
            same = (one for one in results if (one[0].run.model.lora is None) == (run.model.lora is None))
            best = next((one for one in same if one[1]["tokens_per_second"]), None)  # adapters train something else
        if best is None:
            best, reasons = search.recommend(run, gib, time_of)
        record["recommended"] = best and best[1]
        lines += ["", *reasons]
        if best is None:
            lines.append(f"nothing fits into {gib:g} GiB: take more GPUs, larger ones, a shorter data.max_seq_length")
        else:
            changes = "".join(f"\n  {flag}" for flag in best[0].flags) or " (as the recipe has it)"
            lines.append(f"recommended: {best[0].words}, micro-batch {best[1]['micro_batch_size']}{changes}")
    if options.write:
        require(best, "--write", options.write, "a choice that fits", "more GPUs, or larger ones")
        flags = [*best[0].flags, f"--data.global_batch_size {run.data.global_batch_size}"]
        flags.append("--trainer.accumulate_grad_batches null")
        words += [word for flag in flags for word in flag.split(" ", 1)]
        values = _loaded(parser, words, gpus, nodes, "--gpus").values
        out.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        lines.append(f"written: {options.write}")
    print(json.dumps(record, indent=1) if options.json else "\n".join(lines))
    return 0 if gib is None or best is not None else 1


def _gpu(name: str | None) -> Any:
    from lit_fsdp.metrics.hardware import gpus

    if name is None:
        return None
    known = {gpu.name: gpu for gpu in gpus()}
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.3)
    fix = f"write {near[0]}; or --memory GIB for any other" if near else "write --memory GIB"
    require(name.lower() in known, "--gpu", name, ", ".join(near or known), fix)
    return known[name.lower()]


def _global_batch(run: Any) -> int:
    """Samples per step: the recipe's, or the nearest that these ranks can share out."""
    from lit_fsdp.config.data import DEFAULT_BATCH

    per_forward = run.data.micro_batch_size * run.world_size
    steps = run.trainer["accumulate_grad_batches"]
    if run.data.global_batch_size is None and steps:
        return int(steps) * per_forward
    return max(1, round((run.data.global_batch_size or DEFAULT_BATCH) / per_forward)) * per_forward


def _memory_table(found: Any) -> str:
    from lit_fsdp.plan.memory import OVERHEAD_BYTES

    step, where = found.step, " (in host memory)" if found.offloads else ""
    at_loss, elsewhere = step.moment in ("forward", "head"), ", at another moment"
    kinds = [
        (f"parameters{where}", found.parameters),
        (f"optimizer state{where}", found.optimizer),
        (f"gradients{where}", step.gradients),
        ("activations that all blocks keep", step.kept),
        (f"one block at work{elsewhere if at_loss else ''}", step.block),
        (f"head, logits and loss{'' if at_loss else elsewhere}", step.loss),
        ("gathered weights, in use and prefetched", step.gathered),
        ("gradients being reduced", step.reduced),
        ("framework (assumed: context, NCCL, cuBLAS)", OVERHEAD_BYTES),
        (f"highest moment ({step.moment}), on the device", found.peak + OVERHEAD_BYTES),
        ("between steps", found.parameters + found.optimizer + found.gradients),
        ("while loading", found.parameters + found.largest_tensor),
        ("on the host for a save in the background", found.parameters + found.optimizer),
    ]
    rows = [("bytes of the rank that holds most", "GiB"), *((kind, f"{size / 2**30:.2f}") for kind, size in kinds)]
    return columns(rows, right=("GiB",))


def _savings_table(found: Any, lighter: Sequence[Any]) -> str:
    peak = f"predicted per rank at the highest moment ({found.step.moment}): {size_words(found.peak)}"
    if not lighter:
        return f"{peak}; no other choice of the planner takes less"
    rows = [(size_words(one.num_bytes), one.remark, one.flags) for one in lighter]
    table = columns([("less", "what changes", "to paste"), *rows], right=("less",))
    return f"{peak}. Each of these by itself takes less, in the order to try them:\n{table}"


def _search_table(results: Sequence[dict[str, Any]]) -> str:
    heads = ("choice", "micro-batch", "GiB", "tokens/s")
    rows = [
        (
            found["choice"],
            str(found["micro_batch_size"] or "does not fit"),
            f"{found['peak'] / 2**30:.1f}",
            f"{found['tokens_per_second']:,.0f}" if found["tokens_per_second"] else "-",
        )
        for found in results
    ]
    return columns([heads, *rows], right=heads[1:])


_PREPARE = "lit-fsdp model prepare --name HuggingFaceTB/SmolLM2-135M-Instruct"
_USAGE = f"""usage: lit-fsdp model prepare {RECIPE}

  prepare   fetch or convert a model ahead of a run, on a login node say

{example_lines(_PREPARE)}"""


def run_model(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp model prepare`` and return the exit code."""
    return run_one_of("model", {"prepare": _prepare}, _USAGE, argv)


def _prepare(argv: Sequence[str]) -> int:
    text = (
        "Fetch a model and its tokenizer from the hub, or convert them, into the caches that a run reads: on a login \
node, say, for compute nodes without a network. What is there already is only looked at."
    )
    parser = verb_parser("model prepare", text, _PREPARE, RECIPE)
    parser.add_argument("--name", help="hub name, folder or GGUF file; default: model.name of the recipe")
    parser.add_argument("--json", action="store_true", help="JSON instead of lines on standard output")
    options, words = parser.parse_known_args(argv)
    from lit_fsdp.config.parser import load_recipe

    words += [f"--model.name={options.name}"] if options.name else []
    config = load_recipe(words, "model", flags_of(parser)).run.model
    from lit_fsdp.models.resolve import prepare_model
    from lit_fsdp.speak import speak

    speak()
    record = prepare_model(config)
    if options.json:
        print(json.dumps(record, indent=1))
        return 0
    for what in ("weights", "tokenizer"):
        print(f"{what:<10}{record[what] or 'made here, nothing to fetch'}")
    return 0
