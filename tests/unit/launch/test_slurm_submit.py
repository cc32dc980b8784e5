"""``slurm render`` and ``submit`` against stand-ins for SLURM that also fail in its ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lit_fsdp.__main__ import main
from lit_fsdp.checkpoint.store import save_checkpoint
from tests.unit.launch.conftest import FakeSlurm


def slurm_command(verb: str, *words: str) -> int:
    return main(["slurm", verb, "--config", "r.yaml", *words])


def test_everything_about_a_job_lies_in_the_run_folder(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    assert slurm_command("submit", "--time", "1:00:00", "--ckpt_path", "null") == 0
    out, err = capsys.readouterr()
    folder = Path("run").absolute() / "slurm"
    assert out == "4711\n"
    assert {path.name for path in folder.iterdir()} == {"4711.sbatch", "recipe.yaml"}
    assert "#SBATCH --time=1:00:00\n" in (folder / "4711.sbatch").read_text()
    resolved = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert resolved["trainer"]["default_root_dir"] == str(folder.parent)
    for line in ("squeue -j 4711", "scancel 4711", f"tail -F {folder}/4711.rank-0.log"):
        assert line in err
    assert slurm.words("sbatch") == ["--parsable", f"{folder}/job.sbatch"]


def test_render_prints_the_script_whatever_it_finds_and_submit_refuses_unless_forced(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
):
    wrong = ["--ckpt_path", "/no/such/step"]
    assert slurm_command("render", *wrong) == 0
    out, err = capsys.readouterr()
    assert (out.startswith("#!/bin/bash\n"), out.endswith('exit "$code"\n')) == (True, True)
    assert "error: " in err
    assert not Path("run").exists()
    assert slurm_command("submit", *wrong) == 1
    out, err = capsys.readouterr()
    assert (out, "not submitted: 1 error(s); --force submits anyway" in err) == ("", True)
    assert slurm.words("sbatch") is None
    assert slurm_command("submit", *wrong, "--force") == 0
    assert capsys.readouterr().out == "4711\n"
    save_checkpoint(Path("run/checkpoints/step-00000001"), {}, {}, {"global_step": 1}, "full")
    assert slurm_command("submit") == 1
    assert "which has 1 checkpoint(s)" in capsys.readouterr().err
    assert slurm_command("submit", "--ckpt_path", "last") == 0


def test_of_two_flags_that_differ_neither_is_passed_over(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    for short, flag in (
        ("--nodes=2", "--trainer.num_nodes=4"),
        ("--nodes=2", "--slurm.nodes=4"),
        ("--gpus-per-node=8", "--trainer.devices=4"),
        ("--gpus-per-node=8", "--slurm.gpus_per_node=4"),
        ("--time=1:00:00", "--slurm.time=2:00:00"),
    ):
        (name, size), (other, value) = short.split("="), flag.split("=")
        section, _, key = other.partition(".")
        whole = f"{{{key}: {value!r}}}"
        for verb, words in (
            ("render", (other, value)),
            ("submit", (flag,)),
            ("render", (section, whole)),
            ("render", (f"{section}={whole}",)),
            ("submit", (f"{section}={{{key}: 1}}", flag)),
        ):
            assert slurm_command(verb, *words, short) == 2
            assert f"error: {name}: got {size} with {other} {value}\n" in capsys.readouterr().err
    assert slurm.words("sbatch") is None
    for verb in (["render"], ["submit", "--dry-run"]):
        assert slurm_command(*verb, "--time=1:00:00", "--slurm.time=1:00:00") == 0
        assert "#SBATCH --time=1:00:00\n" in capsys.readouterr().out
    assert slurm.words("sbatch") is None


def test_what_sbatch_says(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    for said, number in (("4712;cluster", "4712"), ("Welcome to our site\n12\n", "12"), ("77;a-b.c\nbye", "77")):
        (slurm.folder / "sbatch.out").write_text(said)
        assert slurm_command("submit", "--trainer.default_root_dir", f"run{number}") == 0
        assert capsys.readouterr().out == f"{number}\n"
    (slurm.folder / "sbatch.err").write_text("Invalid account or account/partition")
    (slurm.folder / "sbatch.out").unlink()
    assert slurm_command("submit") == 2
    out, err = capsys.readouterr()
    assert (out, "error: sbatch: got Invalid account or account/partition (exit code 1)" in err) == ("", True)
    (slurm.folder / "sbatch.out").write_text("done")
    assert slurm_command("submit") == 2
    assert "squeue --me" in capsys.readouterr().err


def test_a_secret_goes_into_no_file(slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]):
    assert slurm_command("submit", "--slurm.env", "{HF_TOKEN: hf_abcdefghijk}", "--force") == 2
    assert "error: slurm.env.HF_TOKEN: got a secret\n" in capsys.readouterr().err
    assert not Path("run").exists()
