"""What ranks measured and how they ended becomes rows; pairs, rates, and the doctors' meeting."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from typing import Any

import pytest

from lit_fsdp.launch.bandwidth_report import Rate, judge_ranks, pair_rounds, rates
from lit_fsdp.launch.checks.row import Row
from lit_fsdp.launch.doctor_together import judge_network, node_names, rows_of_others
from lit_fsdp.launch.meeting import Meeting, Place, first_node, listening, started_as, unreachable
from lit_fsdp.launch.rank_processes import Outcome, run_ranks
from tests.ports import own_port

MIB = 2**20
SAVED = {"saved": {"bytes": 48 * MIB, "seconds": 0.5}}
DONE = {"done": True}


def rate(ms: float, size: int = 64 * MIB, op: str = "all-reduce") -> dict[str, Any]:
    return {"rate": {"op": op, "bytes": size, "ms": ms}}


def outcome(rank: int, *events: dict[str, Any], code: int | None = 0, **more: Any) -> Outcome:
    return Outcome(rank, list(events), code, **more)


def judged(*outcomes: Outcome, backend: str = "gloo", nodes: int = 1) -> dict[str, Row]:
    names = [f"n{i}" for i in range(nodes)]
    return {row.name: row for row in judge_ranks(outcomes, backend, names, len(outcomes))}


def test_rates_are_those_of_the_slowest_rank():
    found = rates([outcome(0, rate(10.0), rate(4.0, op="all-gather")), outcome(1, rate(20.0))], 4)
    assert found == [Rate("all-reduce", 64 * MIB, 20.0, 4), Rate("all-gather", 64 * MIB, 4.0, 4)]
    assert found[0].algorithm == pytest.approx(64 * MIB / 0.020 / 1e9)
    assert found[0].bus == pytest.approx(found[0].algorithm * 2 * 3 / 4)
    assert found[1].bus == pytest.approx(found[1].algorithm * 3 / 4)


def test_ranks_that_came_to_their_end_are_good():
    found = judged(outcome(0, rate(10.0), SAVED, DONE), outcome(1, rate(12.0), SAVED, DONE))
    assert {row.grade for row in found.values()} == {"good"}
    assert "48 MiB by 2 rank(s) in 0.50 s (96 MiB/s)" in found["trial save"].found


def test_one_device_has_nothing_to_reduce_with():
    assert list(judged(outcome(0, SAVED, DONE))) == ["trial save"]


def test_slow_gpus_are_a_warning():
    found = judged(outcome(0, rate(100.0), SAVED, DONE), outcome(1, rate(100.0), SAVED, DONE), backend="nccl")
    assert found["collectives by nccl"].grade == "warning"


def test_a_killed_rank_is_the_cause_and_not_the_one_that_noticed():
    phase = {"phase": "all-reduce of 1048576 bytes"}
    found = judged(outcome(0, phase, code=None), outcome(1, phase, code=-9))
    row = found["collectives by gloo"]
    assert row.grade == "bad"
    assert row.found == "rank 1 ended by signal 9 in all-reduce of 1048576 bytes"
    assert "dmesg" in row.fix
    assert found["trial save"].grade == "warning"


def test_the_killed_one_is_named_before_those_whose_connection_it_broke():
    phase = {"phase": "all-reduce of 65536 bytes"}
    lost = outcome(0, phase, {"error": "Connection closed by peer"}, code=1)
    row = judged(lost, outcome(1, phase, code=-9))["collectives by gloo"]
    assert row.found.startswith("rank 1 ended by signal 9")
    assert "rank 0 in all-reduce of 65536 bytes: Connection closed by peer" in row.found


def test_a_hang_names_the_phase_and_the_fix():
    phase = {"phase": "meeting the other ranks"}
    row = judged(*[outcome(r, phase, code=None, out_of_time=True) for r in range(2)], nodes=2)["collectives by gloo"]
    assert row.grade == "bad"
    assert "did not come to an end in time in meeting the other ranks" in row.found
    assert "GLOO_SOCKET_IFNAME" in row.fix


def test_a_trial_save_that_fails_says_what_the_store_said():
    events = ({"phase": "trial save"}, {"error": "CheckpointError: /x: No space left on device"})
    found = judged(outcome(0, rate(9.0), *events, code=1), outcome(1, rate(9.0), *events, code=1))
    assert found["collectives by gloo"].grade == "good"
    assert (found["trial save"].grade, "No space left" in found["trial save"].found) == ("bad", True)


def test_a_slow_pair_of_nodes_is_named():
    def pair(a: int, b: int, ms: float) -> dict[str, Any]:
        return {"pair": {"nodes": [a, b], "ms": ms, "bytes": 16 * MIB}}

    def pairs(*slow: dict[str, Any]) -> Row:
        outcomes = [outcome(r, rate(9.0), *(slow if r == 0 else []), SAVED, DONE) for r in range(4)]
        return judged(*outcomes, nodes=4)["pairs of nodes"]

    even = [pair(0, 1, 3.0), pair(0, 2, 3.1), pair(0, 3, 4.0), pair(1, 3, 3.0)]
    assert pairs(*even, pair(1, 2, 3.0), pair(2, 3, 3.0)).grade == "good"
    row = pairs(*even, pair(1, 2, 10.0), pair(2, 3, 9.0))
    assert row.grade == "bad"
    assert "slow: n1-n2 3.36, n2-n3 3.73" in row.found
    assert row.fix.startswith("look at the network of n2")
    assert pairs(pair(0, 1, 3.0)).grade == "good"  # with one pair there is nothing to compare it with
    assert pairs().grade == "warning"


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_pair_is_measured_once_and_no_node_twice_at_a_time(count: int):
    rounds = pair_rounds(count)
    seen = Counter(pair for pairs in rounds for pair in pairs)
    assert seen == Counter((a, b) for a in range(count) for b in range(a + 1, count))
    assert all(max(Counter(node for pair in pairs for node in pair).values()) == 1 for pairs in rounds)


def test_a_module_that_fails_at_once_is_reported_and_ended():
    (found,) = run_ranks([{"rank": 3}], 30, module="lit_fsdp.no_such_module")
    assert found.exit_code == 1
    assert "no_such_module" in str(found.problem)
    assert found.problem.startswith("rank 3 ended by exit code 1 in starting")


def test_places_by_launcher():
    assert started_as({}) is None
    assert started_as({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None  # a batch script
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    step |= {"SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "gpu[07-09]"}
    place = started_as(step)
    assert place == Place(2, 4, 0, 2, "gpu07", 20000 + (84 + 39 + 4817) % 10000, "srun-12.3")
    assert started_as({**step, "SLURM_STEP_NUM_TASKS": "1"}) is None
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    torchrun |= {"RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}
    found = started_as(torchrun)
    assert found is not None
    assert (found.rank, found.local_rank, found.nodes, found.address) == (3, 1, 2, "a")
    assert 20000 <= found.port < 30000
    assert found.port != 29500


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a,b[1-2]", "a"), ("a[3-05,7],b1", "a3"), ("n[07,9]", "n07"), ("", "")]
)
def test_the_first_node(nodes: str, first: str):
    assert first_node(nodes) == first


def meet(world: int, absent: tuple[int, ...] = (), leaves: int | None = None) -> dict[int, list[Any]]:
    """Two rounds between threads; ``leaves`` goes after the first."""
    port = own_port()
    found: dict[int, list[Any]] = {}

    def one(rank: int) -> None:
        with Meeting(Place(rank, world, 0, world, "127.0.0.1", port, "test"), 60.0) as meeting:
            first = meeting.exchange({"round": 1, "rank": rank}, 6.0 if absent else 60.0)
            if rank != leaves:
                found[rank] = [first, meeting.exchange({"round": 2}, 2.0 if absent else 60.0)]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return found


def test_all_get_the_messages_of_all():
    found = meet(4)
    assert sorted(found) == [0, 1, 2, 3]
    for rounds in found.values():
        assert [message["rank"] for message in rounds[0]] == [0, 1, 2, 3]
        assert [message["round"] for message in rounds[1]] == [2, 2, 2, 2]
        assert {message["address"] for message in rounds[0]} == {"127.0.0.1"}


def test_who_does_not_come_or_goes_is_none():
    assert [message is None for message in meet(3, absent=(1,))[0][0]] == [False, True, False]
    start = time.monotonic()
    found = meet(3, leaves=2)
    assert time.monotonic() - start < 30  # who is gone is not waited for
    assert [message is None for message in found[1][1]] == [False, False, True]


def test_a_stranger_at_the_port_disturbs_nobody():
    port = own_port()
    with Meeting(Place(0, 2, 0, 2, "127.0.0.1", port, "test"), 60.0) as meeting:
        for words in (b"GET / HTTP/1.0\n", b'{"rank": 1, "launch": "another", "message": {}}\n', b"[]\n", b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(words)
        assert meeting.exchange({}, 0.3) == [{"address": "127.0.0.1"}, None]


def test_a_first_rank_that_cannot_be_reached_is_an_error():
    with pytest.raises(ConnectionError, match=r"rank 0 at 127\.0\.0\.1:9 cannot be reached"):
        Meeting(Place(1, 2, 0, 2, "127.0.0.1", 9, "test"), 0.0).__enter__()


def test_nodes_that_can_and_cannot_be_reached():
    with listening() as port:
        found = unreachable({"a": ("127.0.0.1", port), "b": ("127.0.0.1", 9)})
    assert list(found) == ["b"]
    assert "refused" in found["b"]


def test_the_network_is_judged():
    names = {0: "a", 1: "b", 2: "c"}
    fine = [{"node": node, "unreachable": {}, "sees": True} for node in "abc"]
    assert {row.grade for row in judge_network(fine, names, "/run")} == {"good"}
    cut = [{**fine[0], "unreachable": {"c": "timed out"}}, None, {**fine[2], "sees": False}]
    folder, reach = judge_network(cut, names, "/run")
    assert (folder.grade, folder.found) == ("bad", "/run is not the same on c")
    assert (reach.grade, reach.found) == ("bad", "not a→c (timed out)")


def test_two_nodes_of_one_name_are_told_apart():
    found = [{"index": 1, "node": "x"}, {"index": 0, "node": "x"}, None, {"index": 2, "node": "y"}]
    assert node_names(found) == {0: "x(0)", 1: "x(1)", 2: "y"}


def test_rows_of_other_nodes_are_said_once():
    bad, fine, known = Row("shm", "64 MiB", "bad", "f"), Row("x", "y"), Row("GPUs", "none", "warning", "f")
    found = rows_of_others({"b": [bad, fine, known], "c": [bad]}, [known])
    assert found == [Row("b, c: shm", "64 MiB", "bad", "f")]
