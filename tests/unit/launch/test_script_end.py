"""The last part of the sbatch file, with a stand-in for SLURM: who is put back into the queue, and how it goes on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit.launch.fake_step import Cluster, text_of


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(75, "0", True), (75, "2", True), (75, "3", False), (1, "0", False), (0, "0", False), (137, "1", False)],
)
def test_only_a_job_that_saved_and_stopped_is_put_back(
    cluster: Cluster, tmp_path: Path, code: int, restarts: str, requeued: bool
):
    done = cluster.run(text_of(tmp_path, {"max_requeues": 3}), step_code=code, SLURM_RESTART_COUNT=restarts)
    assert done.returncode == code
    assert cluster.words("scontrol-requeue") == (["4711"] if requeued else None)


@pytest.mark.parametrize(
    ("cap", "restarts", "is_started"), [(3, "3", True), (3, "4", False), (0, "0", True), (0, "1", False)]
)
def test_starts_that_slurm_caused_count_too(
    cluster: Cluster, tmp_path: Path, cap: int, restarts: str, is_started: bool
):
    """After a preemption or the loss of a node nobody asks the script."""
    done = cluster.run(text_of(tmp_path, {"max_requeues": cap}), SLURM_RESTART_COUNT=restarts)
    assert done.returncode == (0 if is_started else 1)
    assert (cluster.words("srun-srun") is not None) is is_started
    said = f"not started again: {cap} times are enough (slurm.max_requeues)"
    assert (said in done.stdout) is not is_started
    assert done.stdout.endswith(f" ended with exit code {done.returncode}\n")
    assert cluster.words("scontrol-requeue") is None


@pytest.mark.parametrize(
    ("slurm", "option"),
    [
        ({}, "--requeue"),
        ({"max_requeues": 1}, "--requeue"),
        ({"max_requeues": 0}, "--no-requeue"),
        ({"requeue": False}, "--no-requeue"),
    ],
)
def test_slurm_is_told_whether_it_may_start_the_job_again(tmp_path: Path, slurm: dict[str, Any], option: str):
    assert f"\n#SBATCH {option}\n" in text_of(tmp_path, slurm)


def test_a_cancelled_job_is_not_put_back(cluster: Cluster, tmp_path: Path):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "cancelled-4711").touch()
    cluster.run(text_of(tmp_path), step_code=75)
    assert cluster.words("scontrol-requeue") is None


def test_without_requeue_nothing_is_put_back(cluster: Cluster, tmp_path: Path):
    assert cluster.run(text_of(tmp_path, {"requeue": False}), step_code=75).returncode == 75
    assert cluster.words("scontrol-requeue") is None


@pytest.mark.parametrize(
    ("restarts", "has_checkpoint", "given", "words"),
    [
        ("0", False, None, []),
        ("0", True, "best", ["--ckpt_path", "best"]),
        ("1", True, "best", ["--ckpt_path", "last"]),
        ("1", False, "/other run/step-00000010", ["--ckpt_path", "/other run/step-00000010"]),
        ("2", True, None, ["--ckpt_path", "last"]),
    ],
)
def test_a_job_that_starts_again_resumes(
    cluster: Cluster, tmp_path: Path, restarts: str, has_checkpoint: bool, given: str | None, words: list[str]
):
    if has_checkpoint:
        (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    more = {"ckpt_path": given} if given else {}
    cluster.run(text_of(tmp_path, **more), SLURM_RESTART_COUNT=restarts)
    called = cluster.words("srun-srun")
    assert called is not None
    assert called[called.index("--config") + 2 :] == words


def test_a_refused_requeue_is_said(cluster: Cluster, tmp_path: Path):
    (cluster.folder / "bin" / "scontrol").write_text("#!/bin/bash\n[ $1 != requeue ] || exit 1\n")
    done = cluster.run(text_of(tmp_path), step_code=75)
    assert "go on by hand: lit-fsdp slurm submit with the same words and --ckpt_path last" in done.stdout


def test_each_seed_has_its_folder_and_resumes_from_it(cluster: Cluster, tmp_path: Path):
    (tmp_path / "seed-7" / "checkpoints" / "step-00000010").mkdir(parents=True)
    text = text_of(tmp_path, {"seeds": [5, 7]})
    for index, seed, resumed in (("0", "5", []), ("1", "7", ["--ckpt_path", "last"])):
        cluster.run(text, SLURM_ARRAY_JOB_ID="4700", SLURM_ARRAY_TASK_ID=index, SLURM_RESTART_COUNT="1")
        called = cluster.words("srun-srun")
        assert called is not None
        own = ["--seed_everything", seed, "--trainer.default_root_dir", f"{tmp_path}/seed-{seed}"]
        assert called[called.index("--config") + 2 :] == [*own, *resumed]


@pytest.mark.parametrize(("code", "requeued"), [(138, True), (143, False)])
def test_a_process_that_died_of_the_signal_before_it_could_listen(
    cluster: Cluster, tmp_path: Path, code: int, requeued: bool
):
    cluster.run(text_of(tmp_path), step_code=code)
    assert (cluster.words("scontrol-requeue") == ["4711"]) is requeued


@pytest.mark.parametrize(
    ("earlier", "now", "requeued"),
    [
        ("", "task 0: User defined signal 1", True),
        ("", "tasks 0,2-3: Exited with exit code 75", True),
        ("task 0: User defined signal 1", "task 0: Exited with exit code 1", False),
        ("", "task 0: Exited with exit code 7", False),
        ("", "task 1: Terminated", False),
    ],
)
def test_one_that_died_of_sigterm_does_not_hide_that_another_stopped(
    cluster: Cluster, tmp_path: Path, earlier: str, now: str, requeued: bool
):
    """What srun said when the job was started before does not count."""
    log = tmp_path / "slurm" / "4711.log"
    log.parent.mkdir()
    log.write_text(f"srun: error: n1: {earlier}\n" * bool(earlier))
    says = f"srun: error: n1: {now}\nsrun: error: n2: task 1: Terminated"
    step = f"#!/bin/bash\necho {shlex.quote(says)} >> {shlex.quote(str(log))}\nexit 143\n"
    (cluster.folder / "bin" / "srun").write_text(step)
    assert cluster.run(text_of(tmp_path)).returncode == (75 if requeued else 143)
    assert (cluster.words("scontrol-requeue") == ["4711"]) is requeued


def test_a_task_of_an_array_is_named_by_its_index(cluster: Cluster, tmp_path: Path):
    """The last task of an array has the array's number, by which scontrol requeues all of them."""
    text = text_of(tmp_path, {"seeds": [5, 7]})
    cluster.run(text, step_code=75, SLURM_JOB_ID="40", SLURM_ARRAY_JOB_ID="40", SLURM_ARRAY_TASK_ID="1")
    assert cluster.words("scontrol-requeue") == ["40_1"]


LOST = "rank 0 (n1) lost contact: no word from rank 3 (n2): killed, stopped, hanging or cut off; see its own log"
HANGING = "rank 0 (n1) lost contact: rank 3 (n2) did not come, but is alive: hanging, or much slower than the others"
FAILED = "rank 0 (n1) lost contact: rank 3 (n2) failed: ValueError: no such row"


@pytest.mark.parametrize(
    ("earlier", "now", "saves", "requeued"),
    [
        ("", LOST, True, True),
        ("", HANGING, True, True),
        (LOST, LOST, True, True),
        ("", LOST, False, False),  # it would end there again
        (LOST, "", True, False),
        ("", FAILED, True, False),
        ("", "", True, False),
    ],
)
def test_a_rank_that_was_lost_without_a_word_is_worth_another_start(
    cluster: Cluster, tmp_path: Path, earlier: str, now: str, saves: bool, requeued: bool
):
    """A cut cable or a stopped process ends the others by their timeout, with exit code 1."""
    log = tmp_path / "slurm" / "4711.rank-0.log"
    log.parent.mkdir()
    log.write_text(f"{earlier}\n")
    checkpoint = shlex.quote(str(tmp_path / "checkpoints" / "step-00000010"))
    step = f"#!/bin/bash\necho {shlex.quote(now)} >> {shlex.quote(str(log))}\n"
    (cluster.folder / "bin" / "srun").write_text(step + (f"mkdir -p {checkpoint}\n" if saves else "") + "exit 1\n")
    done = cluster.run(text_of(tmp_path))
    assert done.returncode == 1
    assert (cluster.words("scontrol-requeue") == ["4711"]) is requeued
    assert ("a rank was killed, stopped, hung or was cut off" in done.stdout) is (now in (LOST, HANGING))
    assert ("no checkpoint was made since this start" in done.stdout) is (now == LOST and not saves)
