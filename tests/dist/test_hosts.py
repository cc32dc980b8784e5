"""torchrun over two hosts, each with its own network: where ranks meet, what a cut cable does, and the way back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.dist.forks import server
from tests.dist.hosts import ROOT, Hosts, ended, two_hosts
from tests.runs import losses, whole_steps

pytestmark = pytest.mark.timeout(600)
TIMEOUT = 10  # of a collective, in seconds


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two, with a folder that both of them see."""
    with two_hosts(tmp_path) as found:
        yield found


def recipe(folder: Path, steps: int, devices: int = 1, nodes: int = 2, engine: str = "fsdp2") -> list[str]:
    """Words that train a miniature, the same global batches on any number of ranks."""
    strategy = {"engine": engine, "precision": "fp32", "timeout_seconds": TIMEOUT}
    values = {
        "trainer": {
            **{"accelerator": "cpu", "devices": devices, "num_nodes": nodes, "max_steps": steps},
            **{"log_every_n_steps": 1, "default_root_dir": str(folder / "run")},
            "strategy": {"class_path": "lit_fsdp.fsdp_strategy", "init_args": strategy},
        },
        "model": {
            "name": str(ROOT / "configs/model/SmolLM2-135M-Instruct.json"),
            "miniature": True,
            "optim": {"schedule": "constant"},  # the same for any number of steps
        },
        "data": {"train": "generated:64", "max_seq_length": 64, "global_batch_size": 4},
        "checkpoint": {"every_steps": 2},
    }
    path = folder / f"{engine}-{devices}x{nodes}-{steps}.yaml"
    path.write_text(yaml.safe_dump(values))
    return ["fit", "--config", str(path)]


def alone(folder: Path, steps: int) -> dict[int, float]:
    """Losses of the same recipe in one process."""
    folder.mkdir()
    words, env = recipe(folder, steps, nodes=1), {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([server().python, "-m", "lit_fsdp", *words], check=True, cwd=folder, env=env, capture_output=True)
    return losses(folder / "run")


def cut_in_the_middle(hosts: Hosts, folder: Path, processes: int, meeting: str) -> list[str]:
    """What both hosts say when the cable is cut after a few steps."""
    started = hosts.torchrun("cut", meeting, processes, *recipe(folder, 4000, processes))
    deadline = time.monotonic() + 240
    while max(losses(folder / "run"), default=0) < 5:
        assert time.monotonic() < deadline, hosts.output("cut")
        assert ended(started, 0.05) == [None, None], hosts.output("cut")
    hosts.set_cable("down")
    cut = time.monotonic()
    while not all("lost contact" in said for said in hosts.output("cut")):
        assert time.monotonic() - cut < TIMEOUT + 90, hosts.output("cut")
        time.sleep(0.2)
    deadline = time.monotonic() + 150
    while hosts.ranks():
        assert time.monotonic() < deadline, hosts.output("cut")
        time.sleep(0.2)
    assert 0 not in ended(started, 0)
    hosts.end()  # agents of torchrun wait for their own meeting point for minutes
    return hosts.output("cut")


@pytest.mark.parametrize(
    ("meeting", "processes"), [("c10d", 1), pytest.param("static", 2, marks=pytest.mark.long("a minute of timeouts"))]
)
def test_a_cut_cable_ends_the_run_and_over_the_mended_one_it_goes_on_to_the_same_losses(
    hosts: Hosts, tmp_path: Path, meeting: str, processes: int
) -> None:
    said = cut_in_the_middle(hosts, tmp_path, processes, meeting)
    assert "rank 0 (hosta) lost contact: " in said[0]
    assert re.search(r"rank \d \(hostb\) lost contact: ", said[1])
    newest = whole_steps(tmp_path / "run", may_hide=True)[-1]
    assert newest >= 4
    hosts.set_cable("up")
    steps = newest + 4
    started = hosts.torchrun("again", meeting, processes, *recipe(tmp_path, steps, processes), "--ckpt_path", "last")
    assert ended(started, 400) == [0, 0], hosts.output("again")
    found, wanted = losses(tmp_path / "run"), alone(tmp_path / "alone", steps)
    assert sorted(found) == list(range(steps))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long("waits until its time is over")
def test_a_rank_that_does_not_come_is_waited_for_with_a_word(hosts: Hosts, tmp_path: Path) -> None:
    words = recipe(tmp_path, 4)
    by_hand = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "NODE_RANK": "0"}
    process = hosts.start(0, "missing", sys.executable, "-m", "lit_fsdp", *words, **by_hand)
    (tmp_path / "missing-1").touch()
    assert ended([process], 120) == [1], hosts.output("missing")
    said = hosts.output("missing")[0]
    assert f"hosta still waits for all 2 ranks to meet at 10.77.0.1:29511, at most {TIMEOUT} s" in said
