"""``doctor`` on all nodes at once: every process that srun or torchrun started takes part, rank 0 reports.

Four rounds of :class:`lit_fsdp.launch.meeting.Meeting`: who is there with which versions; who sees the run folder and
reaches whom; what is measured; what came of it. After them everyone ends with the same exit code.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_fsdp.launch.bandwidth_report import judge_ranks, rates
from lit_fsdp.launch.checks.row import Row, Wanted
from lit_fsdp.launch.checks.slurm import judge_nodes
from lit_fsdp.launch.checks.versions import compare_nodes, find_version
from lit_fsdp.launch.doctor import Complete, Here, Limits, Report, look_here, measuring_plan, trial_folder
from lit_fsdp.launch.meeting import Meeting, Message, Place, listening, unreachable
from lit_fsdp.launch.rank_processes import Outcome, run_ranks

_PACKAGES = ("lit-fsdp", "torch", "lightning", "transformers", "datasets")
_SEE_SECONDS = 5.0


class Together:
    """This process's part in an examination of several nodes.

    Args:
        place: Of this process.
        wanted: By the recipe; the same on all.
        quick: Leave out collectives and the trial save.
        limits: How long and how much.
    """

    def __init__(self, place: Place, wanted: Wanted, quick: bool, limits: Limits | None = None) -> None:
        self.place, self.wanted, self.quick, self.limits = place, wanted, quick, limits or Limits()
        self.meeting = Meeting(place, self.limits.gather_seconds)

    def open(self) -> None:
        """Begin to listen, on rank 0.

        Raises:
            OSError: The port is taken.
        """
        self.meeting.__enter__()

    def report(self, complete: Complete) -> Report:
        """Everything that was found, on rank 0, between :meth:`open` and :meth:`part`.

        Args:
            complete: See :data:`lit_fsdp.launch.doctor.Complete`.
        """
        with trial_folder(self.wanted) as (folder, rows), listening() as port:
            here = look_here(self.wanted, complete, folder, self.limits)
            report = Report([*here.rows, *rows])
            everyone = self._arrive({"listens": port, "scratch": None if folder is None else str(folder)})
            names = node_names(everyone)
            report.rows += [*judge_nodes(here.wanted, self.place.nodes), *self._roll_call(everyone, names, report)]
            seen = self._look_around(everyone, names)
            if len(names) > 1:
                report.rows += judge_network(seen, names, str(self.wanted.run_folder))
            plan = None
            if not self.quick and here.can_measure and _can_measure(everyone, seen):
                plan = self._plan(here, folder, everyone)
            self.meeting.exchange({"plan": plan}, self.limits.gather_seconds)
            if plan is None:
                return report
            outcomes = self._measure(plan)
            report.rates = rates(outcomes, self.place.world)
            report.rows += judge_ranks(outcomes, plan["backend"], list(names.values()), self.place.world)
            return report

    def attend(self, complete: Complete) -> int:
        """Take part on any other rank; returns the exit code that rank 0 decided on.

        Raises:
            ConnectionError: Rank 0 cannot be reached or is gone.
        """
        with self.meeting, listening() as port:
            found: Message = {"listens": port}
            if self.place.local_rank == 0:
                here = look_here(self.wanted, complete, None, self.limits)
                found.update(rows=[asdict(row) for row in here.rows], can_measure=here.can_measure)
            everyone = self._arrive(found)
            self._look_around(everyone, node_names(everyone))
            first = self.meeting.exchange({}, self.limits.gather_seconds)[0]
            plan = first and first["plan"]
            if plan:
                self._measure(plan)
            last = self.meeting.exchange({}, self.limits.rank_seconds)[0]
            return int(last["code"]) if last else 1

    def part(self, code: int) -> None:
        """On rank 0, after the report was printed: let the others end, with this exit code."""
        self.meeting.exchange({"code": code}, 60.0)
        self.meeting.__exit__(None, None, None)

    def _arrive(self, more: Message) -> list[Message | None]:
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        index = os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK") or "0"
        found = {package: find_version(package) for package in _PACKAGES}
        versions = {"Python": platform.python_version(), **found}
        mine = {"node": name, "index": int(index), "versions": versions, "is_leader": self.place.local_rank == 0}
        return self.meeting.exchange({**mine, **more}, self.limits.gather_seconds)

    def _roll_call(self, everyone: Sequence[Message | None], names: Mapping[int, str], report: Report) -> list[Row]:
        """Rows on who came, with which versions, and what the other nodes found bad at home."""
        rows = []
        for rank, message in enumerate(everyone):
            if message is not None:
                report.ranks.append({"rank": rank, "node": message["node"], "versions": message["versions"]})
        absent = [str(rank) for rank, message in enumerate(everyone) if message is None]
        text = f"{self.place.world} on {self.place.nodes} node(s): {', '.join(names.values())}"
        if absent:
            fix = "see what those wrote on standard error; open all ports between the nodes"
            rows.append(Row("ranks", f"{text}; rank(s) {', '.join(absent)} did not come", "bad", fix))
        else:
            rows.append(Row("ranks", text))
        there = [message for message in everyone if message is not None]
        if len(names) > 1:
            rows.append(compare_nodes({names[m["index"]]: m["versions"] for m in there}))
        found = {names[m["index"]]: [Row(**row) for row in m["rows"]] for m in there if "rows" in m}
        return [*rows, *rows_of_others(found, report.rows)]

    def _look_around(self, everyone: Sequence[Message | None], names: Mapping[int, str]) -> list[Message | None]:
        """What each node's first rank sees and reaches."""
        mine: Message = {}
        if self.place.local_rank == 0:
            own = everyone[self.place.rank]
            here = names[own["index"]] if own else ""
            targets = {
                names[message["index"]]: (message["address"], int(message["listens"]))
                for message in everyone
                if message is not None and message["is_leader"] and names[message["index"]] != here
            }
            scratch = (everyone[0] or {}).get("scratch")
            mine = {"node": here, "unreachable": unreachable(targets), "sees": scratch is None or _sees(Path(scratch))}
        return self.meeting.exchange(mine, self.limits.gather_seconds)

    def _plan(self, here: Here, folder: Path | None, everyone: Sequence[Message | None]) -> dict[str, Any]:
        plan = measuring_plan(
            self.place.address, here.wanted.backend(here.num_gpus), self.place.world, folder, self.limits
        )
        first: dict[int, int] = {}
        for rank, message in enumerate(everyone):
            if message is not None:
                first.setdefault(message["index"], rank)
        return {**plan, "leaders": [first[index] for index in sorted(first)] if len(first) > 1 else []}

    def _measure(self, plan: dict[str, Any]) -> list[Outcome]:
        """Run this process's rank, and get what became of all."""
        own = {**plan, "rank": self.place.rank, "device": self.place.local_rank}
        outcome = run_ranks([own], self.limits.rank_seconds)[0]
        everyone = self.meeting.exchange(asdict(outcome), self.limits.rank_seconds)
        lost = "its doctor is gone"
        return [
            Outcome(rank, exit_code=1, said=lost)
            if message is None
            else Outcome(**{k: v for k, v in message.items() if k != "address"})
            for rank, message in enumerate(everyone)
        ]


def port_is_taken(place: Place, error: OSError) -> Row:
    """The only row where rank 0 cannot listen."""
    fix = (
        "start it once more, as another job step or MASTER_PORT gives another port, or end what listens there (ss -lp)"
    )
    return Row("meeting of the ranks", f"port {place.port}: {error.strerror or error}", "bad", fix)


def node_names(everyone: Sequence[Message | None]) -> dict[int, str]:
    """Name by number of node; two nodes of one name are told apart by their number."""
    found = {message["index"]: message["node"] for message in everyone if message is not None}
    names = list(found.values())
    return {i: name if names.count(name) == 1 else f"{name}({i})" for i, name in sorted(found.items())}


def rows_of_others(found: Mapping[str, Sequence[Row]], here: Sequence[Row]) -> list[Row]:
    """What other nodes found that is not good and not said already; the same on several nodes is one row.

    Args:
        found: Rows by node.
        here: Rows of rank 0's node.
    """
    by_row: dict[Row, list[str]] = {}
    for node, rows in found.items():
        for row in rows:
            if row.grade != "good" and row not in here:
                by_row.setdefault(row, []).append(node)
    return [Row(f"{', '.join(nodes)}: {row.name}", row.found, row.grade, row.fix) for row, nodes in by_row.items()]


def judge_network(seen: Sequence[Message | None], names: Mapping[int, str], run_folder: str) -> list[Row]:
    """Rows on whether all nodes reach each other and see one run folder.

    Args:
        seen: ``node``, ``unreachable`` (reason by node) and ``sees`` of each node's first rank; others are empty.
        names: Of all nodes.
        run_folder: As the recipe has it.
    """
    there = [message for message in seen if message and "sees" in message]
    blind = [message["node"] for message in there if not message["sees"]]
    rows = []
    if blind:
        fix = "set trainer.default_root_dir to a folder on a file system that all nodes see"
        rows.append(Row("one run folder", f"{run_folder} is not the same on {', '.join(blind)}", "bad", fix))
    else:
        rows.append(Row("one run folder", f"seen by {len(there)} of {len(names)} node(s)"))
    cut = [f"{m['node']}→{node} ({why})" for m in there for node, why in m["unreachable"].items()]
    if cut:
        fix = "open all TCP ports between the nodes (firewall, security group), or leave a node out: srun --exclude"
        more = f" and {len(cut) - 16} more" if len(cut) > 16 else ""
        rows.append(Row("nodes reach each other", f"not {', '.join(cut[:16])}{more}", "bad", fix))
    else:
        rows.append(Row("nodes reach each other", f"all {len(names)}, by TCP"))
    return rows


def _can_measure(everyone: Sequence[Message | None], seen: Sequence[Message | None]) -> bool:
    """Whether all came, with torch, and reach each other and the run folder: else some would wait for nothing."""
    came = all(message is not None and message.get("can_measure", True) for message in everyone)
    return came and all(
        message is not None and message.get("sees", True) and not message.get("unreachable") for message in seen
    )


def _sees(folder: Path) -> bool:
    """Whether a folder that another node has just made is here too; a network file system may take a moment."""
    deadline = time.monotonic() + _SEE_SECONDS
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
