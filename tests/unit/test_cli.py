"""Lightning's part of the command line, in this process: its keys, its classes, and a recipe that comes back whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml

from lit_fsdp import cli
from lit_fsdp.config.run import FACTORY, check_recipe
from lit_fsdp.errors import ConfigError, DataError
from lit_fsdp.signals import SignalFlags

pytestmark = pytest.mark.filterwarnings("ignore:.*GPU available but not used")


def recipe(**trainer: Any) -> dict[str, Any]:
    values = {
        "trainer": {"accelerator": "cpu", "devices": 2, "max_steps": 4, "default_root_dir": "run", **trainer},
        "model": {"name": "meta-llama/Llama-3.2-1B-Instruct", "miniature": True, "optim": {"lr": 1e-3}},
        "data": {"train": "generated:16", "global_batch_size": 4, "max_seq_length": 64},
        "checkpoint": {"every_steps": 2},
    }
    check_recipe(values, "fit")
    return values


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No signal handlers in the test's process, and jsonargparse as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning calls instantiate_classes
    monkeypatch.setattr(SignalFlags, "install", lambda self: None)
    before = dict(jsonargparse._common.parsing_settings)
    yield
    jsonargparse._common.parsing_settings.update(before)


def shown(values: dict[str, Any], capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as end:
        cli.run_verb("fit", values, [*flags, "--print_config"])
    assert end.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_a_printed_recipe_is_whole_and_comes_back_the_same(capsys: pytest.CaptureFixture[str]):
    first = shown(recipe(), capsys)
    assert first["trainer"]["strategy"]["class_path"] == FACTORY
    assert first["trainer"]["strategy"]["init_args"]["sharding"] == "full_shard"
    assert first["trainer"]["num_sanity_val_steps"] == 0
    assert "accumulate_grad_batches" not in first["trainer"]
    assert first["model"]["optim"]["beta2"] == 0.95
    assert first["checkpoint"] == {
        "every_steps": 2,
        "keep_last": 2,
        "keep_best": 1,
        "keep_every": None,
        "monitor": "val_loss",
        "mode": "min",
        "async_save": None,
        "max_total_gib": None,
    }
    check_recipe(first, "fit")
    assert shown(first, capsys) == first


def test_pieces_of_classes_are_put_together_by_lightnings_parser(capsys: pytest.CaptureFixture[str]):
    flags = ["--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateMonitor"]
    flags += ["--trainer.callbacks.logging_interval=step"]
    (callback,) = shown(recipe(), capsys, *flags)["trainer"]["callbacks"]
    assert callback["class_path"] == "lightning.pytorch.callbacks.LearningRateMonitor"
    assert callback["init_args"]["logging_interval"] == "step"


@pytest.mark.parametrize(
    ("values", "flags", "field", "fix"),
    [
        (recipe(max_step=3), [], "trainer.max_step", "write trainer.max_steps"),
        (recipe(), ["--trainer.callback+=x"], "trainer.callback", "write trainer.callbacks"),
        (recipe(), ["--trainer.loggers.name=x"], "trainer.loggers", "write trainer.logger"),
    ],
)
def test_keys_of_the_trainer(values: dict[str, Any], flags: list[str], field: str, fix: str):
    with pytest.raises(ConfigError) as caught:
        cli.run_verb("fit", values, flags)
    assert (caught.value.field, caught.value.fix) == (field, fix)


@pytest.mark.parametrize(
    "trainer",
    [
        {"callbacks": [{"class_path": "side_effect.Thing"}]},
        {"logger": {"class_path": "side_effect.Thing"}},
        {"plugins": [{"class_path": "side_effect.Thing"}]},
        {"profiler": {"class_path": "side_effect.Thing"}},
        {"callbacks": [{"class_path": "os.system", "init_args": {"command": "touch imported"}}]},
    ],
)
def test_other_peoples_classes_are_not_even_imported(
    trainer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "side_effect.py").write_text("open('imported', 'w').close()\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        cli.run_verb("fit", recipe(**trainer), [])
    assert "trainer" in str(caught.value)
    assert not (tmp_path / "imported").exists()
    assert "side_effect" not in sys.modules


@pytest.mark.parametrize(
    ("trainer", "needle"),
    [
        ({"max_steps": "many"}, "max_steps"),
        ({"accelerator": "abacus"}, "abacus"),
        ({"gradient_clip_algorithm": "sometimes"}, "sometimes"),
        ({"num_nodes": 0}, "num_nodes"),
    ],
)
def test_values_that_only_lightning_knows_to_be_wrong(trainer: dict[str, Any], needle: str):
    values = recipe()
    values["trainer"].update(trainer)
    with pytest.raises(ConfigError) as caught:
        cli.run_verb("fit", values, [])
    assert needle in str(caught.value)


def test_what_a_trainer_is_made_of(monkeypatch: pytest.MonkeyPatch):
    """Our callbacks and metrics.csv, beside what the recipe adds; switches of Lightning are obeyed."""
    made: list[Any] = []
    monkeypatch.setattr(cli.RecipeCLI, "run_trainer", lambda self, *choices: made.append(self))
    assert cli.run_verb("fit", recipe(), []) == 0
    own = ["StopOnSignal", "RunRecord", "Throughput", "PredictionWriter", "RunProgress", "Checkpoint"]
    trainer = made[0].trainer
    assert sorted(own) == sorted(n for n in (type(c).__name__ for c in trainer.callbacks) if n in own)
    assert [type(logger).__name__ for logger in trainer.loggers] == ["RunCSVLogger"]
    assert trainer.checkpoint_callback.config.every_steps == 2
    assert made[0].datamodule.config.max_seq_length == 64
    assert made[0].model.config.optim.lr == 1e-3
    off = recipe(enable_checkpointing=False, enable_progress_bar=False, logger=False)
    assert cli.run_verb("fit", off, []) == 0
    assert made[1].trainer.checkpoint_callbacks == []
    assert made[1].trainer.progress_bar_callback is None
    assert made[1].trainer.loggers == []


@pytest.mark.parametrize(
    ("trainer", "data", "field"),
    [
        ({"devices": 3}, {"global_batch_size": 4}, "data.global_batch_size"),
        ({"devices": 3, "strategy": {"sharding": "hybrid_shard", "replicate_degree": 2}}, {}, None),
        ({"strategy": {"wrap": ["GPT2Block"]}}, {}, "trainer.strategy.init_args.wrap.classes"),
    ],
)
def test_rules_on_ranks_and_units_hold_before_any_process_starts(
    trainer: dict[str, Any], data: dict[str, Any], field: str | None
):
    values = recipe()
    values["trainer"]["strategy"]["init_args"].update(trainer.pop("strategy", {}))
    values["trainer"].update(trainer)
    values["data"].update(data)
    with pytest.raises(ConfigError) as caught:
        cli.run_verb("fit", values, [])
    assert caught.value.field == (field or "trainer.strategy.init_args.replicate_degree")
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("source", "needle"),
    [
        ("missing.jsonl", r"missing\.jsonl: no such file"),
        ("broken.jsonl", r"broken\.jsonl:2"),
        ("empty.jsonl", r"empty\.jsonl.*no rows"),
        ("names.json", r"names\.json: row 0: str"),  # and not taken for a list of sources
    ],
)
def test_rows_are_read_before_any_process_starts(source: str, needle: str):
    Path("broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    Path("empty.jsonl").write_text("\n")
    Path("names.json").write_text('["a.jsonl"]')
    values = recipe()
    values["data"]["train"] = source
    with pytest.raises(DataError, match=needle):
        cli.run_verb("fit", values, [])
    assert not Path("run").exists()
