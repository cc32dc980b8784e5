"""Everything that ``lit-fsdp doctor`` looks at, in its order, on one machine or on all that were started.

Nothing is loaded that a broken installation could break: torch is asked in processes of its own, after the versions
have been compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_fsdp.host import free_port
from lit_fsdp.launch.bandwidth_report import SIZES, Rate, judge_ranks, rates
from lit_fsdp.launch.checks import places
from lit_fsdp.launch.checks.devices import judge_devices
from lit_fsdp.launch.checks.host import host_facts, judge_host
from lit_fsdp.launch.checks.hub import hub_facts, judge_hub
from lit_fsdp.launch.checks.row import MIB, Row, Wanted
from lit_fsdp.launch.checks.slurm import judge_nodes, judge_slurm
from lit_fsdp.launch.checks.torch_facts import ask_torch
from lit_fsdp.launch.checks.versions import installed, judge_versions, lacks_torch
from lit_fsdp.launch.rank_processes import run_ranks

_log = logging.getLogger(__name__)
WRITE_BYTES = 128 * MIB
SAVE_BYTES = 48 * MIB
_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long and how much."""

    rank_seconds: float = 300.0
    """For the ranks that measure, their imports included."""
    collective_seconds: float = 60.0
    """For one collective; a rank that is gone is noticed by then."""
    gather_seconds: float = 180.0
    """For the other nodes to come."""
    write_bytes: int = WRITE_BYTES
    repeats: int = 5


@dataclass
class Report:
    """What was found."""

    rows: list[Row] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Of each rank that was started: number, node, versions; empty after a plain start."""

    @property
    def exit_code(self) -> int:
        """1 if anything is bad."""
        return int(any(row.grade == "bad" for row in self.rows))


@dataclass
class Here:
    """What this machine turned out to be."""

    rows: list[Row]
    wanted: Wanted
    num_gpus: int
    can_measure: bool
    """Whether torch is there to start ranks with."""


Complete = Callable[[Wanted, int], Wanted]
"""Fills in what needs torch, given the number of GPUs: bytes of a checkpoint."""


def examine(wanted: Wanted, complete: Complete, quick: bool, limits: Limits | None = None) -> Report:
    """Look at this machine alone.

    Args:
        wanted: By the recipe.
        complete: See :data:`Complete`.
        quick: Leave out collectives and the trial save.
        limits: How long and how much.
    """
    limits = limits or Limits()
    with trial_folder(wanted) as (folder, rows):
        here = look_here(wanted, complete, folder, limits)
        report = Report([*here.rows, *rows, *judge_nodes(here.wanted, 1)])
        if quick or not here.can_measure:
            return report
        backend = here.wanted.backend(here.num_gpus)
        world = _CPU_RANKS if backend == "gloo" else min(here.wanted.devices or here.num_gpus, here.num_gpus)
        plan = measuring_plan("127.0.0.1", backend, world, folder, limits)
        _log.info("measuring on %d rank(s) by %s", world, backend)
        outcomes = run_ranks([{**plan, "rank": rank, "device": rank} for rank in range(world)], limits.rank_seconds)
        report.rates = rates(outcomes, world)
        report.rows += judge_ranks(outcomes, backend, ["this machine"], world)
        return report


@contextlib.contextmanager
def trial_folder(wanted: Wanted) -> Iterator[tuple[Path | None, list[Row]]]:
    """A scratch folder at the place of the run's checkpoints, or ``None`` and the row that says why not."""
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(places.scratch(wanted.run_folder))
        except OSError as error:
            place = places.nearest(wanted.run_folder / places.CHECKPOINTS)
            yield None, [places.unwritable(place, error, "trainer.default_root_dir")]
            return
        yield folder, []


def look_here(wanted: Wanted, complete: Complete, folder: Path | None, limits: Limits) -> Here:
    """Rows on this machine, without starting ranks.

    Args:
        wanted: By the recipe.
        complete: See :data:`Complete`.
        folder: To write into; ``None``: the run folder is not looked at.
        limits: How much is written.
    """
    rows = judge_versions(installed(), wanted.extras)
    num_gpus, can_measure = 0, not lacks_torch(rows)
    if can_measure:
        _log.info("asking torch for devices")
        facts = ask_torch()
        can_measure = "error" not in facts
        num_gpus = len(facts.get("devices", ()))
        rows += judge_devices(facts, wanted)
    if can_measure:
        wanted = complete(wanted, num_gpus)
    else:
        text = "not looked at: torch or lightning is missing, too old or cannot be loaded"
        rows.append(Row("devices, collectives, trial save", text, "warning", "mend the rows above first"))
    processes = wanted.devices or num_gpus or _CPU_RANKS
    rows += judge_host(host_facts(), wanted, processes)
    if folder is not None:
        _log.info("writing into %s", folder.parent)
        rows.append(places.judge_room(folder.parent, wanted, shutil.disk_usage(folder.parent).free))
        rows += places.look_at_run_folder(folder, wanted, limits.write_bytes)
    rows += places.look_at_cache(wanted)
    rows += judge_hub(hub_facts(os.environ, wanted), wanted)
    rows.append(judge_slurm(os.environ, wanted))
    return Here(rows, wanted, num_gpus, can_measure)


def measuring_plan(address: str, backend: str, world: int, folder: Path | None, limits: Limits) -> dict[str, Any]:
    """What all ranks are told; ``rank`` and ``device`` are each one's own.

    Args:
        address: Where rank 0, on this machine, can be reached.
        backend: ``gloo`` or ``nccl``.
        world: All ranks.
        folder: For the trial save; ``None``: without one.
        limits: How long and how often.
    """
    return {
        "address": address,
        "port": free_port(),
        "backend": backend,
        "world": world,
        "timeout": limits.collective_seconds,
        "sizes": list(SIZES["nccl" if backend == "nccl" else "gloo"]),
        "repeats": limits.repeats,
        "leaders": [],
        "save_folder": None if folder is None else str(folder / "step-00000001"),
        "save_bytes": SAVE_BYTES,
    }
