"""``make bench-growth``: seconds and bytes as functions of parameters, experts, ranks, rows, steps and checkpoints.

    python tests/benchmarks/growth.py [--only audit packs …] [--largest]

Each figure is of a fresh process: CPU seconds (and wall seconds) of the work alone, and the peak of the resident set
above what is resident after the imports, inputs included. Ranks are simulated: torch's fake process group for what one
of them does, and for what rank 0 does with what all send it, objects that were pickled as on the way to it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from record import ROOT, bench, python

Steps = Iterator[None]
"""A measure: it yields once its imports are done, once its input is there, and then does what is measured."""
_SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "8B": ("Llama-3.1-8B", {}),
    "70B": ("Llama-3.1-70B", {}),
    "405B": ("Llama-3.1-70B", {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}),
    "692B": ("Llama-3.1-70B", {"hidden_size": 20480, "intermediate_size": 65536, "num_hidden_layers": 140}),
}
for _number in (8, 64, 256):
    _SHAPES[f"{_number} experts"] = ("Mixtral-8x7B-v0.1", {"num_local_experts": _number, "intermediate_size": 2048})
_WORDS = "the same short row of some words again"


def judge(verb: str, *flags: str) -> Callable[[Any, Path], Steps]:
    """``audit`` or ``plan`` of a model on 512 ranks, or of 70B on so many."""

    def steps(size: Any, folder: Path) -> Steps:
        from lit_fsdp import audit
        from lit_fsdp.commands import planning

        model, ranks = (size, 512) if isinstance(size, str) else ("70B", size)
        name, changes = _SHAPES[model]
        values = json.loads((ROOT / f"configs/model/{name}.json").read_text()) | changes
        del values["_hub_names"]
        values["num_attention_heads"] = values["hidden_size"] // 128
        (folder / "config.json").write_text(json.dumps(values))
        words = [f"--model.name={folder / 'config.json'}", "--data.train=generated:8", "--trainer.max_steps=1"]
        words += ["--trainer.strategy=lit_fsdp.fsdp_strategy", f"--data.global_batch_size={ranks}"]
        assert audit
        yield
        yield
        getattr(planning, verb)([*words, *flags, str(ranks), f"--nodes={ranks // 8}"])

    return steps


def one_rank(size: int, folder: Path) -> Steps:
    """Rank 0 wraps and fills an 8B model on meta, is compared with the others, and plans its part of a save."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lit_fsdp.audit import CausalLMModule
    from lit_fsdp.checkpoint.storage import Planner, parts_of
    from lit_fsdp.config.strategy import StrategyConfig, mesh_shape
    from lit_fsdp.parallel import alike
    from lit_fsdp.parallel.fully_sharded import apply_fully_shard, unit_options
    from lit_fsdp.parallel.materialize import Materializer
    from lit_fsdp.parallel.mesh import build_mesh
    from lit_fsdp.parallel.precision import cast_parameters
    from lit_fsdp.parallel.units import plan_for

    def gather(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [_sent(own) for _ in found]

    def read(name: str, module: Any, attribute: str, rows: slice | None) -> Any:
        whole = getattr(module, attribute)
        return whole if rows is None else torch.empty(rows.stop - rows.start, *whole.shape[1:], device="meta")

    _import_torch()
    yield
    dist.all_gather_object = gather
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    yield
    config, module = StrategyConfig(precision="mixed"), CausalLMModule(_llama())
    cast_parameters(module, config)
    units, filler = plan_for(module, config, "strategy"), Materializer(module, read, torch.device("meta"))
    mesh = build_mesh("cpu", *mesh_shape(config, size // 8, size), timedelta(seconds=9))
    apply_fully_shard(module, units, config, unit_options(config, mesh), [], lambda _: None, False)
    filler.fill_all()
    alike.check_alike("comparing parameters", alike.tensors_of(module, True))
    tensors = {f"{kind}/{name}": param for kind in _KINDS for name, param in module.named_parameters()}
    Planner(_snapshot(folder, _specs(tensors), parts_of(tensors, "sharded", 0, size)[1])).create_local_plan()


def save_first(size: int, folder: Path) -> Steps:
    from lit_fsdp.checkpoint.manifest import Chunk
    from lit_fsdp.checkpoint.storage import FileEntry, Planner, Writer, _result

    _import_torch()
    yield
    specs = _specs({f"{kind}/{name}": param for kind in _KINDS for name, param in _llama().named_parameters()})
    plans, results = [], []
    for rank in range(size):
        planner, name = (
            Planner(_snapshot(folder, specs, _chunks(specs, rank, size))),
            f"tensors/rank-{rank:05d}.safetensors",
        )
        plans.append(_sent(planner.create_local_plan()))
        parts = {
            i.index.fqn: Chunk(name, tuple(i.index.offset), tuple(i.tensor_data.chunk.sizes))
            for i in planner.plan.items
        }
        results.append(_sent([_result(name, FileEntry(0, "0" * 32), parts)]))
    planner.set_up_planner({}, None, True)
    yield
    writer = Writer(planner._snapshot)
    found, metadata = planner.create_global_plan(plans)
    draft = folder / writer.prepare_global_plan(found)[0].storage_data[1]
    (draft / "tensors").mkdir()
    for rank in range(size):
        (draft / f"tensors/rank-{rank:05d}.safetensors").touch()
    writer.finish(metadata, results)


def resume_part(size: int, folder: Path) -> Steps:
    from lit_fsdp.checkpoint.manifest import read_manifest
    from lit_fsdp.checkpoint.storage import Reader

    python([__file__, "--once", "save_first", size, folder, folder / "made.json"])
    _import_torch()
    yield
    yield
    Reader(read_manifest(folder / "step-1"))


def _import_torch() -> None:
    from torch.distributed import checkpoint
    from transformers import LlamaForCausalLM

    assert checkpoint.__name__ != LlamaForCausalLM.__name__  # imported before anything is measured


def _llama() -> Any:
    from transformers import LlamaConfig

    from lit_fsdp.models.build import build_on_meta

    return build_on_meta(LlamaConfig(**json.loads((ROOT / "configs/model/Llama-3.1-8B.json").read_text())))


def _specs(tensors: dict[str, Any]) -> dict[str, Any]:
    from lit_fsdp.checkpoint.safetensors_file import spec_of

    return {name: spec_of(tensor) for name, tensor in tensors.items()}


def _chunks(specs: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """What a rank has of each tensor, as ``fully_shard`` cuts it."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    found = {}
    for name, spec in specs.items():
        rows, *rest = spec.shape
        chunk = -(-rows // ranks)
        start, end = min(rows, rank * chunk), min(rows, (rank + 1) * chunk)
        if end > start:
            sizes = torch.Size([end - start, *rest])
            found[name] = ChunkStorageMetadata(torch.Size([start, *(0 for _ in rest)]), sizes)
    return found


def _snapshot(folder: Path, specs: dict[str, Any], chunks: dict[str, Any]) -> Any:
    from lit_fsdp.checkpoint.storage import Snapshot

    extra = {"global_step": 1, "metrics": {}}
    rest = {"tensors": {}, "rank_state": None, "extra": extra}
    return Snapshot(folder=folder / "step-1", layout="sharded", specs=specs, chunks=chunks, **rest)


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def tokenize(size: int, folder: Path) -> Steps:
    from lit_fsdp.config.data import DataConfig
    from lit_fsdp.data.cache import prepare_rows
    from lit_fsdp.data.encode import RowEncoder
    from lit_fsdp.models.tokenizers import miniature_tokenizer

    yield
    config = DataConfig(train=_text(folder, size), max_seq_length=512, cache_dir=str(folder), num_tokenizers=1)
    yield
    prepare_rows(config.train, config, RowEncoder(miniature_tokenizer(), config))


def packs(size: int, folder: Path, capacity: int = 4096) -> Steps:
    import numpy as np

    from lit_fsdp.data.packing import plan_packs

    yield
    lengths = np.random.default_rng(0).lognormal(np.log(capacity / 12), 1.0, size)
    lengths = np.clip(lengths.astype(np.int32), 1, capacity)
    yield
    plan_packs(lengths, capacity)


def seek(size: int, folder: Path, weights: tuple[float, ...] = ()) -> Steps:
    """The first batch of a data set of ten million rows of one token, for a run that goes on from a step."""
    import numpy as np
    import torch

    from lit_fsdp import CausalLMDataModule
    from lit_fsdp.data.cache import ARRAYS, TokenizedRows
    from lit_fsdp.data.packing import Samples
    from lit_fsdp.models.tokenizers import miniature_tokenizer

    yield
    rows = 10_000_000
    arrays = {name: np.ones(rows, dtype) for name, dtype in ARRAYS.items()}
    tokenized = TokenizedRows(folder, {"digests": []}, **arrays)
    groups = (rows // 2, rows // 4, rows - rows // 2 - rows // 4) if weights else (rows,)
    samples = Samples(tokenized, np.arange(rows), np.arange(rows + 1), groups, weights)
    module = CausalLMDataModule(train="generated:8", global_batch_size=8, num_workers=0)
    module.attach(miniature_tokenizer(), 0)
    module._samples = {"train": samples}
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module.trainer = SimpleNamespace(world_size=8, global_rank=0, global_step=size, strategy=strategy)
    yield
    next(iter(module.train_dataloader()))


def seek_stream(size: int, folder: Path) -> Steps:
    from lit_fsdp.config.data import DataConfig
    from lit_fsdp.data.encode import RowEncoder
    from lit_fsdp.data.stream import SampleStream
    from lit_fsdp.models.tokenizers import miniature_tokenizer

    yield
    config = DataConfig(train=_text(folder, 1_100_000), streaming=True, global_batch_size=8)
    stream = SampleStream(config, RowEncoder(miniature_tokenizer(), config), 0)
    at = {"epoch": 0, "window": 0, "item": 0, "sources": [{"part": 0, "row": size, "ended": 0, "taken": size}]}
    yield
    next(stream.global_batches(at))


def _text(folder: Path, rows: int) -> str:
    file = folder / "rows.jsonl"
    with file.open("w") as out:
        out.writelines(f'{{"text": "{number} {_WORDS}"}}\n' for number in range(rows))
    return str(file)


def weights(size: int, folder: Path) -> Steps:
    """Every tensor of a model file; experts on the hub have one each."""
    import torch
    from safetensors.torch import save_file

    from lit_fsdp.models.weights import headers_of

    yield
    file = folder / "model.safetensors"
    save_file({f"model.layers.0.experts.{number}.weight": torch.zeros(64, 64) for number in range(size)}, file)
    yield
    for entry in headers_of([file]).values():
        entry.read()


def report(size: int, folder: Path) -> Steps:
    from lit_fsdp.commands.report import run_report
    from lit_fsdp.report.page import read_run

    assert read_run
    _run(folder, size, 10)
    yield
    yield
    run_report([str(folder)])


def log_again(size: int, folder: Path) -> Steps:
    """The first row of a run that goes on."""
    from lit_fsdp.callbacks.loggers import RunCSVLogger

    _run(folder, size, 1)
    yield
    logger: Any = RunCSVLogger(folder)
    logger.setup(SimpleNamespace(global_step=size + 1), None, "fit")
    logger.on_load_checkpoint(None, None, {"global_step": size})
    yield
    logger.log_metrics({"train_loss": 1.0, "new": 2.0}, size)


def listing(size: int, folder: Path) -> Steps:
    from lit_fsdp.commands.checkpoints import run_ckpt

    _run(folder, 10, size)
    yield
    yield
    run_ckpt(["ls", str(folder)])


def retain(size: int, folder: Path) -> Steps:
    from lit_fsdp.checkpoint import run_folder
    from lit_fsdp.config.run import CheckpointConfig

    _run(folder, 10, size)
    yield
    run_folder.retain(folder, CheckpointConfig(keep_last=-1))  # after an earlier save of this process
    yield
    run_folder.retain(folder, CheckpointConfig(keep_last=-1))


def _run(folder: Path, steps: int, checkpoints: int) -> None:
    """A run folder: the first row is the logger's, further ones like it; one checkpoint is saved, others like it."""
    import torch

    from lit_fsdp.callbacks.loggers import RunCSVLogger
    from lit_fsdp.checkpoint.manifest import read_manifest
    from lit_fsdp.checkpoint.run_folder import step_folder
    from lit_fsdp.checkpoint.store import save_checkpoint

    logger: Any = RunCSVLogger(folder)
    logger.setup(SimpleNamespace(global_step=1), None, "fit")
    logger.log_metrics({f"train_{name}": 1.25 for name in "abcdefghij"}, 0)
    with logger.path.open("a") as file:
        values = logger.path.read_text().splitlines()[1].partition(",")[2]
        file.writelines(f"{step},{values.replace('25', f'{step * 7919 % 9973}')}\r\n" for step in range(1, steps))
    tensors = {f"model/layers.{number}.weight": torch.zeros(2, 2) for number in range(600)}
    first = step_folder(folder, 1)
    save_checkpoint(first, tensors, state={}, manifest={"global_step": 1}, layout="sharded")
    manifest = read_manifest(first)
    for step in range(2, checkpoints + 1):
        shutil.copytree(first, step_folder(folder, step))
        (step_folder(folder, step) / "manifest.json").write_bytes(
            dataclasses.replace(manifest, global_step=step).dumps()
        )


_KINDS = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
_RANKS, _MILLIONS = (8, 64, 512), (1_000_000, 3_000_000)
# what is measured of which sizes, and of which with --largest alone
MEASURES: dict[str, tuple[str, Callable[[Any, Path], Steps], tuple[Any, ...], tuple[Any, ...]]] = {
    "audit": ("`audit` of models on 512 ranks", judge("run_audit", "--ranks"), (*_SHAPES,), ()),
    "audit_ranks": ("`audit` of 70B by ranks", judge("run_audit", "--ranks"), (*_RANKS, 4096), ()),
    "plan": ("`plan` of models on 512 GPUs", judge("run_plan", "--gpu=h100-80gb", "--gpus"), (*_SHAPES,), ()),
    "plan_ranks": ("`plan` of 70B by GPUs", judge("run_plan", "--gpu=h100-80gb", "--gpus"), (*_RANKS, 4096), ()),
    "one_rank": ("set-up and plan of a save of 8B by ranks, one of them", one_rank, (*_RANKS, 4096), ()),
    "save_first": ("save of 8B with AdamW by ranks, plan and manifest on rank 0", save_first, _RANKS, (4096,)),
    "resume_part": ("load of 8B with AdamW by ranks, the manifest on one of them", resume_part, _RANKS, (4096,)),
    "weights": ("weights by tensors in a file", weights, (1_000, 4_000, 16_000), ()),
    "tokenize": ("tokenizing by short rows, one process", tokenize, (10_000, 100_000), (1_000_000,)),
    "packs": ("packs of 4,096 tokens by rows", packs, _MILLIONS, (10_000_000,)),
    "long_packs": ("packs of 131,072 tokens by rows", partial(packs, capacity=131_072), _MILLIONS, (10_000_000,)),
    "seek": ("first batch of 10 million rows by step", seek, (1, 10_000, 1_000_000), ()),
    "seek_mix": ("the same of a weighted mix", partial(seek, weights=(1.0, 1.0, 2.0)), (1, 10_000, 1_000_000), ()),
    "seek_stream": ("first batch of a stream by rows before it in its file", seek_stream, (1, 10_000, 1_000_000), ()),
    "report": ("`report` by logged steps of 10 values", report, (10_000, 100_000), (1_000_000,)),
    "log_again": ("first row of a resumed run by logged steps", log_again, (10_000, 100_000), (1_000_000,)),
    "listing": ("`ckpt ls` by checkpoints of 600 tensors", listing, (10, 100, 1000), ()),
    "retain": ("retention after a save by checkpoints that stay", retain, (10, 100, 1000), ()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES, help="measures to take (default all)")
    parser.add_argument("--largest", action="store_true", help="the largest sizes too, which take many minutes")
    options = parser.parse_args()
    with bench("growth") as (record, folder):
        for name in options.only:
            what, _, sizes, largest = MEASURES[name]
            found = {str(size): measure(name, size, folder) for size in sizes + largest * options.largest}
            parts = [f"{_shown(size)}: {said(one)}" for size, one in found.items()]
            record["results"].append({"what": what, "summary": "; ".join(parts), "sizes": found})


def measure(name: str, size: Any, parent: Path) -> dict[str, float]:
    """One size in a process of its own."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        print(f"{name} {size}", file=sys.stderr, flush=True)
        python([__file__, "--once", name, size, folder, f"{folder}/found.json"])
        found: dict[str, float] = json.loads(Path(folder, "found.json").read_text())
        print(f"  {said(found)}", file=sys.stderr, flush=True)
        return found


def said(found: dict[str, float]) -> str:
    return f"{found['cpu']:.3g} s ({found['wall']:.3g}), {found['bytes'] / 2**20:,.0f} MiB"


def _shown(size: str) -> str:
    return f"{int(size):,}" if size.isdigit() else size


def once(name: str, size: str, folder: str, out: str) -> None:
    """One measurement, in this process."""
    from lit_fsdp.metrics.hardware import peak_host_bytes, reset_peak_host_bytes

    steps = MEASURES[name][1](int(size) if size.isdigit() else size, Path(folder))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        next(steps)
        reset_peak_host_bytes()
        imported = peak_host_bytes()
        next(steps)
        reset_peak_host_bytes()
        wall, cpu = time.perf_counter(), time.process_time()
        next(steps, None)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    Path(out).write_text(json.dumps({"wall": wall, "cpu": cpu, "bytes": peak_host_bytes() - imported}))


if __name__ == "__main__":
    once(*sys.argv[2:]) if sys.argv[1:2] == ["--once"] else main()
