"""What would take less memory: the changes of a recipe in the order to try them, and what a run that ran out says."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.config.run import RunConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import EXIT_DIR
from lit_fsdp.plan.memory import rank_memory
from lit_fsdp.plan.search import LORA, Choice, changed, with_rows

_SECONDS = 120
"""After which a run that ran out of memory ends without advice."""


@dataclass(frozen=True)
class Saving:
    """One change of a recipe."""

    num_bytes: int
    """That the rank which holds most needs less at its highest moment."""
    flags: str
    """To be pasted behind the command of the run."""
    remark: str = ""


def savings(run: RunConfig, names_accumulation: bool = False) -> Iterator[Saving]:
    """Simulate every change that takes less memory, each by itself; those that cost least come first.

    Args:
        run: A checked recipe as for :func:`lit_fsdp.plan.memory.rank_memory`, with ``data.global_batch_size``.
        names_accumulation: Whether the recipe says ``trainer.accumulate_grad_batches``, which then has to follow.
    """
    before = rank_memory(run).peak
    for choice, remark in _lighter(run, names_accumulation):
        try:
            saved = before - rank_memory(choice.run).peak
        except ConfigError:  # a package that is not here
            continue
        if saved > 0:
            yield Saving(saved, " ".join(choice.flags), remark)


def _lighter(run: RunConfig, names_accumulation: bool) -> Iterator[tuple[Choice, str]]:
    rows, world, strategy = run.data.micro_batch_size, run.world_size or 1, run.strategy
    for fewer in [n for n in range(rows - 1, 0, -1) if rows % n == 0][:1]:
        steps = (run.data.global_batch_size or 0) // (fewer * world)
        changes: dict[str, Any] = {"data.micro_batch_size": fewer}
        if names_accumulation:
            changes["trainer.accumulate_grad_batches"] = steps
        yield Choice(with_rows(run, fewer), changes), f"accumulates over {steps}: the same global batch"
    sharded = {} if strategy.is_sharded else {"engine": "fsdp2"}
    whole = {"sharding": "full_shard", "shard_degree": None, "replicate_degree": None}
    is_full = strategy.is_sharded and strategy.sharding == "full_shard"
    kinds: list[tuple[dict[str, Any], str]] = []
    if strategy.activation_config.mode != "full":
        kinds.append(({"activation_checkpointing": "full"}, "blocks are recomputed"))
    if world > 1 and not is_full:
        kinds.append(({**sharded, **whole}, "each rank keeps its share"))
    if run.trainer["accelerator"] != "cpu" and not strategy.offloads:
        kinds.append(({**sharded, **({} if is_full else whole), "cpu_offload": True}, "shards are on the host, slower"))
    options = [(changed(run, values), remark) for values, remark in kinds]
    lora = run.model.lora
    options += [(changed(run, {}, LORA), "LoRA")] if lora is None else []
    if lora is None or lora.quantize is None:
        options.append((changed(run, {}, dataclasses.replace(lora or LORA, quantize="nf4")), "QLoRA"))
    yield from ((choice, remark) for choice, remark in options if choice is not None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's allocator, torch's on a CPU or Python itself had no memory left."""
    said = any(words in str(error) for words in ("CUDA error: out of memory", "DefaultCPUAllocator: can't allocate"))
    return said or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def advice(run: RunConfig, recipe: Path, accelerator: str, allow_imports: Sequence[str] = ()) -> str:
    """What ``lit-fsdp plan --savings`` says of a run that ran out of memory, or in one line why it says nothing.

    Another process computes it: this one has little memory, and a process group whose other ranks are waiting.
    ``recipe`` is the file in the run folder, ``allow_imports`` the packages whose classes it names.
    """
    if run.foreign:
        return f"what would save memory is not computed for somebody else's {', '.join(sorted(run.foreign))}"
    words = [sys.executable, "-m", "lit_fsdp", "plan", "--savings", "--config", str(recipe)]
    words += [f"--trainer.{name}={run.trainer[name]}" for name in ("devices", "num_nodes")]
    words += [f"--trainer.accelerator={accelerator}", *(f"--allow-imports={name}" for name in allow_imports)]
    environment = {name: value for name, value in os.environ.items() if name != EXIT_DIR}
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"what would save memory was not computed: {error}"
    if done.returncode:
        return f"what would save memory was not computed: {(done.stderr.splitlines() or ['no reason'])[-1]}"
    return done.stdout.rstrip()
