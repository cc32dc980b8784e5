"""What all ranks measured, as one table and as rows: how fast, which pair of nodes is slow, and what failed where."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_fsdp.launch.checks.row import MIB, Row, size_text
from lit_fsdp.launch.rank_processes import Outcome

GB = 10**9
FORMULA = (
    "ms: the slowest rank's median. algorithm GB/s = bytes / time; bus GB/s = algorithm · 2(n-1)/n for all-reduce, "
    "· (n-1)/n for all-gather, n ranks: what each link carries. bytes: the reduced, or the whole gathered, tensor."
)
SIZES = {"gloo": (64 * 1024, MIB, 16 * MIB, 64 * MIB), "nccl": (MIB, 16 * MIB, 128 * MIB, 512 * MIB)}
_SLOW_PAIR = 0.5
_FEW_PAIRS = 3
# Bus GB/s of the largest size under which something is wrong rather than merely modest, and what that is.
_LEAST = {
    ("nccl", False): (5.0, "NCCL goes by the host: see nvidia-smi topo -m and NCCL_DEBUG=INFO (NCCL_P2P_DISABLE, ACS)"),
    ("nccl", True): (2.0, "NCCL goes by TCP: look for NET/Socket in NCCL_DEBUG=INFO; configs/network/ has fragments"),
    ("gloo", False): (0.02, "see whether other programs use this machine's cores"),
    ("gloo", True): (0.02, "set GLOO_SOCKET_IFNAME to the fast network"),
}


@dataclass(frozen=True)
class Rate:
    """One collective at one size."""

    op: str
    num_bytes: int
    ms: float
    world: int

    @property
    def algorithm(self) -> float:
        """GB/s of the tensor's bytes."""
        return self.num_bytes / self.ms * 1000 / GB

    @property
    def bus(self) -> float:
        """GB/s that each link carries, which does not depend on the number of ranks (see FORMULA)."""
        return self.algorithm * (2 if self.op == "all-reduce" else 1) * (self.world - 1) / self.world


def rates(outcomes: Sequence[Outcome], world: int) -> list[Rate]:
    """The slowest rank's time for each collective and size, in the order they were measured in."""
    slowest: dict[tuple[str, int], float] = {}
    for outcome in outcomes:
        for event in outcome.events:
            if "rate" in event:
                key = event["rate"]["op"], int(event["rate"]["bytes"])
                slowest[key] = max(slowest.get(key, 0.0), float(event["rate"]["ms"]))
    return [Rate(op, size, ms, world) for (op, size), ms in slowest.items()]


def judge_ranks(outcomes: Sequence[Outcome], backend: str, nodes: Sequence[str], world: int) -> list[Row]:
    """Rows on collectives, pairs of nodes, and the trial save.

    Args:
        outcomes: Of the ranks that answered.
        backend: ``gloo`` or ``nccl``.
        nodes: Names, in the order of pairs.
        world: All ranks.
    """
    problems = [outcome for outcome in outcomes if outcome.problem]
    # who failed first is the cause; who lost contact is a consequence, and says so itself
    causes = [outcome for outcome in problems if outcome.is_cause] or problems
    causes.sort(key=lambda outcome: outcome.exit_code is None or outcome.exit_code >= 0)  # the killed one first
    rows = [_collectives(rates(outcomes, world), causes, backend, len(nodes))] if world > 1 else []
    if len(nodes) > 1:
        rows += _pairs(outcomes, nodes)
    saved = [event["saved"] for outcome in outcomes for event in outcome.events if "saved" in event]
    return [*rows, _trial(saved, causes, world)]


def _collectives(found: Sequence[Rate], causes: Sequence[Outcome], backend: str, num_nodes: int) -> Row:
    name = f"collectives by {backend}"
    stopped = [outcome for outcome in causes if not _is_save(outcome)]
    if stopped:
        text = "; ".join(str(outcome.problem) for outcome in stopped[:3])
        return Row(name, text, "bad", _way_out(stopped[0], backend, num_nodes > 1))
    if not found:
        return Row(name, "not measured", "warning", "see the rows above")
    best = [rate for rate in found if rate.num_bytes == max(rate.num_bytes for rate in found)]
    text = ", ".join(f"{rate.op} {rate.bus:.2f} GB/s bus at {size_text(rate.num_bytes)}" for rate in best)
    least, why = _LEAST[backend, num_nodes > 1]
    if min(rate.bus for rate in best) < least:
        return Row(name, f"{text}: less than {least:g}", "warning", why)
    return Row(name, text)


def _is_save(outcome: Outcome) -> bool:
    return "trial save" in outcome.phase


def _way_out(outcome: Outcome, backend: str, several_nodes: bool) -> str:
    if "meeting" in outcome.phase and several_nodes:
        name = "NCCL_SOCKET_IFNAME" if backend == "nccl" else "GLOO_SOCKET_IFNAME"
        return f"open all ports between the nodes, and set {name} to the network they share"
    if backend == "nccl":
        return "NCCL_DEBUG=INFO in front of the same command shows where it stops; see nvidia-smi and dmesg (Xid)"
    if outcome.exit_code is not None and outcome.exit_code < 0:
        return "see dmesg for who ended it: a lack of memory ends with signal 9"
    name = "lo, as in GLOO_SOCKET_IFNAME=lo" if not several_nodes else "the network that the nodes share"
    return f"set GLOO_SOCKET_IFNAME to {name}"


def _pairs(outcomes: Sequence[Outcome], nodes: Sequence[str]) -> list[Row]:
    """Pairs of nodes that are much slower than the median of all."""
    name = "pairs of nodes"
    found = [event["pair"] for outcome in outcomes for event in outcome.events if "pair" in event]
    if not found:
        return [Row(name, "not measured", "warning", "see the rows above")]
    rate = {tuple(pair["nodes"]): 2 * pair["bytes"] / pair["ms"] * 1000 / GB for pair in found}
    middle = statistics.median(rate.values())
    slow = {pair: value for pair, value in rate.items() if value < _SLOW_PAIR * middle}
    text = f"{len(rate)} measured, median {middle:.2f} GB/s both ways"
    if slow and len(rate) >= _FEW_PAIRS:
        listed = ", ".join(f"{nodes[a]}-{nodes[b]} {value:.2f}" for (a, b), value in sorted(slow.items())[:16])
        ends = [node for pair in slow for node in pair]
        worst = max(set(ends), key=ends.count)
        fix = f"look at the network of {nodes[worst]} (ibstat, ethtool), or leave it out: srun --exclude={nodes[worst]}"
        return [Row(name, f"{text}; slow: {listed}", "bad", fix)]
    return [Row(name, text)]


def _trial(saved: Sequence[Mapping[str, Any]], causes: Sequence[Outcome], world: int) -> Row:
    name = "trial save"
    failed = next((outcome for outcome in causes if _is_save(outcome)), None)
    if failed is not None:
        fix = "free space, see the owner of the run folder, or name another trainer.default_root_dir"
        return Row(name, str(failed.problem), "bad", fix)
    if not saved or causes:
        return Row(name, "not tried, as the ranks did not come so far", "warning", "see the rows above")
    seconds, size = max(entry["seconds"] for entry in saved), saved[0]["bytes"]
    rate = size / MIB / seconds
    return Row(name, f"{size_text(size)} by {world} rank(s) in {seconds:.2f} s ({rate:.0f} MiB/s), verified, removed")


def pair_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of ``count`` nodes once, in rounds in which no node occurs twice (the circle method)."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], players[: half - 1 : -1], strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds
