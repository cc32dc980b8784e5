"""Submitting, finding and ending jobs, against stand-ins for SLURM that also fail in its ways."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml

from lit_fsdp.__main__ import main
from lit_fsdp.launch import slurm_client
from tests.unit.launch.fake_slurm import FakeSlurm, job_line

RUN = "run"


def slurm_command(*words: str) -> int:
    return main(["slurm", *words])


def submit(*words: str) -> int:
    return slurm_command("submit", "--config", "r.yaml", *words)


def test_everything_about_a_job_lies_in_the_run_folder(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    assert submit("--time", "1:00:00") == 0
    out, err = capsys.readouterr()
    assert out == "4711\n"
    folder = Path(RUN).absolute() / "slurm"
    assert {path.name for path in folder.iterdir()} == {"4711.sbatch", "recipe.yaml", "jobs.jsonl"}
    assert (folder / "4711.sbatch").read_text() == (slurm.folder / "submitted").read_text()
    assert "#SBATCH --time=1:00:00\n" in (folder / "4711.sbatch").read_text()
    resolved = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert resolved["trainer"]["default_root_dir"] == str(folder.parent)
    assert json.loads((folder / "jobs.jsonl").read_text())["job_id"] == "4711"
    for line in (f"tail -F {folder}/4711.rank-0.log", "lit-fsdp slurm status 4711", "lit-fsdp slurm cancel 4711"):
        assert line in err
    assert slurm.calls("sbatch") == [f"--parsable {folder}/job.sbatch "]


@pytest.mark.parametrize(
    ("said", "number"), [("4711;cluster", "4711"), ("Welcome to our site\n12\n", "12"), ("77;a-b.c\nbye", "77")]
)
def test_the_number_is_found_in_what_sbatch_says(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], said: str, number: str
):
    slurm.answer("sbatch.out", said)
    assert submit() == 0
    assert capsys.readouterr().out == f"{number}\n"


def test_a_warning_of_sbatch_is_shown(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    slurm.answer("sbatch.err", "sbatch: warning: QOS low has no limit")
    assert submit() == 0
    assert "QOS low has no limit" in capsys.readouterr().err


def test_what_sbatch_refuses_is_said_in_our_form(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    (slurm.folder / "sbatch.out").unlink()
    slurm.answer("sbatch.err", "sbatch: error: Batch job submission failed: Invalid account or account/partition")
    assert submit() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: sbatch: got sbatch: error: Batch job submission failed: Invalid account" in err
    assert "(exit code 1)\n  allowed: " in err
    assert "\n  fix: " in err
    assert not (Path(RUN) / "slurm" / "jobs.jsonl").exists()
    slurm.answer("sbatch.out", "4711")
    assert submit() == 0  # nothing of it is left in the way


def test_an_sbatch_that_says_no_number(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    slurm.answer("sbatch.out", "done")
    assert submit() == 2
    assert "squeue --me" in capsys.readouterr().err


def test_a_controller_that_is_down(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    (slurm.folder / "sbatch.out").unlink()
    slurm.answer("sbatch.err", "sbatch: error: Unable to contact slurm controller (connect failure)")
    assert submit() == 2
    assert "allowed: a controller that answers" in capsys.readouterr().err


def test_a_machine_without_slurm(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(
        slurm_client.shutil, "which", lambda name: None if name in ("sbatch", "sinfo") else f"/bin/{name}"
    )
    assert submit() == 2
    err = capsys.readouterr().err
    assert "note: the cluster's limits: not compared (sinfo: not found on this machine)" in err
    assert "error: sbatch: got not found on this machine\n  allowed: a login node" in err
    assert slurm_command("render", "--config", "r.yaml") == 0  # needs none


def test_a_command_that_hangs_is_given_up(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch):
    (slurm.folder / "bin" / "squeue").write_text("#!/bin/bash\nexec sleep 60\n")
    (slurm.folder / "bin" / "squeue").chmod(0o755)
    began = time.monotonic()
    with pytest.raises(slurm_client.SlurmSilent, match="no answer in 0 s"):
        slurm_client.run_slurm(["squeue"], timeout_seconds=0.2)
    assert time.monotonic() - began < 50


def test_ctrl_c_while_sbatch_is_at_work_loses_no_number(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    wait = slurm.folder / "sbatch.wait"
    wait.touch()

    def interrupt() -> None:
        while not (slurm.folder / "sbatch.begun").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        wait.unlink()

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    code = submit()
    thread.join()
    assert code == 130
    assert "job 4711 was submitted before Ctrl-C; end it: lit-fsdp slurm cancel 4711" in capsys.readouterr().err
    assert json.loads((Path(RUN) / "slurm" / "jobs.jsonl").read_text())["job_id"] == "4711"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED"])
def test_a_second_job_for_one_run_folder_waits_for_the_first(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], state: str
):
    assert submit() == 0
    slurm.states(job_line(state))
    assert submit() == 2
    assert f"whose job 4711 is {state}" in capsys.readouterr().err
    assert len(slurm.calls("sbatch")) == 1


@pytest.mark.parametrize(
    "states", [("",), (job_line("COMPLETED"),), (job_line("PREEMPTED"),), (job_line("NODE_FAIL"),)]
)
def test_after_the_first_has_ended_or_is_forgotten(slurm: FakeSlurm, states: tuple[str, ...]):
    assert submit() == 0
    slurm.states(*states)
    slurm.answer("sbatch.out", "4712")
    assert submit() == 0
    assert len((Path(RUN) / "slurm" / "jobs.jsonl").read_text().splitlines()) == 2


def test_nothing_is_submitted_while_nobody_knows_of_the_first(slurm: FakeSlurm):
    assert submit() == 0
    slurm.states("down")
    assert submit() == 2
    assert len(slurm.calls("sbatch")) == 1


def test_a_damaged_list_of_jobs_is_named(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    assert submit() == 0
    with (Path(RUN) / "slurm" / "jobs.jsonl").open("a") as file:
        file.write('{"job_id": "47\n')
    assert slurm_command("status", RUN) == 2
    assert "jobs.jsonl, line 2" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    Path("file").touch()
    assert submit("--trainer.default_root_dir", "file/run") == 2
    assert "error: trainer.default_root_dir: got " in capsys.readouterr().err


def test_render_and_submit_say_all_errors_and_end_alike(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    slurm.answer("sinfo", "gpu*|1:00:00|1-infinite|4|64|gpu:8")
    wrong = ("--time", "1", "--slurm.job_name", "bash", "--nodes", "8")
    for verb, printed in (("render", True), ("submit", False)):
        assert slurm_command(verb, "--config", "r.yaml", *wrong) == 2
        out, err = capsys.readouterr()
        assert [line.split(":")[1].strip() for line in err.splitlines() if line.startswith("error:")] == [
            "slurm.job_name",
            "slurm.nodes",
            "slurm.time",
        ]
        assert "submitted: 3 of the checks found something" in err
        assert out.startswith("#!/bin/bash\n") is printed
    assert slurm.calls("sbatch") == []
    assert not Path(RUN).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "x"], "--nodes: invalid int value: 'x'"),
        (["--nodes", "2.5"], "--nodes: invalid int value"),
        (["--nodes", "0"], "slurm.nodes: got 0"),
        (["--nodes"], "--nodes: expected one argument"),
        (["--gpus-per-node", "-1"], "slurm.gpus_per_node: got -1"),
        (["--gpus-per-node", "3"], "global_batch_size"),
        (["--time", "abc"], "slurm.time: got 'abc'"),
        (["--time", "0"], "slurm.time: got '0'"),
        (["--partion", "gpu"], "write partition"),
        (["--nod", "2"], "write nodes"),
        (["--slurm.partion", "gpu"], "write slurm.partition"),
        (["--slurm.gpus_per_nod", "8"], "write slurm.gpus_per_node"),
        (["stray"], "stray"),
        (["--wait"], "a key that does not exist"),  # of submit
    ],
)
def test_wrong_words_of_the_command_line(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], words: list[str], says: str
):
    assert slurm_command("render", "--config", "r.yaml", *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_a_flag_does_not_go_into_a_section_that_is_none(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    Path("r.yaml").write_text(Path("r.yaml").read_text() + "slurm: [a]\n")
    assert slurm_command("render", "--config", "r.yaml", "--time", "30") == 2
    assert "error: slurm: got ['a']\n" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "line"), [("90", "90"), ("1-00", "1-00"), ("1:30:00", "1:30:00")])
def test_times_as_slurm_writes_them(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], flag: str, line: str):
    assert slurm_command("render", "--config", "r.yaml", "--time", flag) == 0
    assert f"#SBATCH --time={line}\n" in capsys.readouterr().out


def test_flags_win_over_fragments_and_fragments_over_the_recipe(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    Path("cluster.yaml").write_text("slurm: {partition: small, account: lab, time: '2:00:00', nodes: 2}\n")
    Path("r.yaml").write_text(Path("r.yaml").read_text() + "slurm: {partition: mine, qos: low}\n")
    slurm.answer("sinfo", "large*|infinite|1-infinite|99|256|gpu:8")
    words = ("--config", "r.yaml", "--config", "cluster.yaml", "--partition", "large", "--nodes", "4")
    assert slurm_command("render", *words) == 0
    out, err = capsys.readouterr()
    for line in ("--partition=large", "--account=lab", "--time=2:00:00", "--qos=low", "--nodes=4"):
        assert f"#SBATCH {line}\n" in out
    assert "slurm.nodes: 2 → 4 (--nodes)" in err
    assert "trainer.num_nodes: 2 → 4 (--nodes)" in err


@pytest.mark.parametrize("devices", ["", ", devices: auto", ", devices: -1"])
def test_the_size_may_stand_in_the_slurm_section_alone(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], devices: str
):
    """The Trainer of each rank reads it too, and so do the checks of batch and mesh."""
    text = Path("r.yaml").read_text().replace("  devices: 8\n", "").replace("  num_nodes: 2\n", "")
    assert "devices" not in text
    Path("r.yaml").write_text(text.replace("trainer:\n", f"trainer:\n{devices.replace(', ', '  ')}\n"))
    Path("cluster.yaml").write_text("slurm: {nodes: 2, gpus_per_node: 8}\n")
    assert slurm_command("submit", "--config", "r.yaml", "--config", "cluster.yaml") == 0
    assert "trainer.num_nodes: None → 2 (slurm.nodes)" in capsys.readouterr().err
    trainer = yaml.safe_load((Path(RUN) / "slurm" / "recipe.yaml").read_text())["trainer"]
    assert (trainer["num_nodes"], trainer["devices"]) == (2, 8)
    script = (Path(RUN) / "slurm" / "4711.sbatch").read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n" in script
