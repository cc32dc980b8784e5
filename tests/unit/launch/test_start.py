"""What ``fit`` would refuse in the first seconds of a job is refused before it is submitted."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.__main__ import main
from lit_fsdp.launch import slurm_lint_places
from lit_fsdp.launch.slurm_lint import lint
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.unit.launch.fake_slurm import FakeSlurm
from tests.unit.launch.jobs import MODEL, planned
from tests.unit.launch.test_lint import COMMAND, FINE

TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 512}


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlurm(tmp_path / "fake", monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm_lint_places, "local_place", lambda path: None)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)


def rendered(capsys: pytest.CaptureFixture[str], **sections: Any) -> tuple[int, str]:
    recipe: dict[str, Any] = {
        "trainer": {"accelerator": "gpu", "devices": 8, "num_nodes": 2, "max_steps": 9, "default_root_dir": "run"},
        "model": {"name": {**TINY, "num_hidden_layers": 1}, "miniature": True},
        "data": {"train": "generated:64", "global_batch_size": 64},
    }
    for section, more in sections.items():
        recipe[section] = {**recipe.get(section, {}), **more}
    Path("r.yaml").write_text(yaml.safe_dump(recipe))
    code = main(["slurm", "render", "--config", "r.yaml"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("trainer", "says"),
    [
        ({"max_stepss": 10}, "write trainer.max_steps"),
        ({"max_time": "banana"}, "is not a valid duration"),
        ({"accelerator": "gpuu"}, "invalid accelerator name"),
        ({"callbacks": [{"class_path": "no.such.Thing"}]}, "no.such.Thing"),
        ({"val_check_interval": -3}, "invalid value -3 for val_check_interval"),
        ({"log_every_n_steps": "often"}, "trainer.log_every_n_steps"),
        ({"profiler": "stopwatch"}, "parameter of `Trainer`"),
        ({"strategy": {"init_args": {"wrap": {"classes": ["Nope"]}}}}, "which matches no module"),
    ],
)
def test_a_value_that_fit_refuses(capsys: pytest.CaptureFixture[str], trainer: dict[str, Any], says: str):
    code, err = rendered(capsys, trainer=trainer)
    assert (code, says in err) == (2, True), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"max_time": "00:12:00:00", "deterministic": True, "profiler": "simple", "logger": False},
        {"callbacks": [{"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}], "val_check_interval": 0.5},
        {"accelerator": "cuda", "barebones": False, "fast_dev_run": 2},
    ],
)
def test_gpus_and_nodes_of_the_job_are_not_looked_for_here(capsys: pytest.CaptureFixture[str], trainer: dict[str, Any]):
    code, err = rendered(capsys, trainer=trainer)
    assert (code, "error:" in err) == (0, False), err


def test_a_trial_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]):
    import torch

    rendered(capsys, trainer={"deterministic": True, "benchmark": True})
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == (False, False)
    assert {path.name for path in Path().iterdir()} == {"fake", "r.yaml"}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"name": MODEL}, "error: model.tokenizer: got None"),
        ({"name": "model", "tokenizer": None}, "without tokenizer files"),
        ({"name": {**TINY, "vocab_size": 100}, "tokenizer": "words"}, "at most the 100 embeddings"),
        ({"name": {**TINY, "num_hidden_layers": 1}, "tokenizer": "words"}, ""),
    ],
)
def test_a_model_has_a_tokenizer_that_fits(capsys: pytest.CaptureFixture[str], model: dict[str, Any], says: str):
    miniature_tokenizer().save_pretrained("words")
    Path("model").mkdir()
    Path("model/config.json").write_text(Path(MODEL).read_text())
    code, err = rendered(capsys, model={**model, "miniature": False})
    assert (code, says in err) == (2 if says else 0, True), err


def test_a_model_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = {}
    for state, more in (("offline", {"HF_HUB_OFFLINE": "1"}), ("online", {})):
        facts = dataclasses.replace(FINE, environment={**FINE.environment, "HF_HOME": str(tmp_path / "hf"), **more})
        for name, slurm in (("plain", {}), ("set there", {"setup": ["export HF_HOME=/shared/hf"]})):
            job, run = planned({**COMMAND, **slurm}, model={"name": "org/model", "tokenizer": "org/words"})
            errors, notes = lint(job, run, facts)
            found[state, name] = {e.field: e.fix for e in errors}, " ".join(notes)
    errors, _ = found["offline", "plain"]
    assert {field: fix.rpartition("run ")[2] for field, fix in errors.items()} == {
        "model.name": "lit-fsdp model prepare --name org/model",
        "model.tokenizer": "lit-fsdp model prepare --name org/words",
    }
    assert found["offline", "set there"][0] == {}
    assert found["online", "plain"][0] == {}
    assert "if its nodes reach the hub; before: lit-fsdp model prepare --name org/model" in found["online", "plain"][1]


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path):
    snapshot = tmp_path / "hf" / "hub" / "models--org--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    environment = {**FINE.environment, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    for name, is_fine in (("config.json", False), ("model.safetensors", True)):
        (snapshot / name).touch()
        job, run = planned(COMMAND, model={"name": "org/model"})
        errors, _ = lint(job, run, dataclasses.replace(FINE, environment=environment))
        assert [error.field for error in errors] == ([] if is_fine else ["model.name"])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"val": "data/nothing*.jsonl"}, "data.val: got data/nothing*.jsonl, a pattern that no file matches"),
        ({"train": ["generated:64", "data/[0-9].jsonl"]}, "data.train[1]: got data/[0-9].jsonl"),
        ({"train": "generated:nothing"}, "write generated:64"),
        ({"train": "data/*.jsonl"}, ""),
        ({"val": "imdb:train[:10%]"}, ""),
    ],
)
def test_rows_that_no_name_stands_for(capsys: pytest.CaptureFixture[str], data: dict[str, Any], says: str):
    Path("data").mkdir()
    Path("data/rows.jsonl").touch()
    code, err = rendered(capsys, data=data)
    assert (code, says in err) == (2 if says else 0, True), err
