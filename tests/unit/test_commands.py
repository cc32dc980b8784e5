"""The verbs and their words, in this process."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from lit_fsdp import __main__, commands
from lit_fsdp.checkpoint.run_folder import Resume, check_run_folder, create_run_folder, find_resume
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.config.locations import shipped_file
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError, ConfigError


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        commands.run(list(words))
    return caught.value


def test_help_is_a_result_and_no_words_are_a_mistake(capsys):
    for word in ("-h", "--help", "help"):
        assert commands.run([word]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert all(f"\n  {verb} " in out for verb in ("fit", "audit", "data", "ckpt", "export", "slurm"))
        assert max(map(len, out.splitlines())) <= 80
    assert commands.run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: lit-fsdp VERB")
    for words in (["fit"], ["audit"], ["plan"], ["data", "inspect"], ["slurm", "render"], ["model", "prepare"]):
        assert (refused(*words).field, refused(*words).given) == ("model.name", "no value")


def test_names_of_models_and_options_of_sbatch_get_a_fix():
    fix = refused("fit", "--config", "model/Llama-3.1-8B").fix
    assert fix == f"write --model.name {shipped_file('model/Llama-3.1-8B', '.json')[0]}"
    for word in ("--gpus=8", "--gres=gpu:8", "--ntasks-per-node=8"):
        error = refused("slurm", "render", "--config", "debug/smoke", word)
        assert (error.field, error.fix) == (word.partition("=")[0], "write --gpus-per-node N")


def test_an_unknown_verb_gets_the_nearest():
    for word, fix in (
        ("fits", "lit-fsdp fit ..."),
        ("exprot", "lit-fsdp export ..."),
        ("dpo", "lit-fsdp fit --model lit_fsdp.PreferenceModule ..."),
        ("xyz", "see lit-fsdp --help"),
        ("--config", "lit-fsdp fit ..."),
    ):
        error = refused(word)
        assert error.fix == fix
        assert {"fit", "export", "doctor"} <= set(error.allowed.split(", "))


def test_an_evaluation_says_that_checkpoints_are_not_used(tmp_path, capsys):
    folder = tmp_path / "run"
    assert find_resume("validate", None, folder, CheckpointConfig(), False) == Resume(None)
    assert capsys.readouterr().err == ""
    save_checkpoint(folder / "checkpoints/step-00000001", {}, {}, {"global_step": 1}, "full")
    assert find_resume("validate", None, folder, CheckpointConfig(), False) == Resume(None)
    assert capsys.readouterr().err.endswith("for the last one, add --ckpt_path last\n")
    missing = tmp_path / "nothing"
    with pytest.raises(CheckpointError, match=f"^{missing} does not exist; see lit-fsdp ckpt ls"):
        find_resume("test", str(missing), folder, CheckpointConfig(), False)


def test_who_refuses_a_used_run_folder(tmp_path, monkeypatch):
    """Every rank, but not one that Lightning started, for which the first process has looked before it trained."""

    def found(word: str | None, folder: str) -> Resume:
        return find_resume("fit", word, tmp_path / folder, CheckpointConfig(), False)

    save_checkpoint(tmp_path / "used/checkpoints/step-00000001", {}, {}, {"global_step": 1}, "full")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert found("last", "new") == Resume(None)  # a requeued job without a checkpoint starts afresh
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    for restarts in ("0", "3"):  # of torchrun, whose first start and restarts have the same command
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        with nullcontext() if restarts != "0" else pytest.raises(CheckpointError, match="no complete checkpoint"):
            assert found("last", "new") == Resume(None)
        assert str(found("last", "used").path).endswith("step-00000001")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):  # not of a model that was not trained
        find_resume("validate", "last", tmp_path / "new", CheckpointConfig(), False)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    assert found(None, "used") == Resume(None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match="has 1 checkpoint"):
        found(None, "used")


def test_a_run_folder_that_cannot_be_created_or_written_is_refused(tmp_path, monkeypatch):
    create_run_folder(tmp_path / "runs/new")
    (tmp_path / "file").touch()
    for folder, reason in (("file", "File exists"), ("file/run", "Not a directory"), ("runs", "not writable")):
        monkeypatch.setattr("os.access", lambda path, mode: path.name != "runs")  # tests may run as root
        with pytest.raises(ConfigError, match=rf"^trainer.default_root_dir: got {tmp_path / folder} \({reason}\)"):
            create_run_folder(tmp_path / folder)
    check_run_folder(tmp_path / "more/new")
    assert not (tmp_path / "more").exists()  # every rank checks, the first one creates
    for folder, nearest, reason in (
        ("file", "file", "Not a directory"),
        ("file/run", "file", "Not a directory"),
        ("runs/a/b", "runs", "not writable"),
    ):
        with pytest.raises(ConfigError, match=rf"{tmp_path / folder} \({tmp_path / nearest}: {reason}\)"):
            check_run_folder(tmp_path / folder)
    with pytest.raises(ConfigError, match=r"got s3:/bucket/run\n.*a folder of a file system"):
        check_run_folder(Path("s3://bucket/run"))


def test_flags_are_never_abbreviated_and_their_values_are_checked(tmp_path, capsys):
    for words, field, fix in (
        (["export", "--checkpoint", "x"], "lit-fsdp export --checkpoint", "write --ckpt"),
        (["export", "--outt=x"], "lit-fsdp export --outt", "write --out"),
        (["generate", "--max_new", "3"], "lit-fsdp generate --max_new", "write --max_new_tokens"),
    ):
        error = refused(*words)
        assert (error.field, error.fix) == (field, fix)
    assert refused("export", "--ckpt", "x", "--out", "y", "--dtype", "fp8").given == "fp8"
    assert "--out" in refused("export", "--ckpt", "x").given
    assert refused("export", "--ckpt", "x", "--out", "y", "extra").field.startswith("lit-fsdp export")
    allowed = refused("generate", "--model", str(tmp_path), "--prompt", "x").allowed
    assert allowed == "a model folder with config.json, or an adapter's with adapter_config.json"
    assert capsys.readouterr() == ("", "")


def test_who_reads_the_output_may_have_enough(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:  # as behind `| head`, which has enough
        monkeypatch.setattr("sys.stdout", closed)
        assert __main__.main(["recipes", "ls"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == ""
