"""Following, asking after and ending jobs: exit codes, requeues, arrays, and a controller that is away or forgets."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lit_fsdp.__main__ import main
from lit_fsdp.launch import slurm_follow
from lit_fsdp.launch.slurm_follow import follow
from tests.unit.launch.fake_slurm import FakeSlurm, job_line

ENDED = "2026-01-01 00:00:00 ended with exit code"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A run folder with job 4711, whose controller answers at once."""
    fake = FakeSlurm(tmp_path / "fake", monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm_follow, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(slurm_follow, "_ASK_SECONDS", 0.0)
    monkeypatch.setattr(slurm_follow, "_SETTLE_SECONDS", 0.1)
    logs = tmp_path / "run" / "slurm"
    logs.mkdir(parents=True)
    (logs / "jobs.jsonl").write_text(json.dumps({"job_id": "12"}) + "\n" + json.dumps({"job_id": "4711"}) + "\n")
    return fake


def log(name: str, text: str) -> None:
    with (Path("run") / "slurm" / name).open("a") as file:
        file.write(text)


def test_requeues_are_followed_and_the_output_copied_once(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    log("4711.log", f"start\n{ENDED} 75\n{ENDED} 0\n")
    log("4711.rank-0.log", "step 1/2 café\nstep 2/2\n")
    running, waiting = job_line("RUNNING"), job_line("PENDING")
    slurm.states(waiting, running, running, job_line("COMPLETING", "75:0"), waiting, running, job_line("COMPLETED"))
    state = follow("4711", Path("run"))
    assert (state.state, state.exit_code) == ("COMPLETED", 0)
    lines = capsys.readouterr().err.splitlines()
    said = [line.split(" ")[2] for line in lines if line.startswith("job ")]
    assert said == ["PENDING", "RUNNING", "COMPLETING", "PENDING", "RUNNING", "COMPLETED"]
    assert [lines.count(line) for line in ("step 1/2 café", "step 2/2", f"{ENDED} 0")] == [1, 1, 1]


def test_a_job_that_looks_ended_for_a_moment(slurm: FakeSlurm):
    """A node that fails: the job shows NODE_FAIL before it is back in the queue."""
    slurm.states(job_line("RUNNING"), job_line("NODE_FAIL"), job_line("PENDING"), job_line("COMPLETED"))
    assert follow("4711", Path("run")).state == "COMPLETED"


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        *(("COMPLETED", "0:0", 0), ("FAILED", "3:0", 3), ("TIMEOUT", "0:0", 1), ("CANCELLED", "0:15", 143)),
        *(("CANCELLED", "0:0", 1), ("OUT_OF_MEMORY", "0:125", 253), ("PREEMPTED", "0:0", 1), ("FAILED", "75:0", 75)),
    ],
)
def test_submit_with_wait_ends_as_the_job_does(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, state: str, code: str, expected: int
):
    from types import SimpleNamespace

    from lit_fsdp.commands import slurm as command
    from tests.unit.launch.jobs import planned

    job, _ = planned(trainer={"default_root_dir": str(Path("run").absolute())})
    monkeypatch.setattr("lit_fsdp.launch.slurm_submit.submit", lambda job, values: "4711")
    slurm.states(job_line("RUNNING"), job_line(state, code))
    assert command._submit(job, {}, SimpleNamespace(probe=False, wait=True)) == expected


def test_of_an_array_the_worst_task_counts(slurm: FakeSlurm):
    """One that was cancelled before it began has the exit code 0."""
    tasks = [
        job_line("COMPLETED", number="4712", more="ArrayJobId=4711 ArrayTaskId=0"),
        job_line("CANCELLED", number="4713", more="ArrayJobId=4711 ArrayTaskId=1"),
        job_line("COMPLETED", number="4711", more="ArrayJobId=4711 ArrayTaskId=2"),
    ]
    log("4713.rank-0.log", "of the second\n")
    slurm.states("\n".join(tasks))
    state = follow("4711", Path("run"))
    assert (state.job_id, state.raw_id, state.state) == ("4711_1", "4713", "CANCELLED")


def test_every_task_of_an_array_is_copied(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    lines = [job_line("COMPLETED", number=str(4711 + i), more=f"ArrayJobId=4711 ArrayTaskId={i}") for i in range(3)]
    for i in range(3):
        log(f"{4711 + i}.rank-0.log", f"of task {i}\n")
    slurm.states("\n".join(lines))
    follow("4711", Path("run"))
    err = capsys.readouterr().err
    assert all(f"of task {i}\n" in err for i in range(3))


def test_a_controller_that_is_away_for_a_while(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    slurm.states(job_line("RUNNING"), "down", "down", "down", job_line("RUNNING"), job_line("COMPLETED"))
    assert follow("4711", Path("run")).state == "COMPLETED"
    assert capsys.readouterr().err.count("the controller does not answer") == 1


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (9, "FAILED")])
def test_a_controller_that_has_forgotten_the_job_is_answered_by_its_log(slurm: FakeSlurm, code: int, state: str):
    log("4711.log", f"2026-01-01 00:00:00 start 2 on n[1-2], meeting at n1:2\n{ENDED} 75\n{ENDED} {code}\n")
    slurm.states(job_line("RUNNING"), "")
    found = follow("4711", Path("run"))
    assert (found.state, found.exit_code, found.restarts, found.nodes) == (state, code, 2, "n[1-2]")


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("slurmstepd: error: *** JOB 4711 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***\n", "DUE TO TIME LIMIT"),
        ("", "ends in the middle of a start"),
    ],
)
def test_a_log_that_is_cut_off_after_a_requeue_tells_no_exit_code(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], last: str, why: str
):
    starts = [f"2026-01-01 00:00:00 start {i} on n[1-2], meeting at n1:2\n" for i in range(2)]
    log("4711.log", f"{starts[0]}{ENDED} 75\n{starts[1]}{last}")
    slurm.states("")
    assert main(["slurm", "status", "run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("job 4711  UNKNOWN  ")
    assert "restarts 1  exit code unknown" in out
    assert why in out
    assert (follow("4711", Path("run")).state, main(["slurm", "cancel", "run"])) == ("UNKNOWN", 0)
    assert "job 4711 has ended already: UNKNOWN" in capsys.readouterr().err


def test_or_by_the_accounting_where_there_is_one(slurm: FakeSlurm):
    slurm.answer("sacct", "4711|4711|CANCELLED by 0|0:15|n[1-2]|None|00:02:00")
    slurm.states("")
    assert (follow("4711", Path("run")).state, follow("4711", Path("run")).exit_code) == ("CANCELLED", 143)


def test_forgotten_by_all(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    slurm.states("")
    for word, says, fix in (
        ("4711", "4711: slurm_load_jobs error: Invalid job id specified", "give the run folder, or see squeue --me"),
        ("run", "4711, which SLURM has forgotten, without a log", "lit-fsdp slurm submit starts a new job"),
    ):
        for verb in ("status", "cancel"):
            assert main(["slurm", verb, word]) == 2
            err = capsys.readouterr().err
            assert (says in err, fix in err, err.count("run folder")) == (True, True, 1)
    assert slurm.calls("scancel") == []


def test_last_lines_that_come_late_are_shown(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    slurm.states(job_line("COMPLETED"))
    log("4711.log", "start\n")
    monkeypatch.setattr(slurm_follow, "_SETTLE_SECONDS", 100.0)

    def late() -> None:
        time.sleep(0.3)
        log("4711.rank-0.log", "the last step\n")
        log("4711.log", f"{ENDED} 0\n")

    thread = threading.Thread(target=late)
    thread.start()
    follow("4711", Path("run"))
    thread.join()
    assert "the last step" in capsys.readouterr().err


def test_ctrl_c_leaves_the_job_alone(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    from types import SimpleNamespace

    from lit_fsdp.commands import slurm as command
    from tests.unit.launch.jobs import planned

    job, _ = planned(trainer={"default_root_dir": str(Path("run").absolute())})
    monkeypatch.setattr("lit_fsdp.launch.slurm_submit.submit", lambda job, values: "4711")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    slurm.states(job_line("RUNNING"))

    def once_it_follows() -> None:
        while not slurm.calls("scontrol"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=once_it_follows, daemon=True).start()
    try:
        assert command._submit(job, {}, SimpleNamespace(probe=False, wait=True)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "no longer followed; job 4711 goes on. End it: lit-fsdp slurm cancel 4711" in capsys.readouterr().err
    assert slurm.calls("scancel") == []


def test_status_by_folder_is_of_the_newest_job(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    log("4711.rank-0.log", "step 1/9\nstep 2/9\n")
    slurm.states(job_line("RUNNING"))
    assert main(["slurm", "status", "run"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("job 4711  RUNNING  00:01:00  nodes n[1-2]  restarts 1")
    assert second.endswith("4711.rank-0.log: step 2/9")
    assert main(["slurm", "status", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "RUNNING"


@pytest.mark.parametrize("word", ["123_1", "123_[2-5]", "123"])
def test_numbers_as_slurm_writes_them_are_numbers(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], word: str):
    folder = Path("run/slurm").absolute()
    log("125.rank-0.log", "the last line\n")
    slurm.states(
        f"{job_line('RUNNING', number='125', more='ArrayJobId=123 ArrayTaskId=1')}\n   StdOut={folder}/125.log"
    )
    assert main(["slurm", "status", word]) == 0
    out = capsys.readouterr().out
    assert out.startswith("job 123_1  RUNNING")
    assert "125.rank-0.log: the last line" in out
    assert slurm.calls("scontrol")[-1] == f"show job --oneliner {word} "


@pytest.mark.parametrize(
    ("word", "says"),
    [("nothing", "which is no folder and no number"), ("fake", "in which no job was submitted"), ("12x", "no number")],
)
def test_words_that_are_no_job(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], word: str, says: str):
    for verb in ("status", "cancel"):
        assert main(["slurm", verb, word]) == 2
        assert says in capsys.readouterr().err


def test_cancel_keeps_the_job_out_of_the_queue(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    slurm.states("\n".join(job_line("RUNNING", number=n, more="ArrayJobId=4711 ArrayTaskId=1") for n in ("4711", "99")))
    assert main(["slurm", "cancel", "run"]) == 0
    assert {path.name for path in Path("run/slurm").glob("cancelled-*")} == {"cancelled-4711", "cancelled-99"}
    assert slurm.calls("scancel") == ["4711 "]
    assert "cancelled job 4711" in capsys.readouterr().err


def test_cancel_of_a_job_that_has_ended(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    slurm.states(job_line("COMPLETED"))
    assert main(["slurm", "cancel", "run"]) == 0
    assert "job 4711 has ended already: COMPLETED" in capsys.readouterr().err
    assert slurm.calls("scancel") == []
    assert not list(Path("run/slurm").glob("cancelled-*"))
