"""The verbs, their words and their exit codes, in this process; the run itself is replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import lit_fsdp
from lit_fsdp import __main__, cli, commands
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.errors import CheckpointError, ConfigError, ContractError, DataError

RECIPE = """
trainer: {devices: 2, max_steps: 4}
model: {name: some-model}
data: {train: rows.jsonl, val: rows.jsonl, global_batch_size: 4}
"""
Calls = list[tuple[str, dict[str, Any], list[str]]]
substitutes: list[Path] = []  # the checkpoints handed over with the last call
choosers: list[Any] = []


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE)
    return ["--config", "small.yaml"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What would have been handed to Lightning's command line."""
    found: Calls = []

    def run_verb(verb: str, values: dict[str, Any], flags: list[str], others: Sequence[Path], *signals: Any) -> int:
        found.append((verb, values, flags))
        substitutes[:] = others
        if signals[1:] and signals[1] is not None:
            choosers[:] = [signals[1]]
        return 0

    monkeypatch.setattr(cli, "run_verb", run_verb)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    def write(step: int, **metrics: float) -> Path:
        folder = tmp_path / "runs" / "small" / "checkpoints" / f"step-{step:08d}"
        save_checkpoint(folder, {}, {}, {"global_step": step, "metrics": metrics}, "full")
        return folder

    return write


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        commands.run(list(words))
    return caught.value


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_is_a_result(word: str, capsys: pytest.CaptureFixture[str]):
    assert commands.run([word]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ") and "merged" not in line] == [
        "fit",
        "validate",
        "test",
        "predict",
        "convert",
        "audit",
        "data",
        "model",
        "ckpt",
        "export",
        "generate",
        "doctor",
        "recipes",
        "slurm",
    ]


def test_no_words_are_a_mistake(capsys: pytest.CaptureFixture[str]):
    assert commands.run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: lit-fsdp VERB")


def test_the_version(capsys: pytest.CaptureFixture[str]):
    assert commands.run(["--version"]) == 0
    assert capsys.readouterr().out == f"lit_fsdp {lit_fsdp.__version__}\n"


@pytest.mark.parametrize(("word", "near"), [("fits", "fit"), ("exprot", "export"), ("xyz", "fit"), ("--config", "fit")])
def test_an_unknown_verb_gets_the_nearest(word: str, near: str):
    error = refused(word)
    known = "fit validate test predict convert audit data model ckpt export generate doctor recipes slurm"
    assert error.allowed == known.replace(" ", ", ")
    assert error.fix == f"lit-fsdp {near} ..."


def test_the_run_folder_is_named_after_the_first_file(recipe: list[str], calls: Calls):
    assert commands.run(["fit", *recipe, "--trainer.log_every_n_steps", "3", "--trainer.logger.name=x"]) == 0
    ((verb, values, flags),) = calls
    assert verb == "fit"
    assert values["trainer"]["default_root_dir"] == "runs/small"
    assert values["trainer"]["log_every_n_steps"] == 3
    assert values["trainer"]["strategy"] == {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {}}
    assert flags == ["--trainer.logger.name=x"]


def test_a_used_run_folder_is_refused_for_training_alone(
    recipe: list[str], calls: Calls, checkpoint: Callable[..., Path]
):
    checkpoint(2)
    checkpoint(4)
    error = refused("fit", *recipe)
    assert error.field == "trainer.default_root_dir"
    assert error.given == "runs/small, which holds 2 checkpoint(s), the newest of step 4"
    assert "--ckpt_path last" in error.fix
    assert commands.run(["validate", *recipe]) == 0
    assert commands.run(["fit", *recipe, "--print_config"]) == 0
    assert [(verb, values.get("ckpt_path")) for verb, values, _ in calls] == [("validate", None), ("fit", None)]


def test_words_for_checkpoints_become_paths(recipe: list[str], calls: Calls, checkpoint: Callable[..., Path]):
    best, last = checkpoint(2, val_loss=1.0), checkpoint(4, val_loss=2.0)
    for word in ("best", "last", str(best)):
        assert commands.run(["validate", *recipe, "--ckpt_path", word]) == 0
    assert [Path(values["ckpt_path"]).resolve() for _, values, _ in calls] == [best, last, best]
    words = ["--checkpoint.monitor", "val_loss", "--checkpoint.mode", "max"]
    assert commands.run(["fit", *recipe, "--ckpt_path", "best", *words]) == 0
    assert Path(calls[-1][1]["ckpt_path"]).resolve() == last


def test_substitutes_only_where_they_are_allowed(recipe: list[str], calls: Calls, checkpoint: Callable[..., Path]):
    one, two, three = (checkpoint(step, val_loss=loss) for step, loss in ((1, 0.2), (2, 0.1), (3, 0.3)))
    wanted = {
        ("last", "true"): [two, one],
        ("best", "true"): [one, three],
        (str(two), "true"): [],
        ("last", "false"): [],
    }
    for (word, allowed), others in wanted.items():
        assert commands.run(["fit", *recipe, "--ckpt_path", word, "--resume.fallback", allowed]) == 0
        assert [path.resolve() for path in substitutes] == others


@pytest.mark.parametrize("word", ["last", "best"])
def test_visible_damage_is_an_error_or_passed_over_loudly(
    word: str, recipe: list[str], calls: Calls, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    checkpoint(1, val_loss=0.2)
    (checkpoint(2, val_loss=0.1) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged: .*state.json(.|\n)*--resume.fallback true"):
        commands.run(["fit", *recipe, "--ckpt_path", word])
    assert (calls, capsys.readouterr().err) == ([], "")
    assert commands.run(["fit", *recipe, "--ckpt_path", word, "--resume.fallback", "true"]) == 0
    assert calls[0][1]["ckpt_path"] == "runs/small/checkpoints/step-00000001"
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("runs/small/checkpoints/step-00000002 is damaged: ")
    assert second == f"going on from runs/small/checkpoints/step-00000001 as {word} (resume.fallback)"


def test_a_run_folder_with_nothing_but_damage_is_used_too(
    recipe: list[str], calls: Calls, checkpoint: Callable[..., Path]
):
    (checkpoint(2) / "manifest.json").unlink()
    assert "holds 1 checkpoint(s)" in refused("fit", *recipe).given


@pytest.mark.parametrize("word", ["last", "best", "elsewhere"])
def test_a_checkpoint_that_is_not_there(recipe: list[str], calls: Calls, word: str):
    with pytest.raises(CheckpointError, match=r"runs/small|elsewhere"):
        commands.run(["fit", *recipe, "--ckpt_path", word])
    assert calls == []


def test_replacements_of_a_miniature_are_said(recipe: list[str], calls: Calls, capsys: pytest.CaptureFixture[str]):
    Path("mini.yaml").write_text("model: {miniature: true}\ntrainer: {max_steps: 2}\n")
    words = ["fit", *recipe, "--config", "mini.yaml"]
    assert commands.run(words) == 0
    assert capsys.readouterr().err == "miniature: trainer.max_steps: 4 → 2 (mini.yaml)\n"
    assert commands.run([*words, "--print_config"]) == 0
    assert capsys.readouterr().err == ""


def test_other_ranks_say_nothing(
    recipe: list[str], calls: Calls, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    Path("mini.yaml").write_text("model: {miniature: true}\ntrainer: {max_steps: 2}\n")
    assert commands.run(["fit", *recipe, "--config", "mini.yaml"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "field", "fix"),
    [
        (["export", "--checkpoint", "x"], "lit-fsdp export --checkpoint", "write --ckpt"),
        (["export", "--outt=x"], "lit-fsdp export --outt", "write --out"),
        (["generate", "--model", "x", "--prompts", "y"], "lit-fsdp generate --prompts", "write --prompt"),
        (["generate", "--max_new", "3"], "lit-fsdp generate --max_new", "write --max_new_tokens"),
    ],
)
def test_flags_are_never_abbreviated(words: list[str], field: str, fix: str):
    error = refused(*words)
    assert (error.field, error.fix) == (field, fix)


def test_values_of_flags_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "'fp8'" in refused("export", "--ckpt", "x", "--out", "y", "--dtype", "fp8").given
    assert "--out" in refused("export", "--ckpt", "x").given
    assert refused("export", "--ckpt", "x", "--out", "y", "extra").field.startswith("lit-fsdp export")
    assert refused("generate", "--model", str(tmp_path), "--prompt", "x").allowed == "a model folder with config.json"
    assert capsys.readouterr() == ("", "")


def test_exporting_what_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(CheckpointError, match="nothing-here"):
        commands.run(["export", "--ckpt", str(tmp_path / "nothing-here"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("a.b", 1, "2", "write 2"), 2, "error: a.b: got 1\n  allowed: 2\n  fix:     write 2\n"),
        (CheckpointError("no"), 1, "error: no\n"),
        (DataError("rows.jsonl:3: no"), 1, "error: rows.jsonl:3: no\n"),
        (ContractError("bf16"), 1, "error: bf16\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(__main__, "run", fail)
    assert __main__.main(["fit"]) == code
    assert capsys.readouterr() == ("", said)


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def fail(argv: list[str]) -> int:
        raise RuntimeError("ours")

    monkeypatch.setattr(__main__, "run", fail)
    with pytest.raises(RuntimeError, match="ours"):
        __main__.main([])


def test_another_rank_says_which_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "3")
    assert __main__.main(["nonsense"]) == 2
    assert capsys.readouterr().err.startswith("[rank 3] error: command line: got nonsense")


def test_last_is_found_again_when_no_other_job_can_write(recipe: list[str], calls: Calls, checkpoint: Any) -> None:
    checkpoint(3)
    assert commands.run(["fit", *recipe, "--ckpt_path", "last"]) == 0
    assert Path(calls[-1][1]["ckpt_path"]).name == "step-00000003"
    checkpoint(4)  # by a job that has ended meanwhile
    path, others = choosers[0]()
    assert Path(path).name == "step-00000004"
    assert others == ()
